"""InProgressVersion: the version being written, for replicas that stream it chunk by chunk.

    version.add(place)                                       # the writer's threads: a chunk is complete
    version.complete() or version.drop()                     # sent as a version, or given up
    attempt, place = version.wait(connection, attempt, 3)    # one thread for each replica

Nothing is pinned, and the writer never waits for replicas.
"""

from __future__ import annotations

import os
import select
import socket
import threading

from .version_memory import ChunkPlace

ALL, GONE = -1, -2
"""Results in the place of a chunk: the attempt has no more chunks; it was given up or replaced."""
NEXT_ATTEMPT = -1
"""Chunk number that requests the first chunk of a later attempt."""


class InProgressVersion:
    """``attempt``: number of the newest attempt to write a version; 0 before the first.
    Thread-safe."""

    def __init__(self) -> None:
        self.attempt = 0
        self._places: list[ChunkPlace] = []
        self._open = self._complete = False
        self._lock = threading.Lock()
        self._waiting: set[int] = set()

    def add(self, place: ChunkPlace) -> None:
        """Add a complete chunk to the open attempt, or to a new one."""
        with self._lock:
            if not self._open:
                self.attempt += 1
                self._places, self._open, self._complete = [], True, False
            self._places.append(place)
            self._wake()

    def complete(self) -> None:
        """End the open attempt: it is a version."""
        with self._lock:
            self._complete, self._open = self._open, False
            self._wake()

    def drop(self) -> None:
        """Give up the newest attempt, open or complete."""
        with self._lock:
            self._places, self._open, self._complete = [], False, False
            self._wake()

    def wait(self, connection: socket.socket, attempt: int, number: int) -> tuple[int, ChunkPlace | int]:
        """Wait for chunk ``number`` of ``attempt``. Return its attempt, and its place, ALL or GONE.
        Raises EOFError once ``connection`` is closed or sends anything."""
        event = os.eventfd(0)
        try:
            poll = select.poll()
            poll.register(connection, select.POLLIN)
            poll.register(event, select.POLLIN)
            while True:
                with self._lock:
                    found = self._find(attempt, number)
                    if found is not None:
                        return found
                    self._waiting.add(event)
                if any(ready != event for ready, _ in poll.poll()):
                    raise EOFError
                os.eventfd_read(event)
        finally:
            with self._lock:
                self._waiting.discard(event)
            os.close(event)

    # ---- with the lock held

    def _find(self, attempt: int, number: int) -> tuple[int, ChunkPlace | int] | None:
        if number == NEXT_ATTEMPT:
            return (self.attempt, self._places[0]) if self.attempt > attempt and self._places else None
        if attempt == self.attempt and 0 <= number < len(self._places):
            return attempt, self._places[number]
        if attempt == self.attempt and self._open:
            return None
        return attempt, ALL if attempt == self.attempt and self._complete and number == len(self._places) else GONE

    def _wake(self) -> None:
        for event in self._waiting:
            os.eventfd_write(event, 1)
