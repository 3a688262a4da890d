"""QueueLimits of the queue, and the bytes that live rows take or may still take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..commands import Ids
from .rows import Rows

MAX_NUMBER = 1 << 61
"""The largest version or limit: the sum of two fits int64."""


@dataclass
class QueueLimits:
    """Set by ``Configure``; its docstring explains them. ``steps`` None: no last step. 0: no limit of ``max_swapping``, no ``quorum``."""

    capacity_rows: int = 1 << 40
    capacity_bytes: int = MAX_NUMBER
    row_bytes: int = 0
    max_staleness: int = 1
    steps: int | None = None
    checkpoints: bool = False
    keep_versions: int = 2
    max_swapping: int = 0
    quorum: int = 0


LEAST = {
    "capacity_rows": 1, "max_staleness": 0, "steps": 1, "capacity_bytes": 1, "row_bytes": 0, "keep_versions": 1,
    "max_swapping": 0, "quorum": 0,
}  # fmt: skip
"""The least value of each limit that is a number."""


class Budget:
    """``put``: rows ever put. ``charged``: bytes that live rows take or may take. ``largest_row``: bytes of the largest row that has
    ended. ``held``: live rows that every task is through with, of steps that no checkpoint covers."""

    def __init__(self, rows: Rows, limits: QueueLimits) -> None:
        self._rows, self._limits = rows, limits
        self.put = 0
        self.charged = 0
        self.largest_row = 0
        self.held = 0

    @property
    def occupied(self) -> int:
        """Rows that count against ``capacity_rows``."""
        return self.put - self._rows.over - self.held

    @property
    def reserve(self) -> int:
        """Bytes that a new row may come to take."""
        return self._limits.row_bytes or self.largest_row

    def charge(self, ids: Ids, nbytes: int) -> None:
        """Charge ``nbytes`` of payload, in all, to rows that got it."""
        if not nbytes or not len(ids):
            return
        rows = self._rows
        at = rows.at(ids)
        rows.nbytes[at] += -(-nbytes // len(ids))
        before = rows.charged[at]
        after = np.maximum(rows.nbytes[at], before)
        rows.charged[at] = after
        self.charged += int(after.sum()) - int(before.sum())

    def charge_new(self, new: slice, count: int, nbytes: int) -> None:
        """Charge ``count`` new rows for their payload, or for what is reserved for each if that is more."""
        share = -(-nbytes // count)
        self._rows.nbytes[new] = share
        self._rows.charged[new] = charged = max(share, self.reserve)
        self.charged += count * charged

    def release(self, at: Ids) -> None:
        """Release what rows at these places, which have ended, were charged."""
        self.charged -= int(self._rows.charged[at].sum())
        self.largest_row = max(self.largest_row, int(self._rows.nbytes[at].max(initial=0)))
