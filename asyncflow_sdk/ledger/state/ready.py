"""Ready rows of one task: the highest priority first, within one in order of arrival. Chunks of ids; a taken chunk
is split, never scanned row by row."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ..commands import Ids
from .rows import READY, Rows

NO_ROWS: Ids = np.empty(0, np.int64)
CHUNK = 512  # rows of a chunk: each take looks at one chunk more than it gives


class ReadyQueue:
    """FIFO by priority. Rows that stopped being ready stay in it and are skipped when their turn comes."""

    def __init__(self, rows: Rows, task: str) -> None:
        self._rows = rows
        self._task = task
        self._queues: dict[int, deque[Ids]] = {}
        self._order: list[int] = []  # minus the priorities that have a queue, so: in the order of their turn

    def __bool__(self) -> bool:
        """Whether there is anything, if only rows that are no longer ready."""
        return bool(self._order)

    def push(self, ids: Ids) -> None:
        for priority, part in self._ranked(ids):
            self._queue(priority).extend(self._split(part))

    def push_front(self, ids: Ids) -> None:
        for priority, part in self._ranked(ids):
            self._queue(priority).extendleft(reversed(self._split(part)))

    def is_ready(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return self._rows.having(self._task, "state", READY, ids)

    def take(self, count: int) -> Ids:
        """Up to ``count`` rows."""
        parts: list[Ids] = []
        while count > 0 and self._order:
            queue = self._queues[-self._order[0]]
            if not queue:
                del self._queues[-self._order.pop(0)]
                continue
            chunk = queue.popleft()
            if len(chunk) < count and queue:  # small chunks are looked at together
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
        """Whole groups: about ``count`` rows, at least one group, never more than ``room`` rows."""
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
        _, where = np.unique(ids, return_index=True)  # a group that came back in pieces was pushed with each of them
        return ids if len(where) == len(ids) else ids[np.sort(where)]

    def peek_group(self) -> Ids:
        """The rows of the first group; empty when nothing is ready."""
        queue = self._first()
        return NO_ROWS if queue is None else queue[0][self._firsts(queue[0]) == self._firsts(queue[0][:1])]

    def chunks(self) -> Iterator[Ids]:
        """All there is, in order; with rows that are no longer ready."""
        for rank in self._order:
            yield from self._queues[-rank]

    def _ranked(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Rows apart by their priority."""
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
        """Where another group begins."""
        firsts = self._firsts(ids)
        return np.flatnonzero(firsts[1:] != firsts[:-1]) + 1

    def _split(self, ids: Ids) -> list[Ids]:
        """Chunks that end where groups end."""
        if len(ids) <= CHUNK:
            return [ids]
        ends = self._ends(ids)
        after = np.searchsorted(ends, np.arange(CHUNK, len(ids), CHUNK))
        return np.split(ids, np.unique(ends[after[after < len(ends)]]))

    def _first(self) -> deque[Ids] | None:
        """The queue whose turn it is; its first chunk has ready rows and is rid of those that are not."""
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
