"""Drawing: what a producer asks its engine for, and how that goes on over a load of new weights.

await drawing.draw(request, deliver)                  # deliver(completed, version), each response once
async with drawing.stopped(interrupt=True):           # nothing is in the engine in here, and nothing comes in
    await load(...)                                   # what was interrupted goes on after, where it was
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import DeadlineExceeded, EngineError
from ..interfaces import Completion, Completions, Request, RolloutEngine
from ..queue.coroutines import wait_for_event
from ..types import VersionSpan

WAIT_S = 3600.0
"""The longest a response may take (seconds)."""
Deliver = Callable[[Completion | Completions, int], None]
"""Gets one response or several, and the version that drew all of it where nothing else is said."""


class Drawing:
    """The way into one engine, on one event loop. ``loaded``: the version the engine is on, None before its first.
    ``on_idle`` is called whenever the engine has nothing left to do."""

    def __init__(self, engine: RolloutEngine, loaded: int | None, on_idle: Callable[[], None]) -> None:
        self.loaded = loaded
        self.newest = loaded or 0  # that the engine was given
        self._engine, self._name, self._on_idle = engine, type(engine).__name__, on_idle
        self._requests = 0
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()

    @property
    def idle(self) -> bool:
        """Whether nothing is in the engine."""
        return not self._requests

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing new comes into the engine in here."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    @contextlib.asynccontextmanager
    async def stopped(self, *, interrupt: bool) -> AsyncIterator[None]:
        """Nothing is in the engine in here: what was is finished, or interrupted, and then goes on after.

        Raises DeadlineExceeded when the engine does not come to that.
        """
        with self.held():
            self._empty.clear()
            if self._requests:
                if interrupt:
                    await self._engine.interrupt()
                await wait_for_event(self._empty, WAIT_S)
            if self._requests:
                raise DeadlineExceeded(
                    f"{self._requests} requests have been in the engine for {WAIT_S:g} s without an end"
                )
            yield

    async def draw(self, request: Request, deliver: Deliver) -> None:
        """Have every response of ``request`` delivered once, as it finishes, whatever is loaded meanwhile.

        Raises EngineError for what the engine does not do, or does wrongly; some may have been delivered by then.
        """
        while not self._open.is_set():  # it may be closed again before this wakes
            await self._open.wait()
        assert self.loaded is not None
        version, waiting = self.loaded, set(range(request.n))
        cut: list[Completion] = []
        self._requests += 1
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as completions:  # type: ignore[type-var]
                async for completed in completions:
                    if isinstance(completed, Completions) and _sound(completed, version, waiting):
                        waiting.difference_update(completed.index.tolist())
                        deliver(completed, version)
                        continue
                    for completion in completed.each():
                        self._check(completion, request, version, waiting)
                        waiting.discard(completion.index)
                        if completion.finish_reason == "aborted":
                            cut.append(completion)
                        else:
                            deliver(completion, version)
        finally:
            self._requests -= 1
            if not self._requests:
                self._empty.set()
                self._on_idle()
        if waiting:
            raise EngineError(f"the engine ended a request with {len(waiting)} of {request.n} responses missing")
        if cut:
            await _all([self._go_on(request, completion, version, deliver) for completion in cut])

    async def _go_on(self, request: Request, part: Completion, version: int, deliver: Deliver) -> None:
        """The rest of a response that was interrupted, behind what it has."""
        drawn, sampling = len(part.token_ids), request.sampling
        if drawn == sampling.max_tokens:
            deliver(replace(part, finish_reason="length"), version)
            return
        rest = Request(
            np.concatenate([request.prompt_ids, np.asarray(part.token_ids, np.int32)]),
            replace(sampling, max_tokens=sampling.max_tokens - drawn), 1, request.seed,
            drawn=request.drawn + drawn, first=request.first + part.index,
        )  # fmt: skip

        def join(ends: Completion | Completions, later: int) -> None:
            for end in ends.each():
                deliver(_joined(part, version, end, later), version)

        await self.draw(rest, join)

    def _check(self, completion: Completion, request: Request, version: int, waiting: set[int]) -> None:
        """What an engine says of a response must hold together, or it would end up in another row's place."""
        tokens = len(completion.token_ids)
        if completion.index not in waiting:
            raise EngineError(f"{self._name} gave response {completion.index} twice, or more than were asked for")
        aborted = completion.finish_reason == "aborted"
        if len(completion.logprobs) != tokens or not (tokens or aborted):
            raise EngineError(f"{self._name} gave {tokens} tokens with {len(completion.logprobs)} log-probs")
        if aborted and (tokens > request.sampling.max_tokens or self._open.is_set()):
            raise EngineError(f"{self._name} gave up response {completion.index} after {tokens} tokens, unasked")
        if completion.spans == ((version, 0, tokens),):
            return  # as nearly all are
        if self._engine.capabilities.token_versions:
            ends = [0, *(span.end for span in completion.spans)]
            if [span.start for span in completion.spans] != ends[:-1] or ends[-1] != tokens:
                raise EngineError(f"{self._name} gave version spans {list(completion.spans)} for {tokens} tokens")
            versions = [span.version for span in completion.spans]
            if versions != sorted(versions) or (
                versions and not version <= versions[0] <= versions[-1] <= self.newest
            ):
                raise EngineError(
                    f"{self._name} says that versions {versions} drew tokens, one after another; it had {version} when"
                    f" the request began, and {self.newest} now"
                )


def _sound(completed: Completions, version: int, waiting: set[int]) -> bool:
    """Whether packed responses are whole, waited for, and of the version that was loaded. Others are looked at one by one,
    which says what is wrong with them."""
    index, offsets = set(completed.index.tolist()), completed.token_ids.offsets
    return (
        len(index) == len(completed.index) == len(completed.token_ids) == len(completed.finish_reason)
        and index <= waiting
        and completed.version in (None, version)
        and "aborted" not in completed.finish_reason
        and (completed.logprobs.offsets is offsets or np.array_equal(completed.logprobs.offsets, offsets))
        and bool((offsets[1:] > offsets[:-1]).all())
    )


def spans_of(completion: Completion, version: int) -> Sequence[VersionSpan]:
    """The spans of a response; all of ``version`` where it says nothing of them."""
    if completion.spans or not len(completion.token_ids):
        return completion.spans
    return (VersionSpan(version, 0, len(completion.token_ids)),)


def joined_spans(parts: Sequence[Sequence[VersionSpan]]) -> tuple[VersionSpan, ...]:
    """The spans of tokens that come one part after another, each with spans that begin at 0."""
    whole: list[VersionSpan] = []
    for part in parts:
        behind = whole[-1].end if whole else 0
        for version, start, end in part:
            if whole and whole[-1].version == version:
                start = whole.pop().start - behind
            whole.append(VersionSpan(version, start + behind, end + behind))
    return tuple(whole)


def _joined(part: Completion, version: int, end: Completion, later: int) -> Completion:
    return Completion(
        part.index,
        np.concatenate([np.asarray(each.token_ids, np.int32) for each in (part, end)]),
        np.concatenate([np.asarray(each.logprobs, np.float32) for each in (part, end)]),
        end.finish_reason,
        joined_spans([spans_of(part, version), spans_of(end, later)]),
    )


async def _all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them at the same time; what one raises ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
