"""Ready rows of one task in order of arrival, as chunks of ids. A taken chunk is split, never scanned row by row."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from .commands import Ids
from .rows import READY, Rows

NOBODY: Ids = np.empty(0, np.int64)
CHUNK = 512  # rows of a chunk: each take looks at one chunk more than it gives


class ReadyQueue:
    """FIFO. Rows that stopped being ready stay in it and are skipped when their turn comes."""

    def __init__(self, rows: Rows, task: str) -> None:
        self._rows = rows
        self._task = task
        self._chunks: deque[Ids] = deque()

    def push(self, ids: Ids) -> None:
        self._chunks.extend(self._split(ids))

    def push_front(self, ids: Ids) -> None:
        self._chunks.extendleft(reversed(self._split(ids)))

    def is_ready(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self._rows.having(self._task, "state", READY, ids)

    def take(self, count: int) -> Ids:
        """Up to ``count`` rows."""
        parts: list[Ids] = []
        while count > 0 and self._head() is not None:
            chunk = self._chunks.popleft()
            if len(chunk) > count:
                self._chunks.appendleft(chunk[count:])
                chunk = chunk[:count]
            parts.append(chunk)
            count -= len(chunk)
        return np.concatenate(parts) if parts else NOBODY

    def take_groups(self, count: int, room: int) -> Ids:
        """Whole groups: about ``count`` rows, at least one group, never more than ``room`` rows."""
        parts: list[Ids] = []
        taken = 0
        while taken < min(count, room) and (chunk := self._head()) is not None:
            ends = np.append(np.flatnonzero(np.diff(self._firsts(chunk))) + 1, len(chunk))
            fits = ends[ends <= min(count, room) - taken]
            if len(fits):
                cut = int(fits[-1])
            elif not taken and ends[0] <= room:
                cut = int(ends[0])
            else:
                break
            self._chunks.popleft()
            if cut < len(chunk):
                self._chunks.appendleft(chunk[cut:])
            parts.append(chunk[:cut])
            taken += cut
        return np.concatenate(parts) if parts else NOBODY

    def peek_group(self) -> Ids:
        """The rows of the first group; empty when nothing is ready."""
        chunk = self._head()
        return NOBODY if chunk is None else chunk[self._firsts(chunk) == self._firsts(chunk[:1])]

    def _firsts(self, ids: Ids) -> Ids:
        return self._rows.first[self._rows.at(ids)]

    def _split(self, ids: Ids) -> list[Ids]:
        """Chunks that end where groups end."""
        if len(ids) <= CHUNK:
            return [ids]
        ends = np.flatnonzero(np.diff(self._firsts(ids))) + 1
        after = np.searchsorted(ends, np.arange(CHUNK, len(ids), CHUNK))
        return np.split(ids, np.unique(ends[after[after < len(ends)]]))

    def _head(self) -> Ids | None:
        """The first chunk with ready rows, rid of those that are not."""
        while self._chunks:
            chunk = self._chunks[0]
            ready = self.is_ready(chunk)
            if ready.all():
                return chunk
            chunk = chunk[ready]
            self._chunks.popleft()
            if len(chunk):
                self._chunks.appendleft(chunk)
                return chunk
        return None
