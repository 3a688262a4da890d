"""InProgressVersion: the version being written, chunk after chunk, for those who do not wait until it is.

    unfinished.written(place)                                     # the writer's threads: a chunk is complete
    unfinished.whole() or unfinished.dropped()                    # that was the last; it will never be sent
    attempt, place = unfinished.wait(connection, attempt, number)    # a thread for each who follows

Nothing is pinned here, and nobody who follows is waited for.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from .version_memory import ChunkPlace

ALL, GONE = -1, -2
"""Instead of a chunk: there are no more of that attempt; it was given up, or a later one has begun."""
LATER = -1
"""Instead of a number: the first chunk of a later attempt."""


class InProgressVersion:
    """Thread-safe. ``attempt``: the number of the newest attempt to write a version; 0 before the first."""

    def __init__(self) -> None:
        self.attempt = 0
        self._places: list[ChunkPlace] = []
        self._open = self._sent = False
        self._lock = threading.Lock()
        self._waiting: set[int] = set()

    def written(self, place: ChunkPlace) -> None:
        """The next chunk is complete, of the attempt under way, or of a new one."""
        with self._lock:
            if not self._open:
                self.attempt += 1
                self._places, self._open, self._sent = [], True, False
            self._places.append(place)
            self._tell()

    def whole(self) -> None:
        """The attempt under way is a version now."""
        with self._lock:
            self._sent, self._open = self._open, False
            self._tell()

    def dropped(self) -> None:
        """The last attempt, under way or sent, has come to nothing."""
        with self._lock:
            self._places, self._open, self._sent = [], False, False
            self._tell()

    def wait(self, connection: socket.socket, attempt: int, number: int) -> tuple[int, ChunkPlace | int]:
        """Chunk ``number`` of ``attempt``, or LATER; ALL or GONE instead. Raises EOFError when ``connection`` ends before."""
        woken = os.eventfd(0)
        try:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(woken, select.POLLIN)
            while True:
                with self._lock:
                    found = self._look(attempt, number)
                    if found is not None:
                        return found
                    self._waiting.add(woken)
                if any(ready != woken for ready, _ in poll.poll()):  # whoever waits says nothing
                    raise EOFError
                os.eventfd_read(woken)
        finally:
            with self._lock:
                self._waiting.discard(woken)
            os.close(woken)

    # ---- with the lock held

    def _look(self, attempt: int, number: int) -> tuple[int, ChunkPlace | int] | None:
        if number == LATER:
            return (self.attempt, self._places[0]) if self.attempt > attempt and self._places else None
        if attempt == self.attempt and 0 <= number < len(self._places):
            return attempt, self._places[number]
        if attempt == self.attempt and self._open:
            return None
        return attempt, ALL if attempt == self.attempt and self._sent and number == len(self._places) else GONE

    def _tell(self) -> None:
        for woken in self._waiting:
            os.eventfd_write(woken, 1)
