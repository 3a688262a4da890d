"""SequenceNumbers: the requests of one session, and what the server has yet to hear of them.

A number stays open until its answer is here. One that was dropped stays open until an answer shows that the
server heard of it: until then ``done`` must not pass it, or the server would forget what it has to take back.
"""

from __future__ import annotations

import threading

from .envelope import PROTOCOL, RequestEnvelope, RequestPart, encode


class SequenceNumbers:
    """Thread-safe."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()
        self._dropped: set[int] = set()
        self._settled: list[int] = []
        self._told: dict[int, tuple[int, ...]] = {}  # request → what its first frame said was dropped

    def begin(self) -> int:
        """The number of a new request."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last

    def frame(self, seq: int, body: bytes, part: RequestPart | None = None) -> bytes:
        """A request or a part of its exchange, or with seq 0 only news for the server."""
        with self._lock:
            settled, self._settled = tuple(self._settled), []
            dropped = tuple(self._dropped)
            if seq:
                self._told.setdefault(seq, dropped)
            done = min(self._open, default=self._last + 1)
        return encode(RequestEnvelope(PROTOCOL, self._session, seq, done, settled, dropped, body, part))

    def answered(self, seq: int) -> None:
        """The answer is here."""
        with self._lock:
            heard = self._told.pop(seq, ())
            self._dropped.difference_update(heard)
            self._open.difference_update(heard)
            self._open.discard(seq)
            self._settled.append(seq)

    def drop(self, seq: int) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._told.pop(seq, None)
            self._dropped.add(seq)
