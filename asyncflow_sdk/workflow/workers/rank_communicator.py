"""RankCommunicator: the shared leases and the barriers of a worker's ranks. A step, a checkpoint or
a resume counts for all ranks or for none.

ranks = RankCommunicator(queue, rank=0, world_size=2)
queue.stream("train", **ranks.shares)                     # this rank's shard of each lease
payloads = ranks.all_gather("step 7", b"mine")            # of all ranks, once all have called
with ranks.all_or_none("the checkpoint of step 7"):       # an exception in one rank is raised in all
    engine.save(path)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ...errors import DeadlineExceeded, LeaseLost, ServerLost, error_from_name
from ...ledger import commands as cmd
from ...queue import QueueClient

GATHER_S = 3600.0
"""A rank may arrive this much later than others (seconds). A dead rank ends its group before."""
RANK_ERRORS = (DeadlineExceeded, LeaseLost, ServerLost)
"""Errors of the barrier itself: the ranks cannot continue together."""


class _RankOutcome(msgspec.Struct, frozen=True):
    error: tuple[str, str] | None = None  # name and text
    payload: bytes = b""


class RankCommunicator:
    """Rank ``rank`` of ``world_size``. ``group``: name of the ranks in the queue. A single rank needs
    no queue. Not thread-safe."""

    def __init__(
        self, queue: QueueClient | None = None, group: str = "train", rank: int = 0, world_size: int = 1
    ) -> None:
        self._queue, self.group, self.rank, self.world_size = queue, group, rank, world_size

    @property
    def first(self) -> bool:
        """True for rank 0, which acts and reports for all."""
        return self.rank == 0

    @property
    def shares(self) -> dict[str, Any]:
        """Arguments of a lease that all ranks share."""
        return {"group": self.group, "rank": self.rank, "world_size": self.world_size}

    def all_gather(self, what: str, payload: bytes = b"", timeout_s: float = GATHER_S) -> tuple[bytes, ...]:
        """Wait until every rank has called this for ``what``. Return the payloads by rank. Raises
        DeadlineExceeded with the missing ranks, LeaseLost if another process became this rank."""
        if self._queue is None or self.world_size == 1:
            return (payload,)
        command = cmd.AllGather(
            group=self.group, what=what, rank=self.rank, world_size=self.world_size, payload=payload,
            timeout_s=timeout_s,
        )  # fmt: skip
        reply: cmd.AllGathered = self._queue.send(command)
        return reply.payloads

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Leave this block once every rank has left it. One rank's error is raised in all."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RANK_ERRORS):
                raise
            self._exchange(what, _RankOutcome(_name_and_text(error)))
            raise
        for rank, outcome in enumerate(self._exchange(what, _RankOutcome())):
            if outcome.error is not None:
                raise error_from_name(outcome.error[0], f"rank {rank}: {outcome.error[1]}")

    def by_first(self, what: str, do: Callable[[], bytes]) -> bytes:
        """Call ``do`` in rank 0. Its result is returned, or its error raised, in every rank."""
        outcome = _RankOutcome()
        if self.first:
            try:
                outcome = _RankOutcome(None, do())
            except Exception as error:
                self._exchange(what, _RankOutcome(_name_and_text(error)))
                raise
        found = self._exchange(what, outcome)[0]
        if found.error is not None:
            raise error_from_name(found.error[0], f"rank 0: {found.error[1]}")
        return found.payload

    def _exchange(self, what: str, outcome: _RankOutcome) -> list[_RankOutcome]:
        if self.world_size == 1:
            return [outcome]
        packed = self.all_gather(what, msgspec.msgpack.encode(outcome))
        return [msgspec.msgpack.decode(each, type=_RankOutcome) for each in packed]


def _name_and_text(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)
