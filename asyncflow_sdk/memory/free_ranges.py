"""FreeRanges: the free ranges of an arena's segments. Best fit: the smallest sufficient range was
mostly freed just now, and is still in the cache, while large ranges stay whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

CHOICES = 8


class FreeRanges:
    """Not thread-safe. Operations take O(log n) and a memmove of the sorted list, unless noted."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int, int]] = []  # (size, segment number, start)
        self._stop_of: dict[tuple[int, int], int] = {}  # (segment, start) → stop
        self._start_of: dict[tuple[int, int], int] = {}  # (segment, stop) → start

    def add(self, segment: int, start: int, stop: int) -> None:
        """Add a range, and join it with adjacent ones."""
        before = self._start_of.pop((segment, start), None)
        if before is not None:
            self._drop(segment, before, start)
            start = before
        after = self._stop_of.get((segment, stop))
        if after is not None:
            del self._start_of[segment, after]
            self._drop(segment, stop, after)
            stop = after
        self._insert(segment, start, stop)

    def take(self, nbytes: int, cost: Callable[[int, int, int], int] | None = None) -> tuple[int, int] | None:
        """Remove ``nbytes`` and return their segment and start; None if no range is large enough. ``cost`` of a range
        (segment, start, stop): take the cheapest of the smallest CHOICES sufficient ranges."""
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
            self._insert(segment, start + nbytes, start + size)
        return segment, start

    def remove(self, segment: int, size: int) -> bool:
        """Remove a segment of ``size`` bytes if all of it is free. Return True if it was."""
        if self._stop_of.get((segment, 0)) != size:
            return False
        del self._start_of[segment, size]
        self._drop(segment, 0, size)
        return True

    def forget(self, segment: int) -> None:
        """Remove every range of a segment. O(n)."""
        for size, start in [(size, start) for size, number, start in self._by_size if number == segment]:
            del self._start_of[segment, start + size]
            self._drop(segment, start, start + size)

    def largest_first(self) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, start, stop) of each range."""
        return ((segment, start, start + size) for size, segment, start in reversed(self._by_size))

    def _insert(self, segment: int, start: int, stop: int) -> None:
        self._stop_of[segment, start] = stop
        self._start_of[segment, stop] = start
        insort(self._by_size, (stop - start, segment, start))

    def _drop(self, segment: int, start: int, stop: int) -> None:
        del self._stop_of[segment, start]
        del self._by_size[bisect_left(self._by_size, (stop - start, segment, start))]
