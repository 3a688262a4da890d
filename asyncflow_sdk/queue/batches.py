"""Leases of a queue client, blocking and for event loops: batches, and steps in parts.

with queue.get("reward", count=64) as batch:        # an exception gives the rows back
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, LeaseLost, MemoryFull, SchemaError, WireError
from ..interfaces import LeasedBatch, LeasedStep, StepPart
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..types import Batch, Column
from .connection import PendingWrite, Port
from .coroutines import run_blocking, sync
from .protocol import error_text, plain_text
from .stores.blocks import pack_columns

if TYPE_CHECKING:
    from .protocol import CallResult

WaitForPart = Callable[[cmd.LeaseRows], Awaitable[tuple[StepPart, cmd.LeasedPart]]]
"""Sends the request for a part of a step, and returns it."""
R = TypeVar("R")
T = TypeVar("T", bound="AsyncContext")
U = TypeVar("U", bound="BlockingContext")


class AsyncContext:
    """An ``async with`` block gives the exception that ended it to ``_close``."""

    _entered = False
    _close: Callable[..., Coroutine[Any, Any, None]]

    async def __aenter__(self: T) -> T:
        self._entered = True
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._close(error)


class BlockingContext:
    """Like ``AsyncContext``, of a ``with`` block."""

    _entered = False
    _close: Callable[..., Coroutine[Any, Any, None]]

    def __enter__(self: U) -> U:
        self._entered = True
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        run_blocking(self._close(error))


class Lease:
    """A lease of this client. ``left``: the number of rows neither completed nor given back; of a step, 1 while it is
    held. ``since``: start of its time. ``_void``: it has no row, and the server does not know it."""

    _port: Port
    _reason = "left without completing"  # of rows that go back without an error
    _void = False

    def _take(self, lease: cmd.Leased, left: int) -> None:
        self.token, self.task, self.lease_s = lease.token, lease.task, lease.lease_s
        self.index, self.version = lease.step, lease.version
        self.rank, self.world_size = lease.rank, lease.world_size
        self.left, self.since = left, time.monotonic()

    def renewed(self, now: float) -> None:
        """Restart the lease's time here."""
        self.since = now

    async def _settle(self, sent: Awaitable[R], count: int) -> R:
        """Return the answer to a message about ``count`` rows. None are left if the lease is lost."""
        try:
            answer = await sent
        except LeaseLost:
            self.left = 0
            raise
        self.left = max(self.left - count, 0)  # other tasks have changed it meanwhile
        return answer

    async def _renew(self, *, after_s: float = 0.0) -> None:
        now = time.monotonic()
        if self._void or now - self.since < after_s:
            return
        await self._settle(self._port.send(cmd.Renew(token=self.token, rank=self.rank)), 0)
        self.since = now

    async def _return(self, *, index: npt.ArrayLike | None = None, reason: str = "", blame: bool = False) -> None:
        rows = None if index is None else _positions(index)
        if self._void:
            return
        at, count = (None, self.left) if rows is None else (rows.tobytes(), len(rows))
        reason = plain_text(reason) if isinstance(reason, str) else reason
        command = cmd.GiveBack(token=self.token, index=at, reason=reason, blame=blame, rank=self.rank)
        await self._settle(self._port.send(command), count)

    async def _close(self, error: BaseException | None, *, blame: bool = False) -> None:
        """Give the rest back."""
        if self.left > 0:
            reason = self._reason if error is None else error_text(error)
            blame |= isinstance(error, Exception) and not isinstance(error, MemoryFull)  # the fault of no row
            await self._return(reason=reason, blame=blame)


class UnreadLease(Lease):
    """A lease with columns that are fetched from another host. ``left``: 0 once it is lost."""

    def __init__(self, lease: cmd.Leased) -> None:
        self._take(lease, 1)

    def lose(self) -> None:
        """Note that the server says that it is lost."""
        self.left = 0


