"""LeasedBatch: the rows that one consumer works on.

    with queue.get("reward", count=64, timeout_s=30) as batch:                   # an exception gives the rows back
        batch.complete({"reward": score(batch["response"])})

The other side is ``TransferQueue``: it grants the lease, and takes the rows back when the lease ends.
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
    """Rows that are this client's until it completes them, gives them back, or the lease ends. Use it in a ``with`` block: rows that
    are left then go back, and an exception counts as an attempt of theirs. One thread at a time.

    ``token``: fencing token of the lease. ``task``: that leased the rows. ``index``: number of the step, or -1. ``version``: the
    version that the replica has loaded (rollout) or that is being trained (train), or -1. ``partition``: of the rows. ``lease_s``:
    seconds until the lease ends, unless it is renewed. Of a lease that ranks share: ``rank`` of ``world_size``, the number of its
    ``shard``, and ``imbalance``: how much heavier the heaviest shard is than the mean (0: equal).
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

        ``index``: positions in this batch, or a bool mask of it, of the rows to complete now (default: all);
        ``columns`` have one entry for each. ``filtered``: bool, one for each, True for rows to drop.
        Returns the ids of rows that had ended with their group; nothing was written for these. Raises LeaseLost, SchemaError,
        WriteOnceError; then nothing had an effect.
        """

    @abc.abstractmethod
    def finish(
        self,
        columns: Mapping[str, Any] | None = None,
        *,
        index: npt.ArrayLike | None = None,
        filtered: npt.ArrayLike | None = None,
    ) -> None:
        """Complete the batch with the next request: that of ``get(..., ack=batch)`` or of the ``stream`` that gave this batch, or when
        its ``with`` block ends. That request raises what the server rejects. Call it once, as the last completion of a batch.

        The values are copied before it returns. Raises SchemaError for what can be seen here.
        """

    @property
    @abc.abstractmethod
    def left(self) -> int:
        """The number of rows that are neither completed nor given back."""

    @property
    @abc.abstractmethod
    def finished(self) -> bool:
        """True if ``finish`` was called and its result is not sent yet."""

    @abc.abstractmethod
    def give_back(self, *, index: npt.ArrayLike | None = None, reason: str = "", blame: bool = False) -> None:
        """Return rows for others to take. ``blame``: the attempt counts; after too many the group fails."""

    @abc.abstractmethod
    def renew(self, *, after_s: float = 0.0) -> None:
        """Start the lease's time again; if ranks share it, for all of them. Raises LeaseLost when it is too late.

        ``after_s``: only if it began, or was renewed here, so many seconds ago. Long work may therefore call it as often as it likes
        where it progresses: ``batch.renew(after_s=batch.lease_s / 3)``. If it hangs, others get the rows.
        """

    @abc.abstractmethod
    def ack(self, *, filtered: npt.ArrayLike | None = None) -> None:
        """Acknowledge all rows without writing anything: the step is trained.

        ``filtered``: bool (rows,), True for rows that carried no gradient. Raises LeaseLost. A step that ranks share is acknowledged
        when each of them has called this.
        """
