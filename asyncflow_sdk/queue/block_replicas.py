"""BlockReplicas: the second place of each block in the server's index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
_NONE = -1


class BlockReplicas:
    """Places by slot of a block: int64 (n, 3), number of the segment (-1: no replica), start, serial.
    Not thread-safe: only the server's thread uses it."""

    def __init__(self) -> None:
        self._places = np.empty((0, 3), np.int64)
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, slot: int, segment: int, start: int, serial: int) -> None:
        """Add the replica of a block that has none."""
        self._reach(slot)
        self._places[slot] = segment, start, serial
        self._count += 1

    def at(self, slots: Ints) -> Ints:
        """Return the places of blocks."""
        self._reach(int(slots.max(initial=_NONE)))
        places: Ints = self._places[slots]
        return places

    def having(self, slots: Ints) -> Ints:
        """Return the slots of the blocks with a replica."""
        found: Ints = slots[self.at(slots)[:, 0] != _NONE]
        return found

    def in_segments(self, segments: Sequence[int]) -> Ints:
        """Return the slots of the blocks with a replica in these segments."""
        found: Ints = np.flatnonzero(np.isin(self._places[:, 0], segments))
        return found

    def take(self, slots: Ints) -> Ints:
        """Remove and return the replicas of distinct blocks, each of which has one."""
        places = self.at(slots)
        self._places[slots, 0] = _NONE
        self._count -= len(slots)
        return places

    def _reach(self, slot: int) -> None:
        missing = slot + 1 - len(self._places)
        if missing > 0:
            more = np.full((max(missing, len(self._places), 1024), 3), _NONE, np.int64)
            self._places = np.concatenate([self._places, more])