class BatchVerbs(Lease, Batch):
    """The methods of a leased batch, written once as coroutines. Attributes: see ``LeasedBatch``."""

    finished = False
    _last: tuple[PendingWrite, int] | None = None  # the unsent completion of finish(), and its number of rows

    def _bind(self, port: Port, lease: cmd.Leased) -> None:
        self._port = port
        self._take(lease, len(self.ids))
        self._void = not self.left
        self.partition, self.shard, self.imbalance = lease.partition, lease.shard, lease.imbalance
        self.version_step_offsets = lease.version_step_offsets
        self.completed_at = unpack_ids(lease.completed_at) if lease.step >= 0 else None
        if port.connection.renewer is not None:
            port.connection.renewer.add(self)

    async def _complete(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.int64]:
        command, packed, count = self._completion(columns, index, filtered)
        if self._void:
            return self.ids
        reply = await self._settle(self._port.send_columns(command, packed), count)
        return unpack_ids(reply.revoked)

    def finish(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> None:
        """Write now, send the completion with the next request; see ``LeasedBatch.finish``."""
        if self._last is not None:
            raise SchemaError(
                "this batch is finished already: use complete() for parts of it, and finish() once, for the last part"
            )
        command, packed, count = self._completion(columns, index, filtered)
        if not self._void:
            self._last, self.finished = (self._port.write(command, packed), count), True

    def _completion(
        self, columns: Mapping[str, Any] | None, index: npt.ArrayLike | None, filtered: npt.ArrayLike | None
    ) -> tuple[cmd.Complete, dict[str, Column], int]:
        rows = None if index is None else _positions(index)
        count = len(self.ids if rows is None else rows)
        at = None if rows is None else rows.tobytes()
        drop = None if filtered is None else _filtered(filtered, count)
        command = cmd.Complete(token=self.token, columns={}, index=at, filtered=drop, rank=self.rank)
        return command, pack_columns(columns or {}), count

    async def _send_last(self, then: cmd.LeaseRows | None = None, *, acknowledge: bool = False) -> CallResult | None:
        """Send the last message about this batch, if there is one, together with the lease request ``then``.

        Without a ``finish``, acknowledge the rows left, or give them back. Return the result of ``then``. Raises the
        server's error about the last message; nothing was leased in this case.
        """
        last, self._last, self.finished = self._last, None, False
        if last is None:
            if self.left <= 0:
                return None
            command: cmd.Complete | cmd.GiveBack = cmd.Complete(token=self.token, columns={}, rank=self.rank)
            if not acknowledge:  # an attempt, or a loop that finishes nothing would get the same rows for ever
                command = cmd.GiveBack(token=self.token, rank=self.rank, reason=self._reason, blame=True)
            last = PendingWrite(command), self.left
        pending, count = last
        answer = await self._port.submit(pending, then)
        if answer.first is not None or (then is None and answer.error is None):
            self.left = max(self.left - count, 0)
        elif answer.error is not None and answer.error[0] == LeaseLost.__name__:
            self.left = 0
        if then is None or answer.first is None:
            answer.raise_error()
        return answer

    async def _ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        await self._complete(filtered=filtered)

    async def _close(self, error: BaseException | None, *, blame: bool = False) -> None:
        if self._last is not None:
            try:
                await self._send_last()
            except AsyncFlowError as rejected:
                if error is None:
                    if not isinstance(rejected, WireError):
                        await self._close(rejected)
                    raise
        with contextlib.suppress(*(() if error is None else (LeaseLost,))):
            await super()._close(error, blame=blame)


class AsyncLeasedBatch(BatchVerbs, AsyncContext):
    """A leased batch for ``async with``."""

    complete = BatchVerbs._complete
    give_back = BatchVerbs._return
    renew = BatchVerbs._renew
    ack = BatchVerbs._ack


class BlockingBatch(BatchVerbs, BlockingContext, LeasedBatch):
    """A leased batch for threads."""

    def move_to(self, port: Port) -> None:
        """Send later requests of this batch over another port of its connection."""
        self._port = port

    complete = sync(BatchVerbs._complete, LeasedBatch.complete)
    give_back = sync(BatchVerbs._return, LeasedBatch.give_back)
    renew = sync(BatchVerbs._renew, LeasedBatch.renew)
    ack = sync(BatchVerbs._ack, LeasedBatch.ack)


class StepVerbs(Lease):
    """The methods of a leased step, written once as coroutines. Attributes: see ``LeasedStep``."""

    _reason = "left without acknowledging"

    def __init__(
        self, port: Port, wait: WaitForPart, request: cmd.LeaseRows, first: StepPart, leased: cmd.LeasedPart
    ) -> None:
        self._port, self._wait = port, wait
        self._take(leased, 1)
        self._request = msgspec.structs.replace(request, token=leased.token)
        self.rows, self.complete = 0, False
        self._first: StepPart | None = first
        self._delivered(first)

    @property
    def held(self) -> bool:
        """See ``LeasedStep.held``."""
        return self.left > 0

    async def _next_part(self) -> StepPart | None:
        first, self._first = self._first, None
        if first is not None or self.complete:
            return first
        began = time.monotonic()
        part, _ = await self._settle(self._wait(self._request), 0)
        self._port.connection.report_wait(began)
        self._delivered(part)
        return part

    async def _ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        drop = None if filtered is None else _filtered(filtered, self.rows)
        command = cmd.Complete(token=self.token, columns={}, filtered=drop, rank=self.rank)
        await self._settle(self._port.send(command), 1)

    async def _give_back(self, *, reason: str = "", blame: bool = False) -> None:
        await self._return(reason=reason, blame=blame)

    async def _close(self, error: BaseException | None, *, blame: bool = False) -> None:
        with contextlib.suppress(LeaseLost):
            await super()._close(error, blame=blame)

    def _delivered(self, part: StepPart) -> None:
        self.since = time.monotonic()
        self.rows += part.rows
        self.complete = part.last
        if self._port.connection.renewer is not None:
            self._port.connection.renewer.add(self)


class AsyncStep(StepVerbs, AsyncContext):
    """A leased step for ``async with``."""

    ack = StepVerbs._ack
    renew = StepVerbs._renew
    give_back = StepVerbs._give_back

    async def parts(self) -> AsyncIterator[StepPart]:
        """See ``LeasedStep.parts``."""
        while (part := await self._next_part()) is not None:
            yield part


class BlockingStep(StepVerbs, BlockingContext, LeasedStep):
    """A leased step for threads."""

    ack = sync(StepVerbs._ack, LeasedStep.ack)
    renew = sync(StepVerbs._renew, LeasedStep.renew)
    give_back = sync(StepVerbs._give_back, LeasedStep.give_back)

    def parts(self) -> Generator[StepPart, None, None]:
        """See ``LeasedStep.parts``."""
        while (part := run_blocking(self._next_part())) is not None:
            yield part


def _positions(index: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return positions as int32, from positions or a bool mask. The ledger checks their range."""
    at = np.asarray(index)
    if at.dtype == bool:
        at = np.flatnonzero(at)
    if at.ndim != 1 or (at.dtype.kind not in "iu" and len(at)):
        raise SchemaError(f"positions must be integers in one dimension, not {at.dtype} of shape {at.shape}")
    packed: npt.NDArray[np.int32] = np.clip(at, -1, (1 << 31) - 1).astype("<i4")
    return packed


def _filtered(filtered: npt.ArrayLike, count: int) -> bytes | None:
    """Return the positions of a bool mask of ``count`` rows, packed; None if it has none."""
    mask = np.asarray(filtered)
    if mask.shape != (count,) or mask.dtype != bool:
        raise SchemaError(f"filtered must be bool of shape ({count},), not {mask.dtype} of {mask.shape}")
    return _positions(mask).tobytes() or None
