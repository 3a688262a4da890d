"""SequenceNumbers: the request numbers of one session, and the confirmations and cancellations that
the server has not received yet.

A number is open until its answer arrives. A cancelled number stays open until an answer proves that
the server knows of the cancellation: if ``done`` passed it before, the server would forget the
answer without undoing its effect.
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
        self._reported: dict[int, tuple[int, ...]] = {}  # request → the cancellations in its first message

    def begin(self) -> int:
        """Return the number of a new request."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last

    def envelope(self, seq: int, body: bytes, part: RequestPart | None = None) -> bytes:
        """Encode a message with confirmations and cancellations; ``seq`` 0: about no request."""
        with self._lock:
            settled, self._settled = tuple(self._settled), []
            dropped = tuple(self._dropped)
            if seq:
                self._reported.setdefault(seq, dropped)
            done = min(self._open, default=self._last + 1)
        return encode(RequestEnvelope(PROTOCOL, self._session, seq, done, settled, dropped, body, part))

    def settle(self, seq: int) -> None:
        """Record that the answer has arrived."""
        with self._lock:
            reported = self._reported.pop(seq, ())
            self._dropped.difference_update(reported)
            self._open.difference_update(reported)
            self._open.discard(seq)
            self._settled.append(seq)

    def drop(self, seq: int) -> None:
        """Cancel a request: nothing waits for its answer any more."""
        with self._lock:
            self._reported.pop(seq, None)
            self._dropped.add(seq)
