"""Producer: leases prompts, has an engine generate, completes each response as it finishes, and swaps in new
versions at its safe points.

A response is completed in the event-loop turn in which it finishes; those that finish together go in one
command. New weights are fetched and verified while the engine generates; when they are loaded is the swap policy's to
say (``swapping``), how, and what becomes of a load that fails, is ``Loading``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DeadlineExceeded, Ended, EngineError, LeaseLost, VersionNeeded
from ..interfaces import Completion, Request, RolloutEngine
from ..queue import AsyncLeasedBatch, TransferQueue
from ..types import VERSION_SPANS, Ragged, Sampling, one_version
from ..types import events as ev
from ..weights import Loading, WeightUpdates, check_swap
from .specs import rollout_task
from .swapping import Swapping
from .text import Text
from .work import tokenizer_file

WAIT_S = 3600.0
"""The longest a producer waits for prompts or versions before it fails with the reason (seconds)."""
CLOSE_S = 30.0
GIVE_UP_AFTER = 8
"""Requests refused in a row, with none accepted, after which a producer says so and ends."""


@dataclass
class _Work:
    """A lease being generated: which rows are finished but not yet completed."""

    batch: AsyncLeasedBatch
    prompt_ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]]
    version: int
    began: float
    groups: int = 0
    tokens: int = 0
    done: deque[tuple[int, Completion]] = field(default_factory=deque)
    left: set[int] = field(default_factory=set)
    """Rows that are not completed yet."""
    requests: dict[asyncio.Task[None], set[int]] = field(default_factory=dict)
    """Those that run in the engine, and the rows that each still owes."""

    def forget(self, ended: np.ndarray[Any, np.dtype[np.int64]]) -> list[asyncio.Task[None]]:
        """Rows with these ids have ended: nothing more is said of them. Gives the requests that work for nothing else; a group
        ends as a whole."""
        lost = self.among(ended)
        self.left -= lost
        self.done = deque((at, completion) for at, completion in self.done if at not in lost)
        return [request for request, waiting in self.requests.items() if not lost.isdisjoint(waiting)]

    def among(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> set[int]:
        """Positions of the rows that have one of these ids."""
        return set(np.flatnonzero(np.isin(self.batch.ids, ids)).tolist())


class Producer:
    """Runs one engine until the stream ends: ``work`` in this thread, or ``run`` on an event loop. Called once.

    ``prompt``: the column of prompts; "prompt_ids" holds token ids, any other holds text, and ``text`` is the folder of its
    tokenizer. ``prefix``: what the names of the columns it gives begin with. ``needs_first``: generate nothing before a
    published version is loaded; else the engine's own weights count as version 0. ``swap``: when new versions are loaded:
    "drain", "boundary" or "in_flight". ``verify``: what a load must prove beyond the names of its tensors: "probe", "held".
    Raises ConfigError, with the reason, for what the engine cannot do.
    """

    def __init__(
        self,
        queue: TransferQueue,
        engine: RolloutEngine,
        *,
        task: str = "rollout",
        prefix: str = "",
        sampling: Sampling | None = None,
        prompt: str = "prompt_ids",
        text: Text | str | Path | None = None,
        needs_first: bool = False,
        swap: str = "drain",
        verify: Sequence[str] = (),
    ) -> None:
        if text is not None and not isinstance(text, Text):
            text = Text(tokenizer_file(text, ""))
        if prompt != "prompt_ids" and text is None:
            raise ConfigError(f"column {prompt!r} is text; a producer needs a tokenizer to encode it")
        check_swap(type(engine).__name__, engine.capabilities, swap)
        self._queue, self._engine, self._task, self._prefix = queue, engine, task, prefix
        self._connection = queue._port.connection
        self._sampling = sampling or Sampling()
        self._prompt, self._text = prompt, text
        self._loaded: int | None = None if needs_first else 0
        self._wake = asyncio.Event()
        """There is something to look at: a version, a failure, room, an engine that is idle."""
        self._updates = WeightUpdates(queue, self._loaded, self._wake.set, rename=engine.weight_name)
        self._swapping = Swapping(self._updates, swap, self._wake.set)
        self._loading = Loading(engine, self._updates, verify, running=not self._swapping.drains)
        self._newest = 0  # version that the engine was given
        self._load_ended: asyncio.Event | None = None  # of the load that is under way
        self._asking: asyncio.Task[AsyncLeasedBatch] | None = None
        self._asked_with: int | None = None  # what was loaded then
        self._running: dict[asyncio.Task[None], _Work] = {}
        self._ended_early = np.empty(0, np.int64)  # rows of a lease that had not come here yet when they ended
        self._rows = 0
        self._largest = 1  # rows of a group
        self._completing = asyncio.Lock()
        self._finished: dict[int, _Work] = {}
        self._flush_wanted = asyncio.Event()
        self._refused: set[int] = set()
        self._cpu_s = 0.0
        self._failure: BaseException | None = None
        self._idle_since: float | None = time.monotonic()

    def work(self) -> None:
        """Declare the task and generate here, in this thread, until the stream ends. Raises what ``run`` raises."""
        spec = rollout_task(self._task, self._prompt, self._prefix, self._text is not None)
        self._queue.declare(**{name: getattr(spec, name) for name in spec.__struct_fields__})
        asyncio.run(self.run())

    async def run(self) -> None:
        """Generate until the stream ends. Raises what the engine raised, DeadlineExceeded with the reason, and
        ConfigError when this connection is another engine's replica."""
        self._aio = self._queue.aio
        self._updates.claim()
        background = [asyncio.create_task(self._flush()), asyncio.create_task(self._hear_of_lost())]
        try:
            await self._updates.join()
            while await self._turn():
                pass
            await self._drain()
        finally:
            tasks = [*background, *self._running, *([self._asking] if self._asking is not None else [])]
            await self._end(tasks)

    async def _end(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """Whatever fails on the way, and when it is cancelled: this session is no replica any more."""
        try:
            self._swapping.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):  # an engine that hangs must not hide why
                await asyncio.wait_for(self._engine.close(), CLOSE_S)
        finally:
            try:
                await self._updates.close()
            finally:
                await self._connection.wire.aclose_loop()

    async def _turn(self) -> bool:
        """Swap what is due, else begin what is allowed. False when the stream has ended."""
        self._wake.clear()
        self._raise_failure()
        if self._swapping.waits_for_boundary and not self._running:
            await self._take_back()  # or new prompts would begin in the moment that permission takes
            if not self._running:
                await self._swapping.ask_now()
        if self._swapping.due(idle=not self._running):
            await self._swap()
            return True
        room = self._engine.capabilities.max_rows - self._rows
        if self._asking is None:
            least = self._largest if self._rows else 1  # a lease is a whole group at least
            if self._loaded is None and self._updates.ended:
                return False  # it was to generate nothing before it had a version, and none will come
            if self._loaded is None or room < least:
                await self._first_of(self._wake.wait())
                return True
            self._asking = asyncio.create_task(self._aio.get(self._task, room, timeout_s=WAIT_S))
            self._asked_with = self._loaded
        await self._first_of(self._asking, self._wake.wait())
        if self._asking.done():
            asked, self._asking = self._asking, None
            try:
                self._begin(asked.result())
            except Ended:
                return False
            except VersionNeeded:  # this replica is given nothing before it has loaded a newer one
                if self._asked_with == self._loaded:  # in flight it may have done so since it asked
                    await self._first_of(self._wake.wait())
        return True

    def _raise_failure(self) -> None:
        failure = self._failure or self._updates.failure or self._swapping.failure
        if failure is not None:
            raise failure

    async def _first_of(self, *waits: Awaitable[Any]) -> None:
        """Wait for one of several things."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        done, _ = await asyncio.wait(tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:  # made here, so ended here
                task.cancel()
        if not done:
            why = await self._updates.why()
            raise DeadlineExceeded(f"nothing came for {WAIT_S:g} s: no version to load, no row to finish{why}")

    # ---- generating

    def _begin(self, batch: AsyncLeasedBatch) -> None:
        """Start every group of a lease. Rows of a group share their prompt."""
        firsts = np.flatnonzero(np.diff(batch.groups, prepend=-1))
        if self._prompt == "prompt_ids":
            prompts = [batch.ragged("prompt_ids")[int(i)].astype(np.int32) for i in firsts]
        else:
            assert self._text is not None
            texts = batch.texts(self._prompt)
            prompts = self._text.encode([texts[i] for i in firsts])
        assert self._loaded is not None
        largest = int(np.diff(firsts, append=batch.rows).max())
        self._largest = max(self._largest, largest)
        if largest > self._engine.capabilities.max_rows:
            raise ConfigError(
                f"groups of {largest} do not fit {type(self._engine).__name__}, which generates"
                f" {self._engine.capabilities.max_rows} rows at once; raise its max_rows"
            )
        self._end_wait()
        work = _Work(batch, [], self._loaded, time.monotonic())
        lost, self._ended_early = work.among(self._ended_early), np.empty(0, np.int64)
        for first, stop, prompt in zip(firsts, np.append(firsts[1:], batch.rows), prompts, strict=True):
            work.prompt_ids += [prompt] * int(stop - first)
            waiting = set(range(int(first), int(stop)))
            if not lost.isdisjoint(waiting):
                continue
            work.left |= waiting
            work.groups += 1
            self._rows += len(waiting)
            task = asyncio.create_task(self._generate(work, waiting, prompt))
            self._running[task] = work
            work.requests[task] = waiting
            task.add_done_callback(self._ended)
        if not self._running:
            self._idle_since = time.monotonic()

    async def _generate(
        self, work: _Work, waiting: set[int], prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> None:
        """One group. ``waiting``: its rows, and then those that are not there yet."""
        first, stop = min(waiting), max(waiting) + 1
        seed = None
        if self._sampling.seed is not None:
            seed = hash((self._sampling.seed, int(work.batch.ids[first]))) & 0x7FFFFFFF
        try:
            async for completion in self._engine.generate(Request(prompt, self._sampling, stop - first, seed)):
                self._check(completion, first, waiting, work)
                waiting.discard(first + completion.index)
                self._rows -= 1  # long responses of a group must not keep the places of its short ones
                if self._asking is None:
                    self._wake.set()
                work.done.append((first + completion.index, completion))
                work.tokens += len(completion.token_ids)
                self._finished[work.batch.token] = work
                self._flush_wanted.set()
            if waiting:
                raise EngineError(
                    f"the engine ended a request with {len(waiting)} of {stop - first} responses missing"
                )
            self._refused.clear()
        except EngineError as error:
            if self._load_ended is not None:
                # What an engine loses with its weights is not the prompt's fault. A load that fails cancels this here.
                await self._load_ended.wait()
                work.left -= waiting
                with contextlib.suppress(LeaseLost):
                    await work.batch.give_back(index=sorted(waiting), reason=f"EngineError: {error}")
                return
            self._refused.add(int(work.batch.groups[first]))
            if len(self._refused) >= GIVE_UP_AFTER:
                text = f"{len(self._refused)} prompts in a row were refused, the last because: {error}"
                raise ConfigError(text) from error
            self._note(f"a prompt was refused: {error}", "warning")
            work.left -= waiting
            with contextlib.suppress(LeaseLost):
                await work.batch.give_back(index=sorted(waiting), reason=f"EngineError: {error}", blame=True)

    def _check(self, completion: Completion, first: int, waiting: set[int], work: _Work) -> None:
        """What an engine says of a response must hold together, or it would end up in another row's place."""
        name, tokens = type(self._engine).__name__, len(completion.token_ids)
        if first + completion.index not in waiting:
            raise EngineError(f"{name} gave response {completion.index} twice, or more than were asked for")
        if len(completion.logprobs) != tokens or not tokens:
            raise EngineError(f"{name} gave {tokens} tokens with {len(completion.logprobs)} log-probs")
        if self._engine.capabilities.token_versions:
            ends = [0, *(span.end for span in completion.spans)]
            if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != tokens:
                raise EngineError(f"{name} gave version spans {list(completion.spans)} for {tokens} tokens")
            versions = [span.version for span in completion.spans]
            if versions != sorted(versions) or versions[0] < work.version or versions[-1] > self._newest:
                raise EngineError(
                    f"{name} says that versions {versions} drew tokens, one after another; it had {work.version} when"
                    f" the request began, and {self._newest} now"
                )

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._running.pop(task)
        self._rows -= len(work.requests.pop(task))
        work.groups -= 1
        if not work.groups:
            cpu_s, self._cpu_s = self._engine.cpu_s - self._cpu_s, self._engine.cpu_s
            self._span(
                "generate", work.began, time.monotonic() - work.began, rows=work.batch.rows, tokens=work.tokens,
                version=work.version, cpu_s=cpu_s,
            )  # fmt: skip
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
        if not self._running:
            self._idle_since = time.monotonic()
        self._wake.set()

    # ---- what is not wanted any more

    async def _hear_of_lost(self) -> None:
        """Rows that end while they are generated (too late for any step, cancelled, their group failed) make room at once."""
        try:
            while True:
                with contextlib.suppress(DeadlineExceeded):
                    await self._abort_lost(await self._aio.lost(timeout_s=WAIT_S))
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    async def _abort_lost(self, ended: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._ended_early = np.concatenate([self._ended_early, ended])  # their lease may be on its way
        works = {work.batch.token: work for work in self._running.values()} | self._finished
        requests = [request for work in works.values() for request in work.forget(ended)]
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        if requests:
            self._note(f"{len(requests)} requests were aborted: their rows had ended", "info")

    # ---- completing

    async def _flush(self) -> None:
        """Complete finished rows: all that finished in the same turn of the loop, in one command a lease."""
        try:
            while True:
                await self._flush_wanted.wait()
                await asyncio.sleep(0)  # whoever the engine woke in this turn adds its rows first
                self._flush_wanted.clear()
                await self._complete_finished()
        except Exception as error:
            self._failure = self._failure or error
            self._wake.set()

    async def _complete_finished(self) -> None:
        async with self._completing:
            finished, self._finished = self._finished, {}
            for work in finished.values():
                await self._complete(work)

    async def _complete(self, work: _Work) -> None:
        rows, work.done = work.done, deque()
        if not rows:
            return  # they went with an earlier command, sent while this one was due
        index = [i for i, _ in rows]
        work.left.difference_update(index)
        done = [c for _, c in rows]
        ids = Ragged.of([np.asarray(c.token_ids, np.int32) for c in done])
        columns = {
            "response_ids": ids,
            "logprobs": Ragged.of([np.asarray(c.logprobs, np.float32) for c in done]),
            VERSION_SPANS: _spans(done, ids, work.version, self._engine.capabilities.token_versions),
        }
        if self._text is not None:
            columns["response"] = self._text.decode([np.asarray(c.token_ids) for c in done])  # type: ignore[assignment]
        if self._prompt != "prompt_ids":
            columns["prompt_ids"] = Ragged.of([work.prompt_ids[i] for i in index])
        try:
            await work.batch.complete({self._prefix + name: v for name, v in columns.items()}, index=index)
        except LeaseLost as error:
            self._note(f"{len(index)} responses came too late: {error}", "warning")

    # ---- new versions

    async def _swap(self) -> None:
        """Load the version that is due. While requests run, none is completed before the weights are proven that drew it."""
        update = self._swapping.take()
        if self._swapping.drains:
            await self._take_back()
            began = time.monotonic()
            ran = bool(self._running)
            try:
                await self._drain()
                if ran:
                    self._span(
                        "wait", began, time.monotonic() - began, detail=f"draining for version {update.version}"
                    )
                update = await self._swapping.newer(update)
            except BaseException:
                update.release()
                raise
        async with self._completing:
            self._end_wait()
            began, self._newest = time.monotonic(), update.version
            self._load_ended = load_ended = asyncio.Event()
            try:
                if await self._loading.load(update, self._abort if self._running else None):
                    self._loaded = update.version
            finally:
                self._load_ended = None
                load_ended.set()
            ended = time.monotonic()
        if not self._running:
            self._idle_since = ended
        self._span("load", began, ended - began, version=update.version)

    async def _take_back(self) -> None:
        """Ask for no more prompts. What is given already is begun."""
        asked, self._asking = self._asking, None
        if asked is None:
            return
        asked.cancel()  # the server takes the request back, and rows it may just have leased
        await asyncio.gather(asked, return_exceptions=True)
        if not asked.cancelled() and asked.exception() is None:
            self._begin(asked.result())

    async def _abort(self) -> None:
        """Give back all that runs: weights that are not proven drew some of its tokens, and nobody knows which."""
        works = {work.batch.token: work for work in self._running.values()} | self._finished
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._finished.clear()
        for work in works.values():
            if work.left:
                with contextlib.suppress(LeaseLost):
                    await work.batch.give_back(index=sorted(work.left), reason="a load of new weights failed")
                work.left.clear()

    async def _drain(self) -> None:
        while self._running:
            done, running = await asyncio.wait(self._running, timeout=WAIT_S)
            if not done:
                raise DeadlineExceeded(
                    f"{len(running)} requests have been in the engine for {WAIT_S:g} s without an end"
                )
        await self._complete_finished()
        self._raise_failure()

    def _end_wait(self) -> None:
        """Something is done again: show the time in which nothing was."""
        if self._idle_since is not None and (waited := time.monotonic() - self._idle_since) > 0.001:
            self._span("wait", self._idle_since, waited)
        self._idle_since = None

    def _span(self, kind: str, began: float, seconds: float, **more: Any) -> None:
        name = self._connection.name
        self._connection.report(ev.Span(time_s=began, worker=name, kind=kind, seconds=seconds, **more))

    def _note(self, text: str, level: str) -> None:
        self._connection.report(
            ev.Note(time_s=time.monotonic(), worker=self._connection.name, text=text, level=level)
        )


def _spans(done: list[Completion], ids: Ragged, version: int, token_versions: bool) -> Ragged:
    """The version spans of finished responses: the engine's own, or all of the version loaded."""
    if token_versions:
        return Ragged.of([np.asarray(c.spans, np.int64).reshape(-1, 3) for c in done])
    return one_version(version, ids.lengths)
