"""Timers: a heap of expiry times. Entries of removed or renewed items are skipped."""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar


class Timed(Protocol):
    expires: float


T = TypeVar("T", bound=Timed)


class Timers(Generic[T]):
    """Expiry of the items in a dict. Adding and reading cost O(log n)."""

    def __init__(self, things: dict[int, T]) -> None:
        self._things = things
        self._heap: list[tuple[float, int]] = []

    def add(self, key: int) -> None:
        """Add a new item, or one with a new time."""
        heapq.heappush(self._heap, (self._things[key].expires, key))
        if len(self._heap) > 64 + 4 * len(self._things):  # mostly stale entries
            self._heap = [(thing.expires, key) for key, thing in self._things.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest expiry, past or future."""
        while self._heap:
            time, key = self._heap[0]
            thing = self._things.get(key)
            if thing is not None and thing.expires == time:
                return time
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> list[T]:
        """Return the expired items, earliest first."""
        out: dict[int, T] = {}  # the same time may have been set twice
        while (time := self.next()) is not None and time <= now:
            key = heapq.heappop(self._heap)[1]
            out[key] = self._things[key]
        return list(out.values())
