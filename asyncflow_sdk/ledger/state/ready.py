"""Ready rows of one task: highest priority first, then in order of arrival. Rows are kept in chunks
of ids; a taken chunk is split, never scanned row by row."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..commands import Ids
from .rows import READY, Rows

NO_ROWS: Ids = np.empty(0, np.int64)
CHUNK = 512  # rows of a chunk; a take reads at most one chunk too many


class ReadyQueue:
    """FIFO by priority. Rows no longer ready stay in it and are skipped at their turn."""

    def __init__(self, rows: Rows, task: str) -> None:
        self._rows = rows
        self._task = task
        self._queues: dict[int, deque[Ids]] = {}
        self._order: list[int] = []  # negated priorities, ascending

    def __bool__(self) -> bool:
        """True if there are rows, maybe only ones no longer ready."""
        return bool(self._order)

    def push(self, ids: Ids) -> None:
        """Append ready rows."""
        for priority, part in self._ranked(ids):
            self._queue(priority).extend(self._split(part))

    def push_front(self, ids: Ids) -> None:
        """Put ready rows before all others of their priority."""
        for priority, part in self._ranked(ids):
            self._queue(priority).extendleft(reversed(self._split(part)))

    def is_ready(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of rows still ready."""
        return self._rows.having(self._task, "state", READY, ids)

    def take(self, count: int) -> Ids:
        """Remove and return up to ``count`` rows."""
        parts: list[Ids] = []
        while count > 0 and self._order:
            queue = self._queues[-self._order[0]]
            if not queue:
                del self._queues[-self._order.pop(0)]
                continue
            chunk = queue.popleft()
            if len(chunk) < count and queue:  # check small chunks together
                chunks, rows = [chunk], len(chunk)
                while rows < count and queue:
                    chunks.append(queue.popleft())
                    rows += len(chunks[-1])
                chunk = np.concatenate(chunks)
            ready = self.is_ready(chunk)
            if np.count_nonzero(ready) < len(chunk):
                chunk = chunk[ready]
            if len(chunk) > count:
                queue.appendleft(chunk[count:])
                chunk = chunk[:count]
            parts.append(chunk)
            count -= len(chunk)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else NO_ROWS

    def take_groups(self, count: int, room: int) -> Ids:
        """Remove whole groups: about ``count`` rows, at least a group, at most ``room`` rows."""
        parts: list[Ids] = []
        taken = 0
        while taken < min(count, room) and (queue := self._first()) is not None:
            chunk = queue[0]
            ends = np.append(self._ends(chunk), len(chunk))
            fits = ends[ends <= min(count, room) - taken]
            if len(fits):
                cut = int(fits[-1])
            elif not taken and ends[0] <= room:
                cut = int(ends[0])
            else:
                break
            queue.popleft()
            if cut < len(chunk):
                queue.appendleft(chunk[cut:])
            parts.append(chunk[:cut])
            taken += cut
        if len(parts) < 2:
            return parts[0] if parts else NO_ROWS
        ids = np.concatenate(parts)
        _, where = np.unique(ids, return_index=True)  # a group returned in pieces was pushed with each piece
        return ids if len(where) == len(ids) else ids[np.sort(where)]

    def peek_group(self) -> Ids:
        """Return the rows of the first group, and drop rows before it; empty if nothing is ready."""
        queue = self._first()
        return NO_ROWS if queue is None else queue[0][self._firsts(queue[0]) == self._firsts(queue[0][:1])]

    def chunks(self) -> Iterator[Ids]:
        """Yield all chunks in order, including rows no longer ready."""
        for rank in self._order:
            yield from self._queues[-rank]

    def _ranked(self, ids: Ids) -> list[tuple[int, Ids]]:
        if not self._rows.ranked or not len(ids):
            return [(0, ids)]
        priorities = self._rows.priority[self._rows.at(ids)]
        return [(int(p), ids[priorities == p]) for p in np.unique(priorities)]

    def _queue(self, priority: int) -> deque[Ids]:
        if priority not in self._queues:
            self._queues[priority] = deque()
            insort(self._order, -priority)
        return self._queues[priority]

    def _firsts(self, ids: Ids) -> Ids:
        return self._rows.first[self._rows.at(ids)]

    def _ends(self, ids: Ids) -> Ids:
        """Return the positions where another group begins."""
        firsts = self._firsts(ids)
        return np.flatnonzero(firsts[1:] != firsts[:-1]) + 1

    def _split(self, ids: Ids) -> list[Ids]:
        """Split into chunks at group borders."""
        if len(ids) <= CHUNK:
            return [ids]
        ends = self._ends(ids)
        after = np.searchsorted(ends, np.arange(CHUNK, len(ids), CHUNK))
        return np.split(ids, np.unique(ends[after[after < len(ends)]]))

    def _first(self) -> deque[Ids] | None:
        """Return the queue to take from next; its first chunk has only ready rows."""
        while self._order:
            queue = self._queues[-self._order[0]]
            while queue:
                chunk = queue[0]
                ready = self.is_ready(chunk)
                if ready.all():
                    return queue
                chunk = chunk[ready]
                queue.popleft()
                if len(chunk):
                    queue.appendleft(chunk)
                    return queue
            del self._queues[-self._order.pop(0)]
        return None
