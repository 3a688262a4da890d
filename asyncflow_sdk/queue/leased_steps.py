"""Leased steps of a queue client, delivered in parts, blocking and for event loops.

for step in queue.steps("train", part_rows=32):
    for part in step.parts():
        accumulate(part)
    step.ack()
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from types import TracebackType
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import DeadlineExceeded, Ended, LeaseLost, SchemaError
from ..interfaces import LeasedStep, StepConsumer, StepPart
from ..ledger import commands as cmd
from ..types import events as ev
from .connection import Port
from .coroutines import run_blocking, sync
from .protocol import error_text, plain_text

LeasePart = Callable[[cmd.LeaseRows, float], Awaitable[tuple[StepPart, cmd.LeasedPart]]]
"""Sends the request for a part, and reads its rows, until a time of the monotonic clock."""
WaitForPart = Callable[[cmd.LeaseRows], Awaitable[tuple[StepPart, cmd.LeasedPart]]]
S = TypeVar("S", bound="StepVerbs")
CHECK_S = 5.0
"""Interval of checks during a wait."""
_LEFT = "left without acknowledging"


class StepVerbs:
    """The methods of a leased step, written once as coroutines. Attributes: see ``LeasedStep``."""

    def __init__(
        self, port: Port, wait: WaitForPart, request: cmd.LeaseRows, first: StepPart, leased: cmd.LeasedPart
    ) -> None:
        self.token, self.task, self.lease_s = leased.token, leased.task, leased.lease_s
        self.index, self.version = leased.step, leased.version
        self.rank, self.world_size = leased.rank, leased.world_size
        self._port, self._wait = port, wait
        self._request = msgspec.structs.replace(request, token=leased.token)
        self._rows, self._complete, self._held = 0, False, True
        self._first: StepPart | None = first
        self._since = 0.0
        self._delivered(first)

    @property
    def rows(self) -> int:
        """The number of rows delivered here so far."""
        return self._rows

    @property
    def complete(self) -> bool:
        """True once the last part is delivered."""
        return self._complete

    @property
    def held(self) -> bool:
        """True until the step is acknowledged, given back, or known to be lost."""
        return self._held

    @property
    def left(self) -> int:
        """1 while the step is held, else 0: see ``LeaseRenewer``."""
        return int(self._held)

    async def _next_part(self) -> StepPart | None:
        """Return the next part; None after the last."""
        part, self._first = self._first, None
        if part is not None:
            return part
        if self._complete:
            return None
        with self._losing():
            part, _ = await self._wait(self._request)
        self._delivered(part)
        return part

    async def _ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        drop = None
        if filtered is not None:
            mask = np.asarray(filtered)
            if mask.shape != (self._rows,) or mask.dtype != bool:
                raise SchemaError(f"filtered must be bool of shape ({self._rows},), not {mask.dtype} of {mask.shape}")
            drop = np.flatnonzero(mask).astype("<i4").tobytes() or None
        with self._losing():
            await self._port.send(cmd.Complete(token=self.token, columns={}, filtered=drop, rank=self.rank))
        self._held = False

    async def _renew(self, *, after_s: float = 0.0) -> None:
        now = time.monotonic()
        if now - self._since < after_s:
            return
        with self._losing():
            await self._port.send(cmd.Renew(token=self.token, rank=self.rank))
        self._renewed(now)

    def _renewed(self, now: float) -> None:
        self._since = now

    async def _give_back(self, *, reason: str = "", blame: bool = False) -> None:
        reason = plain_text(reason) if isinstance(reason, str) else reason
        with self._losing():
            await self._port.send(cmd.GiveBack(token=self.token, reason=reason, blame=blame, rank=self.rank))
        self._held = False

    async def _close(self, error: BaseException | None, *, blame: bool = False) -> None:
        """Give the step back if it is still held."""
        if self._held:
            reason = _LEFT if error is None else error_text(error)
            with contextlib.suppress(LeaseLost):
                await self._give_back(reason=reason, blame=blame or isinstance(error, Exception))

    def _delivered(self, part: StepPart) -> None:
        self._since = time.monotonic()
        self._rows += part.rows
        self._complete = part.last
        self._port.connection.on_lease(self)

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Note that the step is lost if the server says so."""
        try:
            yield
        except LeaseLost:
            self._held = False
            raise


