"""RolloutWorld: a rollout engine, its running requests and the permitted answers; each step is logged."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....errors import EngineError
from ....interfaces import Completion, Request
from ....types import VersionSpan
from ....weights import check_held
from ..check import CheckFailed, expect
from .lab import Ids, RolloutLab

HELD_S = 10.0


@dataclass(eq=False)
class Part:
    """One request to the engine. ``had``: the number of tokens of the response drawn before, by interrupted
    requests."""

    request: Request
    task: asyncio.Task[list[Completion]]
    had: int = 0
    may_abort: bool = False


@dataclass(eq=False)
class Generation:
    """The requests of one step. ``versions``: loaded since its start. ``may_fail``: True after a torn load."""

    number: int
    prompt: Ids
    rows: int
    versions: set[int]
    may_fail: bool
    parts: list[Part] = field(default_factory=list)


class RolloutWorld:
    """Steps raise CheckFailed for an answer other than the policy's.

    ``steps``: the log. ``unsure``: True after a torn load, until a whole one: the engine may
    refuse. ``anew``: use a new engine; else the lab's, at version 0, if there is one.
    """

    def __init__(self, lab: RolloutLab, *, anew: bool) -> None:
        self.lab = lab
        self.running: list[Generation] = []
        self.begun = 0
        self._prompts = lab.policy.prompts(4, seed=40)
        self.unsure = False
        self._go = threading.Event()
        self._pace_s = 0.0
        first = "take the engine as it is, on version 0"
        if anew or not lab.made:
            lab.close()
            lab.start()
            first = "make the engine"
        self.steps = [f"{first}, and ask for 24 tokens: prompt {self._prompts[0].tolist()}, greedy"]

    @property
    def rows(self) -> int:
        """The number of running responses."""
        return sum(each.rows for each in self.running)

    def has_room(self) -> bool:
        """Return True if two more rows fit."""
        return self.rows + 2 <= max(self.lab.rows, 2)

    # ---- the steps

    def try_out(self) -> None:
        """Ask once; the duration is the unit of later waits."""
        self.lab.call(self._try_out(self._prompts[0]), "a first generation")

    def begin(self, prompt: int, rows: int, tokens: int, greedy: bool) -> None:
        """Begin a generation."""
        self.begun += 1
        ids, rows = self._prompts[prompt], min(rows, self.lab.rows)
        now = Generation(self.begun, ids, rows, {self.lab.version}, self.unsure)
        request = self._request(ids, tokens, rows, temperature=0.0 if greedy else 1.0, seed=self.begun)
        drawn = "greedy" if greedy else "drawn"
        text = f"begin #{now.number}: prompt {ids.tolist()}, {rows} of {tokens} tokens, {drawn}"
        self._do(text, self._begin(now, request))
        self.running.append(now)

    def advance(self, share: float) -> None:
        """Let the engine run for a share of the first generation's time."""
        self._do(f"let it run for {share:.0%} of the time of 24 tokens", asyncio.sleep(self._pace_s * share))

    def release(self) -> None:
        """End the hold after a failed step."""
        self._go.set()

    def finish(self, which: int) -> None:
        """Wait for a generation and verify it."""
        now = self.running.pop(which % len(self.running))
        self._do(f"finish #{now.number}", self._finish(now))

    def cancel(self, which: int) -> None:
        """Cancel a generation."""
        now = self.running.pop(which % len(self.running))
        self._do(f"cancel #{now.number}", self._cancel(now))

    def load_next(self, older: bool) -> None:
        """Load the next version, or the one before."""
        self._load_version(max(self.lab.version + (-1 if older else 1), 0))

    def _load_version(self, version: int) -> None:
        swap, how = self.lab.engine.capabilities.swap, ""
        if self.running:
            how = ", interrupting what runs" if "partial" in swap else ", when what runs has ended"
            how = ", while requests run" if "in_flight" in swap else how
        self._do(f"load version {version}{how}", self._load(version))

    def load_torn(self, share: float) -> None:
        """Break off the load of the next version."""
        version, count = self.lab.version + 1, len(self.lab.policy.tensors(self.lab.version))
        breaks = min(int(share * count), count - 1)
        text = f"load version {version}, which breaks off before tensor {breaks} of {count}"
        self._do(text, self._load_torn(version, breaks))

    def interrupt(self) -> None:
        """Interrupt all, and continue."""
        self._do("interrupt what runs, and go on", self._interrupt())

    def score(self) -> None:
        """Finish all, then score a response."""
        self._do("finish all, and score given responses", self._score())

    def refuse(self) -> None:
        """Send an empty prompt."""
        self._do("ask with an empty prompt", self._refuse())

    def remake(self) -> None:
        """Close the engine under load and make another, as after the loss of a worker."""
        self._do("close the engine, whatever runs, and make it anew", self._close())
        self._go.set()
        self.lab.close()
        self.lab.start()
        self.running, self.unsure = [], False

    def end(self, *, back: bool) -> None:
        """Finish all. ``back``: load version 0 for the next sequence."""
        self._do("finish all", self._finish_all())
        self.running = []
        if back and (self.lab.version or self.unsure):
            self._load_version(0)
        self._go.set()

    # ---- what they do

    def _do(self, what: str, work: Coroutine[Any, Any, Any]) -> None:
        self.steps.append(what)
        self.lab.doing = ""
        self._go.set()
        self._go = go = threading.Event()

        async def _step() -> None:
            try:
                await work
            finally:
                # The loop stands still until the next step, so that an engine in it gets as far in each as the step says,
                # however long the next takes to come. In two turns: in the first is told that this step is done.
                loop = asyncio.get_running_loop()
                loop.call_soon(loop.call_soon, go.wait, HELD_S)

        self.lab.call(_step(), f"step {len(self.steps)}, {what},")

    def _request(self, prompt: Ids, tokens: int, rows: int = 1, **more: Any) -> Request:
        return self.lab.request(prompt, rows, max_tokens=tokens, **more)

    async def _try_out(self, prompt: Ids) -> None:
        began = time.monotonic()
        (got,) = await self.lab.answer(self._request(prompt, 24))
        self._pace_s = time.monotonic() - began
        self.lab.check_response(prompt, got, self.lab.policy.greedy(self.lab.version, prompt, 24))

    async def _begin(self, now: Generation, request: Request, had: int = 0) -> None:
        task = asyncio.create_task(self.lab.answer(request, aborted=True))
        now.parts.append(Part(request, task, had))
        await asyncio.sleep(0)

    async def _finish(self, now: Generation) -> list[tuple[Part, Completion]]:
        parts, now.parts = now.parts, []
        got: list[tuple[Part, Completion]] = []
        for part in parts:
            try:
                completions = await part.task
            except EngineError as error:
                expect(now.may_fail, f"#{now.number} raised EngineError: {error}")
                continue
            for completion in completions:
                self._verify(now, part, completion)
                got.append((part, completion))
        return got

    async def _finish_all(self) -> None:
        for now in self.running:
            await self._finish(now)

    async def _cancel(self, now: Generation) -> None:
        for part in now.parts:
            part.task.cancel()
        fine = (asyncio.CancelledError, list, *([EngineError] if now.may_fail else []))
        for ended in await asyncio.gather(*(part.task for part in now.parts), return_exceptions=True):
            expect(isinstance(ended, fine), f"#{now.number}, which was cancelled, raised {ended!r}")

    async def _load(self, version: int) -> None:
        swap = self.lab.engine.capabilities.swap
        rests: list[tuple[Generation, Request, int]] = []
        if "in_flight" not in swap:
            rests = await self._stop() if "partial" in swap else []
            await self._finish_all()
        for now in self.running:
            now.versions = now.versions | {version} if "in_flight" in swap else {version}
        await self.lab.update(version)
        await self._go_on(rests)
        self.unsure = False

    async def _load_torn(self, version: int, breaks_after: int) -> None:
        if "in_flight" not in self.lab.engine.capabilities.swap:
            await self._finish_all()
        for now in self.running:
            now.may_fail = True
        held = self.lab.version
        try:
            await self.lab.load(self.lab.make_update(version, breaks_after=breaks_after))
        except Exception:
            self.unsure = True
        else:
            raise CheckFailed("load_weights() returned, as if all was well, when the version broke off")
        finally:
            self.lab.version = held

    async def _interrupt(self) -> None:
        await self._go_on(await self._stop())

    async def _stop(self) -> list[tuple[Generation, Request, int]]:
        for part in (part for now in self.running for part in now.parts):
            part.may_abort = True
        await self.lab.engine.interrupt()
        rests = []
        for now in self.running:
            for part, got in await self._finish(now):
                asked, sampling = part.request, part.request.sampling
                left = sampling.max_tokens - len(got.token_ids)
                if got.finish_reason != "aborted" or not left:
                    continue
                so_far = np.concatenate([asked.prompt_ids, np.asarray(got.token_ids, np.int32)])
                had, first = part.had + len(got.token_ids), asked.first + got.index
                more: dict[str, Any] = {"temperature": sampling.temperature, "seed": asked.seed}
                rests.append((now, self._request(so_far, left, drawn=had, first=first, **more), had))
        return rests

    async def _go_on(self, rests: list[tuple[Generation, Request, int]]) -> None:
        for now, request, had in rests:
            await self._begin(now, request, had)

    async def _score(self) -> None:
        await self._finish_all()
        try:
            (scored,) = await self.lab.engine.logprobs([self._prompts[0].tolist()], [self._prompts[1].tolist()])
        except EngineError as error:
            expect(self.unsure, f"logprobs() raised EngineError: {error}")
            return
        given = Completion(0, self._prompts[1], np.asarray(scored, np.float32))
        self.lab.check_logprobs(self._prompts[0], given, when=" by logprobs()")
        if self.lab.engine.capabilities.held_weights and not self.unsure:
            update = self.lab.make_update(self.lab.version)
            check_held(update, self.lab.engine.held_weights())
            update.release()

    async def _refuse(self) -> None:
        with contextlib.suppress(EngineError):
            await self.lab.answer(self._request(np.zeros(0, np.int32), 1))
            raise CheckFailed("an empty prompt was answered")

    async def _close(self) -> None:
        await self.lab.close_engine()
        tasks = [part.task for now in self.running for part in now.parts]
        if tasks:
            self.lab.doing = "waiting for what ran when the engine was closed"
            await asyncio.wait(tasks)
        for task in tasks:
            error = None if task.cancelled() else task.exception()
            fine = error is None or isinstance(error, EngineError)
            expect(fine, f"what ran when it was closed raised {error!r}")

    # ---- what an answer may be

    def _verify(self, now: Generation, part: Part, got: Completion) -> None:
        count, name, most = len(got.token_ids), f"#{now.number}", part.request.sampling.max_tokens
        expect(part.may_abort or got.finish_reason != "aborted", f"{name} was aborted, and nobody interrupted it")
        full = got.finish_reason != "length" or count == most
        expect(full, f"{name} ended for its length at {count} of {most} tokens")
        held = " and ".join(map(str, sorted(now.versions)))
        spans = got.spans or [VersionSpan(max(now.versions), 0, count)]
        for span in spans if count else ():
            named = span.version in now.versions
            expect(named, f"a span of {name} names version {span.version}; held meanwhile was {held}")
            self._verify_span(now, part, got, span)

    def _verify_span(self, now: Generation, part: Part, got: Completion, span: VersionSpan) -> None:
        policy, (version, start, end) = self.lab.policy, span
        ids, prompt = np.asarray(got.token_ids, np.int32), part.request.prompt_ids
        before, drawn = np.concatenate([prompt, ids[:start]]), ids[start:end]
        if part.request.sampling.temperature == 0:
            wanted, at = policy.greedy(version, before, len(drawn)), part.had + start
            again = policy.greedy(version, now.prompt, at + len(drawn))[
                at:
            ]  # of a policy that is no function of the tokens
            right = np.array_equal(drawn, wanted) or np.array_equal(drawn, again)
            expect(
                right or self.lab.is_greedy(before, drawn, version),
                f"tokens {start} to {end} of #{now.number} are {drawn.tolist()}, and version {version} gives"
                f" {wanted.tolist()}",
            )
        if far := self.lab.off(prompt, got, span):
            found = self.lab.why(prompt, got, span)
            said = f"log-probs of tokens {start} to {end} of #{now.number} are {far} from those of version {version}"
            raise CheckFailed(f"{said}{found.text}", found.cause, found.hint)
