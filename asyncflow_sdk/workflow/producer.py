"""Producer: leases prompts, has an engine generate, completes each response as it finishes, and swaps in new
versions at its safe points.

A response is completed in the event-loop turn in which it finishes; those that finish together go in one
command. New weights are fetched and verified while the engine generates; when a version is staged, no new
prompt is begun, what runs is finished, the engine loads, and the ledger hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigError, DeadlineExceeded, Ended, EngineError, LeaseLost, VersionNeeded
from ..interfaces import Completion, Request, RolloutEngine, WeightUpdate
from ..queue import AsyncLeasedBatch, TransferQueue
from ..types import VERSION_SPANS, Ragged, Sampling, one_version
from ..types import events as ev
from ..weights import WeightUpdates
from .text import Text

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


class Producer:
    """Runs one engine on the running event loop until the stream ends. ``run`` is called once.

    ``needs_first``: generate nothing before a published version is loaded; else the engine's own weights
    count as version 0.
    """

    def __init__(
        self,
        queue: TransferQueue,
        engine: RolloutEngine,
        *,
        task: str = "rollout",
        sampling: Sampling | None = None,
        prompt: str = "prompt_ids",
        text: Text | None = None,
        needs_first: bool = False,
    ) -> None:
        if prompt != "prompt_ids" and text is None:
            raise ConfigError(f"column {prompt!r} is text; a producer needs a tokenizer to encode it")
        if "drain" not in engine.capabilities.swap:
            raise ConfigError(f"{type(engine).__name__} cannot swap after draining, which this producer does")
        self._queue, self._engine, self._task = queue, engine, task
        self._connection = queue._port.connection
        self._sampling = sampling or Sampling()
        self._prompt, self._text = prompt, text
        self._loaded: int | None = None if needs_first else 0
        self._running: set[asyncio.Task[None]] = set()
        self._rows = 0
        self._largest = 1  # rows of a group
        self._staged: WeightUpdate | None = None
        self._swap_wanted = asyncio.Event()  # a version is staged, or something failed
        self._room = asyncio.Event()  # rows have finished
        self._completing = asyncio.Lock()
        self._finished: dict[int, _Work] = {}
        self._flush_wanted = asyncio.Event()
        self._refused: set[int] = set()
        self._cpu_s = 0.0
        self._failure: BaseException | None = None
        self._idle_since: float | None = time.monotonic()

    async def run(self) -> None:
        """Generate until the stream ends. Raises what the engine raised, and DeadlineExceeded with the reason."""
        self._aio = self._queue.aio
        self._updates = WeightUpdates(self._queue, self._loaded)
        background = [asyncio.create_task(self._watch()), asyncio.create_task(self._flush())]
        try:
            if self._loaded is not None:
                await self._aio.loaded(self._loaded)
            while await self._turn():
                pass
            await self._drain()
        finally:
            for task in (*background, *self._running):
                task.cancel()
            await asyncio.gather(*background, *self._running, return_exceptions=True)
            with contextlib.suppress(asyncio.TimeoutError):  # an engine that hangs must not hide why
                await asyncio.wait_for(self._engine.close(), CLOSE_S)
            self._updates.close()
            await self._connection.wire.aclose_loop()

    async def _turn(self) -> bool:
        """Swap what is staged, else begin what is allowed. False when the stream has ended."""
        if self._failure is not None:
            raise self._failure
        if self._staged is not None:
            await self._swap()
        room = self._engine.capabilities.max_rows - self._rows
        if self._loaded is None or room < (self._largest if self._rows else 1):  # a lease is a whole group at least
            await self._first_of(self._swap_wanted.wait(), self._room.wait())
            self._room.clear()
            return True
        asking = asyncio.create_task(self._aio.get(self._task, room, timeout_s=WAIT_S))
        await self._first_of(asking, self._swap_wanted.wait())
        if not asking.done():
            asking.cancel()  # the server takes the request back, and rows it may just have leased
            await asyncio.gather(asking, return_exceptions=True)
            return True
        try:
            self._begin(asking.result())
        except Ended:
            return False
        except VersionNeeded:
            await self._first_of(self._swap_wanted.wait())
        return True

    async def _first_of(self, *waits: Awaitable[Any]) -> None:
        """Wait for one of several things."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        done, _ = await asyncio.wait(tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:  # made here, so ended here
                task.cancel()
        if not done:
            raise DeadlineExceeded(f"nothing came for {WAIT_S:g} s: no version to load, no row to finish")

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
        work = _Work(batch, [], self._loaded, time.monotonic(), groups=len(firsts))
        self._rows += batch.rows
        for first, stop, prompt in zip(firsts, np.append(firsts[1:], batch.rows), prompts, strict=True):
            work.prompt_ids += [prompt] * int(stop - first)
            task = asyncio.create_task(self._generate(work, int(first), int(stop), prompt))
            self._running.add(task)
            task.add_done_callback(self._ended)

    async def _generate(
        self, work: _Work, first: int, stop: int, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
    ) -> None:
        seed = None
        if self._sampling.seed is not None:
            seed = hash((self._sampling.seed, int(work.batch.ids[first]))) & 0x7FFFFFFF
        waiting = set(range(first, stop))
        try:
            async for completion in self._engine.generate(Request(prompt, self._sampling, stop - first, seed)):
                self._check(completion, first, waiting, work)
                waiting.discard(first + completion.index)
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
            self._refused.add(int(work.batch.groups[first]))
            if len(self._refused) >= GIVE_UP_AFTER:
                text = f"{len(self._refused)} prompts in a row were refused, the last because: {error}"
                raise ConfigError(text) from error
            self._note(f"a prompt was refused: {error}", "warning")
            with contextlib.suppress(LeaseLost):
                await work.batch.give_back(index=sorted(waiting), reason=f"EngineError: {error}", blame=True)
        finally:
            work.groups -= 1
            self._rows -= stop - first
            if not work.groups:
                cpu_s, self._cpu_s = self._engine.cpu_s - self._cpu_s, self._engine.cpu_s
                self._span(
                    "generate", work.began, time.monotonic() - work.began, rows=work.batch.rows, tokens=work.tokens,
                    version=work.version, cpu_s=cpu_s,
                )  # fmt: skip

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
            if any(span.version < work.version for span in completion.spans):
                raise EngineError(f"{name} says tokens are older than the version it had loaded, {work.version}")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
            self._swap_wanted.set()
        if not self._running:
            self._idle_since = time.monotonic()
        self._room.set()

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
            self._swap_wanted.set()

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
            await work.batch.complete(columns, index=index)
        except LeaseLost as error:
            self._note(f"{len(index)} responses came too late: {error}", "warning")

    # ---- new versions

    async def _watch(self) -> None:
        """Keep the newest version staged."""
        try:
            async for update in self._updates.staged(-1 if self._loaded is None else self._loaded):
                if self._staged is not None:
                    self._staged.release()
                self._staged = update
                self._swap_wanted.set()
        except Exception as error:
            self._failure = self._failure or error
            self._swap_wanted.set()

    async def _swap(self) -> None:
        """Finish what runs, load the staged version, tell the ledger."""
        await self._drain()
        update, self._staged = self._staged, None
        self._swap_wanted.clear()
        assert update is not None
        self._end_wait()
        began = time.monotonic()
        try:
            names = await asyncio.wait_for(self._engine.load_weights(update), WAIT_S)
            await self._updates.commit(update, names)
        finally:
            update.release()
        self._loaded = update.version
        self._idle_since = time.monotonic()
        self._span("load", began, self._idle_since - began, version=update.version)

    async def _drain(self) -> None:
        while self._running:
            done, running = await asyncio.wait(self._running, timeout=WAIT_S)
            if not done:
                raise DeadlineExceeded(
                    f"{len(running)} requests have been in the engine for {WAIT_S:g} s without an end"
                )
        await self._complete_finished()
        if self._failure is not None:
            raise self._failure

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
