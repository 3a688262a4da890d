"""FreeRanges: the free ranges of a writer's segments. Best fit, neighbours joined; the smallest hole that is large
enough is mostly one that was freed just now, and so in the cache, and large ones stay whole."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

CHOICES = 8


class FreeRanges:
    """Not thread-safe. Every operation is O(log n) and a memmove of the sorted list."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (size, segment number, start)
        self._stop_of: dict[tuple[int, int], int] = {}  # (segment, start) → stop
        self._start_of: dict[tuple[int, int], int] = {}  # (segment, stop) → start

    def add(self, segment: int, start: int, stop: int) -> None:
        """A range is free. It joins its neighbours."""
        before = self._start_of.pop((segment, start), None)
        if before is not None:
            self._drop(segment, before, start)
            start = before
        after = self._stop_of.get((segment, stop))
        if after is not None:
            del self._start_of[segment, after]
            self._drop(segment, stop, after)
            stop = after
        self._keep(segment, start, stop)

    def take(self, nbytes: int, cost: Callable[[int, int, int], int] | None = None) -> tuple[int, int] | None:
        """Segment and start of ``nbytes`` that are free no longer; None if no hole is large enough. ``cost`` of using
        a range (segment, start, stop): of the smallest few holes the one that costs least."""
        at = bisect_left(self._by_size, (nbytes,))
        if at == len(self._by_size):
            return None
        if cost is not None:
            least = None
            for other in range(at, min(at + CHOICES, len(self._by_size))):
                _, segment, start = self._by_size[other]
                costs = cost(segment, start, start + nbytes)
                if least is None or costs < least:
                    least, at = costs, other
                    if not costs:
                        break
        size, segment, start = self._by_size.pop(at)
        del self._stop_of[segment, start]
        del self._start_of[segment, start + size]
        if size > nbytes:
            self._keep(segment, start + nbytes, start + size)
        return segment, start

    def remove(self, segment: int, size: int) -> bool:
        """Forget a segment that is one hole. Returns whether it was."""
        if self._stop_of.get((segment, 0)) != size:
            return False
        del self._start_of[segment, size]
        self._drop(segment, 0, size)
        return True

    def forget(self, segment: int) -> None:
        """Forget every hole of a segment. O(n)."""
        for size, start in [(size, start) for size, number, start in self._by_size if number == segment]:
            del self._start_of[segment, start + size]
            self._drop(segment, start, start + size)

    def largest_first(self) -> Iterator[tuple[int, int, int]]:
        """(segment, start, stop) of each."""
        return ((segment, start, start + size) for size, segment, start in reversed(self._by_size))

    def _keep(self, segment: int, start: int, stop: int) -> None:
        self._stop_of[segment, start] = stop
        self._start_of[segment, stop] = start
        insort(self._by_size, (stop - start, segment, start))

    def _drop(self, segment: int, start: int, stop: int) -> None:
        del self._stop_of[segment, start]
        del self._by_size[bisect_left(self._by_size, (stop - start, segment, start))]
