"""LeasedBatch: the rows of one consumer's lease.

with queue.get("reward", count=64, timeout_s=30) as batch:                   # an exception gives the rows back
    batch.complete({"reward": score(batch["response"])})
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch


class LeasedBatch(Batch, AbstractContextManager["LeasedBatch"], abc.ABC):
    """Rows leased to this client until it completes them, gives them back, or the lease ends. The
    end of its ``with`` block gives the remaining rows back; an exception there counts as an
    attempt. One thread at a time.

    ``token``: fencing token of the lease. ``index``: number of the step, or -1. ``version``: loaded
    by the replica (rollout) or being trained (train), or -1. ``lease_s``: seconds until the lease
    ends, unless renewed. For a lease shared by ranks: ``rank`` of ``world_size``, the number of its
    ``shard``, and ``imbalance``: the heaviest shard weighs 1 + ``imbalance`` times the mean.
    """

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

    @abc.abstractmethod
    def complete(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> npt.NDArray[np.int64]:
        """Write columns and acknowledge the rows, all or nothing.

        ``index``: positions, or a bool mask, of the rows to complete now (default: all);
        ``columns`` have one entry for each. ``filtered``: bool, one for each, True for rows to
        drop. Returns the ids of rows already ended with their group, for which nothing was written.
        Raises LeaseLost, SchemaError, WriteOnceError, without any effect.
        """

    @abc.abstractmethod
    def finish(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> None:
        """Like ``complete``, with the next request: ``get(..., ack=batch)``, the next one of its
        ``stream``, or the end of its ``with`` block. That request raises the server's errors. Call
        it once, as the last completion of a batch. Copies the values; raises SchemaError at once
        for invalid ones.
        """

    @property
    @abc.abstractmethod
    def left(self) -> int:
        """Rows neither completed nor given back."""

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """True if ``finish`` was called and its result is not sent yet."""

    @abc.abstractmethod
    def give_back(self, *, index: npt.ArrayLike | None = None, reason: str = "", blame: bool = False) -> None:
        """Return rows to the task. ``blame``: the attempt counts; after too many the group fails."""

    @abc.abstractmethod
    def renew(self, *, after_s: float = 0.0) -> None:
        """Restart the lease's time, for all ranks that share it. Raises LeaseLost if it has ended.

        ``after_s``: do nothing within this time of the last start here. Long work calls
        ``batch.renew(after_s=batch.lease_s / 3)`` wherever it progresses; if it hangs, others get
        the rows.
        """

    @abc.abstractmethod
    def ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        """Acknowledge all rows without writing: the step is trained. A step shared by ranks is
        acknowledged once every rank has called this. ``filtered``: bool (rows,), True for rows
        without a gradient. Raises LeaseLost."""
