"""What the ledger remembers of rows that are gone: keys of puts, and groups that failed with the reasons.

Both are bounded: a key is remembered while rows of its put live, and of the last ``KEYS`` keyed puts; of failed
groups the last ``LETTERS``, of one group the last ``REASONS`` reasons, ``LETTER`` letters of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any

import numpy as np

from . import commands as cmd
from .commands import Ids
from .rows import LIVE, Rows

KEYS = 100_000
LETTERS = 1000
REASONS = 16
LETTER = 5000


class KeyedPuts:
    """Which keys were put, in order of their rows."""

    def __init__(self) -> None:
        self._puts: dict[str, tuple[int, int, int]] = {}  # key → first row, rows, rows a group
        self._order: list[tuple[int, str]] = []  # first row and key, by row; a forgotten front is cut off in bulk
        self._forgotten = 0

    def get(self, key: str) -> cmd.PutDone | None:
        """What the put with this key made."""
        if key not in self._puts:
            return None
        first, count, _ = self._puts[key]
        return cmd.PutDone(first=first, count=count, again=True)

    def add(self, key: str, first: int, count: int, group_size: int, rows: Rows) -> None:
        self._puts[key] = first, count, group_size
        self._order.append((first, key))
        while len(self._puts) > KEYS and self._is_over(self._order[self._forgotten][1], rows):
            del self._puts[self._order[self._forgotten][1]]
            self._forgotten += 1
        if self._forgotten > KEYS:
            del self._order[: self._forgotten]
            self._forgotten = 0

    def newest(self, prefix: str) -> cmd.LastPut:
        """The newest put whose key begins so."""
        for first, key in reversed(self._order):
            if key.startswith(prefix) and key in self._puts:
                return cmd.LastPut(key=key, first=first, count=self._puts[key][1])
        return cmd.LastPut()

    def find(self, row: int) -> tuple[str, int]:
        """The key of the put that made a row, and which of its groups the row is in."""
        at = bisect_right(self._order, row, key=lambda put: put[0]) - 1
        if at >= self._forgotten:
            key = self._order[at][1]
            first, count, group_size = self._puts[key]
            if row < first + count:
                return key, (row - first) // group_size
        return "", -1

    def _is_over(self, key: str, rows: Rows) -> bool:
        first, count, _ = self._puts[key]
        return not (rows.state[max(first - rows.base, 0) : max(first + count - rows.base, 0)] == LIVE).any()


class Letters:
    """Why rows lost their leases, and the groups that did so too often."""

    def __init__(self) -> None:
        self.groups: deque[cmd.FailedGroup] = deque(maxlen=LETTERS)
        self.total = 0
        self._reasons: dict[int, deque[str]] = {}  # first row of a live group → reasons

    def blame(self, firsts: Ids, reason: str) -> None:
        """Groups (by their first rows) lost a lease."""
        for first in np.unique(firsts).tolist():
            self._reasons.setdefault(first, deque(maxlen=REASONS)).append(reason[:LETTER])

    def failed(self, **group: Any) -> None:
        """A group failed for good."""
        self.total += 1
        self.groups.append(cmd.FailedGroup(reasons=tuple(self._reasons.get(group["first"], ())), **group))

    @property
    def blamed(self) -> bool:
        """Whether any live group lost a lease."""
        return bool(self._reasons)

    def forget(self, firsts: Ids) -> None:
        """Groups ended."""
        for first in np.unique(firsts).tolist():
            self._reasons.pop(first, None)
