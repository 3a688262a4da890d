"""Leased batches of a queue client, blocking and for event loops.

with queue.get("reward", count=64) as batch:        # an exception gives the rows back
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, LeaseLost, MemoryFull, SchemaError
from ..interfaces import LeasedBatch
from ..ledger import commands as cmd
from ..ledger import unpack_ids
from ..types import Batch, Column
from .connection import PendingWrite, Port
from .coroutines import run_blocking, sync
from .protocol import error_text, plain_text
from .stores.blocks import pack_columns

if TYPE_CHECKING:
    from .protocol import CallResult

_LEFT = "left without completing"


class BatchVerbs(Batch):
    """The methods of a leased batch, written once as coroutines. Attributes: see ``LeasedBatch``."""

    token: int
    task: str
    index: int
    version: int
    partition: str
    lease_s: float
    rank: int
    world_size: int
    shard: int
    imbalance: float
    _port: Port
    _left: int
    _since: float
    _last: tuple[PendingWrite, int] | None = None  # the unsent completion of finish(), and its number of rows

    def _bind(self, port: Port, lease: cmd.Leased) -> None:
        self._port, self._left, self._since = port, self.rows, time.monotonic()
        self.token, self.task, self.lease_s = lease.token, lease.task, lease.lease_s
        self.index, self.version, self.partition = lease.step, lease.version, lease.partition
        self.version_step_offsets = lease.version_step_offsets
        self.rank, self.world_size = lease.rank, lease.world_size
        self.shard, self.imbalance = lease.shard, lease.imbalance
        self.completed_at = unpack_ids(lease.completed_at) if lease.step >= 0 else None
        port.connection.on_lease(self)

    async def _complete(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.int64]:
        command, packed, count = self._completion(columns, index, filtered)
        if not self.rows:
            return self.ids
        try:
            reply = await self._port.send_columns(command, packed)
        except LeaseLost:
            self._left = 0
            raise
        assert isinstance(reply, cmd.Completed)
        self._left -= count
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
        if self.rows:
            self._last = self._port.write(command, packed), count

    @property
    def left(self) -> int:
        """The number of rows neither completed nor given back."""
        return self._left

    @property
    def finished(self) -> bool:
        """True if ``finish`` was called and its result is not sent yet."""
        return self._last is not None

    def _completion(
        self, columns: Mapping[str, Any] | None, index: npt.ArrayLike | None, filtered: npt.ArrayLike | None
    ) -> tuple[cmd.Complete, dict[str, Column], int]:
        """Return the command, its payload, and the number of rows it completes."""
        rows = None if index is None else _positions(index)
        count = self.rows if rows is None else len(rows)
        drop = None
        if filtered is not None:
            mask = np.asarray(filtered)
            if mask.shape != (count,) or mask.dtype != bool:
                raise SchemaError(f"filtered must be bool of shape ({count},), not {mask.dtype} of {mask.shape}")
            drop = _positions(mask).tobytes() if mask.any() else None
        at = None if rows is None else rows.tobytes()
        command = cmd.Complete(token=self.token, columns={}, index=at, filtered=drop, rank=self.rank)
        return command, pack_columns(columns or {}), count

    async def _send_last(self, then: cmd.LeaseRows | None = None, *, acknowledge: bool = False) -> CallResult | None:
        """Send the last message about this batch, if there is one, together with the lease request
        ``then``.

        Without a ``finish``, acknowledge the rows left, or give them back. Return the result of
        ``then``. Raises the server's error about the last message; nothing was leased in this case.
        """
        last, self._last = self._last, None
        if last is None:
            if self._left <= 0:
                return None
            command: cmd.Complete | cmd.GiveBack = cmd.Complete(token=self.token, columns={}, rank=self.rank)
            if not acknowledge:  # an attempt, or a loop that finishes nothing would get the same rows for ever
                command = cmd.GiveBack(token=self.token, rank=self.rank, reason=_LEFT, blame=True)
            last = PendingWrite(command), self._left
        pending, count = last
        answer = await self._port.submit(pending, then)
        if answer.first is not None or (then is None and answer.error is None):
            self._left -= count
        elif answer.error is not None and answer.error[0] == LeaseLost.__name__:
            self._left = 0
        if then is None or answer.first is None:
            answer.raise_error()
        return answer

    async def _give_back(self, *, index: npt.ArrayLike | None = None, reason: str = "", blame: bool = False) -> None:
        if not self.rows:
            return
        rows = None if index is None else _positions(index)
        packed = None if rows is None else rows.tobytes()
        reason = plain_text(reason) if isinstance(reason, str) else reason
        try:
            await self._port.send(
                cmd.GiveBack(token=self.token, index=packed, reason=reason, blame=blame, rank=self.rank)
            )
        except LeaseLost:
            self._left = 0
            raise
        self._left -= self.rows if rows is None else len(rows)

    async def _renew(self, *, after_s: float = 0.0) -> None:
        now = time.monotonic()
        if not self.rows or now - self._since < after_s:
            return
        await self._port.send(cmd.Renew(token=self.token, rank=self.rank))
        self._renewed(now)

    def _renewed(self, now: float) -> None:
        self._since = now

    async def _ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        await self._complete(filtered=filtered)

    async def _close(self, error: BaseException | None) -> None:
        if self._last is not None:
            with contextlib.suppress(*(() if error is None else (AsyncFlowError,))):
                await self._send_last()
        if self._left <= 0:
            return
        reason = _LEFT if error is None else error_text(error)
        blame = isinstance(error, Exception) and not isinstance(error, MemoryFull)  # of no row
        try:
            await self._give_back(reason=reason, blame=blame)
        except LeaseLost:
            if error is None:
                raise


class AsyncLeasedBatch(BatchVerbs):
    """A leased batch for ``async with``."""

    complete = BatchVerbs._complete
    give_back = BatchVerbs._give_back
    renew = BatchVerbs._renew
    ack = BatchVerbs._ack

    async def __aenter__(self) -> AsyncLeasedBatch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(error)


class BlockingBatch(BatchVerbs, LeasedBatch):
    """A leased batch for threads."""

    def move_to(self, port: Port) -> None:
        """Send later requests of this batch over another port of its connection."""
        self._port = port

    complete = sync(BatchVerbs._complete, LeasedBatch.complete)
    give_back = sync(BatchVerbs._give_back, LeasedBatch.give_back)
    renew = sync(BatchVerbs._renew, LeasedBatch.renew)
    ack = sync(BatchVerbs._ack, LeasedBatch.ack)

    def __enter__(self) -> BlockingBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._close(error))


def _positions(index: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return positions as int32, from positions or a bool mask. The ledger checks their range."""
    at = np.asarray(index)
    if at.dtype == bool:
        at = np.flatnonzero(at)
    if at.ndim != 1 or (at.dtype.kind not in "iu" and len(at)):
        raise SchemaError(f"positions must be integers in one dimension, not {at.dtype} of shape {at.shape}")
    packed: npt.NDArray[np.int32] = np.clip(at, -1, (1 << 31) - 1).astype("<i4")
    return packed
