"""Dead letters: groups that failed for good, with the reasons of their failed attempts.

The last ``MAX_GROUPS`` are kept, each with its last ``MAX_REASONS`` reasons.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from ...types.reports import FailedGroup
from ..commands import Ids

MAX_GROUPS = 1000
MAX_REASONS = 16
REASON_LENGTH = 5000


class DeadLetters:
    """``groups``: the newest failed groups. ``total``: number of all failed groups."""

    def __init__(self) -> None:
        self.groups: deque[FailedGroup] = deque(maxlen=MAX_GROUPS)
        self.total = 0
        self._reasons: dict[int, deque[str]] = {}  # first row of a live group → reasons
        self._lost: deque[tuple[str, int]] = deque(maxlen=MAX_GROUPS)  # lost workers, each with a group held

    def blame(self, firsts: Ids, reason: str) -> None:
        """Note why groups, by their first rows, lost a lease."""
        for first in np.unique(firsts).tolist():
            self._reasons.setdefault(first, deque(maxlen=MAX_REASONS)).append(reason[:REASON_LENGTH])

    def note_lost(self, worker: str, firsts: Ids) -> None:
        """Note the groups held by a lost worker."""
        self._lost.extend((worker, first) for first in np.unique(firsts).tolist())

    def explain(self, worker: str, reason: str) -> int:
        """Note the cause of a worker's end for the groups held by it, failed ones too. Return their number."""
        firsts, text = {first for name, first in self._lost if name == worker}, f"{worker}: {reason}"[:REASON_LENGTH]
        self._lost = deque((each for each in self._lost if each[0] != worker), MAX_GROUPS)
        self.blame(np.array([first for first in firsts if first in self._reasons], np.int64), text)
        for at, group in enumerate([*self.groups]):
            if group.first in firsts:
                self.groups[at] = msgspec.structs.replace(group, reasons=(*group.reasons, text)[-MAX_REASONS:])
        return len(firsts)

    def failed(self, **group: Any) -> None:
        """Keep a group that failed for good."""
        self.total += 1
        self.groups.append(FailedGroup(reasons=tuple(self._reasons.get(group["first"], ())), **group))

    def lost(
        self, key: str, rows: Ids, groups: Ids, partition: Ids, names: dict[int, str], reason: str, now: float
    ) -> None:
        """Keep rows of one put with lost payload, adjacent ones together. ``partition``: number for
        each row; ``names``: of the partitions."""
        breaks = (np.diff(rows) != 1) | (np.diff(groups) > 1) | (np.diff(partition) != 0)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        self.total += len(bounds) - 1
        for start, end in [*pairwise(bounds)][-MAX_GROUPS:]:
            self.groups.append(
                FailedGroup(
                    first=int(rows[start]), rows=end - start, task="", partition=names[int(partition[start])], key=key,
                    place=int(groups[start]), reasons=(reason[:REASON_LENGTH],), time_s=now,
                )
            )  # fmt: skip

    @property
    def blamed(self) -> bool:
        """True if any live group lost a lease."""
        return bool(self._reasons)

    def forget(self, firsts: Ids) -> None:
        """Forget the reasons of ended groups."""
        for first in np.unique(firsts).tolist():
            self._reasons.pop(first, None)
