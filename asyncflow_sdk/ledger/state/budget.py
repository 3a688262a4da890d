"""Limits of the queue, and the bytes taken by live rows or reserved for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...types.defaults import KEEP_VERSIONS, MAX_STALENESS
from ..commands import Ids
from .rows import Rows

MAX_NUMBER = 1 << 61
"""The largest version or limit: the sum of two fits int64."""


@dataclass
class QueueLimits:
    """See ``Configure``. None: no last step, no homes expected. ``max_swapping``, ``quorum`` 0: off."""

    capacity_rows: int = 1 << 40
    capacity_bytes: int = MAX_NUMBER
    row_bytes: int = 0
    max_staleness: int = MAX_STALENESS
    steps: int | None = None
    first_step: int = 0
    checkpoints: bool = False
    keep_versions: int = KEEP_VERSIONS
    max_swapping: int = 0
    quorum: int = 0
    home_silence_s: float | None = None


LEAST = {
    "capacity_rows": 1, "max_staleness": 0, "steps": 1, "capacity_bytes": 1, "row_bytes": 0, "keep_versions": 1,
    "max_swapping": 0, "quorum": 0, "first_step": 0, "home_silence_s": 0,
}  # fmt: skip
"""The least value of each numeric limit."""


class Budget:
    """``put``: rows ever put. ``charged``: bytes of live rows, taken or reserved. ``largest_row``:
    bytes of the largest ended row. ``held``: complete rows of uncovered steps."""

    def __init__(self, rows: Rows, limits: QueueLimits) -> None:
        self._rows, self._limits, self._arrays = rows, limits, rows.arrays("budget")
        self.put = 0
        self.charged = 0
        self.largest_row = 0
        self.held = 0

    @property
    def occupied(self) -> int:
        """Rows counted against ``capacity_rows``."""
        return self.put - self._rows.over - self.held

    @property
    def reserve(self) -> int:
        """Bytes reserved for a new row."""
        return self._limits.row_bytes or self.largest_row

    def charge(self, ids: Ids, nbytes: int) -> None:
        """Charge ``nbytes`` of payload to rows, in equal shares."""
        if not nbytes or not len(ids):
            return
        at, sizes, charges = self._rows.at(ids), self._arrays["nbytes"], self._arrays["charged"]
        sizes[at] += -(-nbytes // len(ids))
        before = charges[at]
        after = np.maximum(sizes[at], before)
        charges[at] = after
        self.charged += int((after - before).sum())

    def charge_new(self, new: slice, count: int, nbytes: int) -> None:
        """Count new rows, and charge them with their share of ``nbytes``, or with the reserve if that is more."""
        self.put += count
        share = -(-nbytes // count)
        self._arrays["nbytes"][new] = share
        self._arrays["charged"][new] = charged = max(share, self.reserve)
        self.charged += count * charged

    def hold(self, count: int) -> None:
        """Count complete rows kept for a checkpoint, or, if negative, released."""
        self.held += count

    def release(self, at: Ids) -> None:
        """Release the charges of ended rows, by array index."""
        self.charged -= int(self._rows.charged[at].sum())
        self.largest_row = max(self.largest_row, int(self._rows.nbytes[at].max(initial=0)))