class AsyncStep(StepVerbs):
    """A leased step for ``async with``."""

    ack = StepVerbs._ack
    renew = StepVerbs._renew
    give_back = StepVerbs._give_back

    async def parts(self) -> AsyncIterator[StepPart]:
        """See ``LeasedStep.parts``."""
        while (part := await self._next_part()) is not None:
            yield part

    async def __aenter__(self) -> AsyncStep:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)


class BlockingStep(StepVerbs, LeasedStep):
    """A leased step for threads."""

    ack = sync(StepVerbs._ack, LeasedStep.ack)
    renew = sync(StepVerbs._renew, LeasedStep.renew)
    give_back = sync(StepVerbs._give_back, LeasedStep.give_back)

    def parts(self) -> Generator[StepPart, None, None]:
        """See ``LeasedStep.parts``."""
        while (part := run_blocking(self._next_part())) is not None:
            yield part

    def __enter__(self) -> BlockingStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._close(error))


class StepStream(Generic[S]):
    """Base of both kinds of stream of steps. ``check``: called before each wait for a part and every
    ``CHECK_S`` seconds of it; its exception ends the wait."""

    _step: type[S]

    def __init__(
        self, port: Port, lease: LeasePart, request: cmd.LeaseRows, check: Callable[[], None] | None = None
    ) -> None:
        self._port, self._lease, self._request, self._check = port, lease, request, check
        self._current: S | None = None
        self._entered = False  # if True, __exit__ closes the step with the exception that ended the loop

    async def _next(self) -> S:
        """Return the next step. The last one goes back if it was not acknowledged."""
        await self._close(blame=True)
        part, leased = await self._wait(self._request)
        self._current = self._step(self._port, self._wait, self._request, part, leased)
        return self._current

    async def _wait(self, request: cmd.LeaseRows) -> tuple[StepPart, cmd.LeasedPart]:
        """Lease a part, and report waits of more than a millisecond."""
        began, waits = time.monotonic(), 1
        until = began + request.timeout_s
        if self._check is not None:
            waits = max(1, math.ceil(request.timeout_s / CHECK_S))
            request = msgspec.structs.replace(request, timeout_s=request.timeout_s / waits)
        for left in reversed(range(waits)):
            if self._check is not None:
                self._check()
            try:
                found = await self._lease(request, until)
                break
            except DeadlineExceeded as error:
                if not left:
                    why = str(error).partition(": ")[2]
                    raise DeadlineExceeded(f"after {time.monotonic() - began:.1f} s: {why}") from None
        if (waited := time.monotonic() - began) > 0.001:
            connection = self._port.connection
            connection.report(ev.Span(time_s=began, worker=connection.name, kind="wait", seconds=waited))
        return found

    async def _close(self, error: BaseException | None = None, *, blame: bool = False) -> None:
        last, self._current = self._current, None
        if last is not None:
            await last._close(error, blame=blame)


class AsyncStepStream(StepStream[AsyncStep]):
    """Steps for ``async for``; without ``async with`` an abandoned loop is cleaned up late."""

    _step = AsyncStep

    async def __aiter__(self) -> AsyncIterator[AsyncStep]:
        try:
            while True:
                try:
                    step = await self._next()
                except Ended:
                    return
                yield step
        finally:
            if not self._entered:
                await self._close()

    async def __aenter__(self) -> AsyncStepStream:
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)


class BlockingStepStream(StepStream[BlockingStep], StepConsumer):
    """``StepConsumer`` over a connection."""

    _step = BlockingStep

    @property
    def current(self) -> BlockingStep | None:
        return self._current

    def __iter__(self) -> Generator[BlockingStep, None, None]:
        try:
            while True:
                try:
                    step = run_blocking(self._next())
                except Ended:
                    break
                yield step
        finally:
            if not self._entered:
                run_blocking(self._close())
        if self._check is not None:
            self._check()

    def __enter__(self) -> BlockingStepStream:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._close(error))
