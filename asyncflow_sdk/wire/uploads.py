"""Large requests and answers on the server's side, in pieces: see ``pieces``."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import zmq

from ..errors import AsyncFlowError, ProtocolError
from .envelope import PIECE_BYTES, Piece, Read
from .pieces import MOST_ASKED, Incoming, Outgoing, piece_end
from .router_sockets import Route

SILENCE_S = 60.0
"""An upload without a requested piece for this long, or while it waits without an offer, is released; and a
download without a message."""
BODY_BYTES = 64 << 20  # the largest body, and the limit for all bodies of one session's unfinished uploads together
SESSION_BYTES = 128 << 20  # the limit for all unfinished uploads of one session together, but for a single one
SESSION_UPLOADS = 256  # the most unfinished uploads of one session


class PayloadSink(Protocol):
    """Destination of the payload of one request."""

    def write(self, start: int, data: Any) -> None:
        """Store bytes ``start`` to ``start + len(data)``. Pieces arrive in any order."""

    def release(self) -> None:
        """Discard the payload: the rest will not arrive, and the request will not be executed."""


MakeSink: TypeAlias = Callable[[str, bytes, int], "PayloadSink | AsyncFlowError"]


class Upload:
    """One request arriving in pieces. ``incoming``: None while it waits for others."""

    def __init__(self, session: str, seq: int, sizes: tuple[int, int]) -> None:
        self.session, self.seq, self.sizes = session, seq, sizes
        self.incoming: Incoming | None = None
        self.sink: PayloadSink | AsyncFlowError | None = None

    def hear(self, route: Route, number: int | None = None) -> None:
        """Record a message of the client, of its question ``number`` if it is an offer."""
        self.route = route
        if number is not None:
            self._number = number
        if self.incoming is None:
            self.active_s = time.monotonic()

    def begin(self) -> None:
        """Make room for the body."""
        self.incoming = Incoming(self.sizes)

    def add(self, start: int, data: Any, make_sink: MakeSink) -> bytes | None:
        """Store a piece. Return the body if the request can be executed: it is complete, or has no sink because of
        an error. Raises ProtocolError if it is no piece of this upload."""
        if (incoming := self.incoming) is None:
            return None
        if incoming.add(start, data):
            self.active_s = time.monotonic()
            if start >= self.sizes[0]:
                assert self.sink is not None
                assert not isinstance(self.sink, AsyncFlowError)
                self.sink.write(start - self.sizes[0], data)
        if self.sizes[1] and self.sink is None and incoming.has_body:
            self.sink = make_sink(self.session, incoming.body.tobytes(), self.sizes[1])
        return incoming.body.tobytes() if incoming.complete or isinstance(self.sink, AsyncFlowError) else None

    def ask(self, again: bool = False) -> Read | None:
        """Return the question to the client, None without one. ``again``: lost pieces, too."""
        if self.incoming is None:
            return None
        lost = self.incoming.ask_again(self._number, self._number) if again else ()
        starts = lost + self.incoming.ask(self._number, self.sizes[0] if self.sink is None else None)
        return Read(starts, self._number) if starts else None


class Uploads:
    """All unfinished uploads of a server. Not thread-safe. Above ``max_bytes`` in total, or above SESSION_BYTES or
    BODY_BYTES of bodies in their session, they wait until others are complete. An upload is released with its
    session, when its request is cancelled, or after SILENCE_S; the client then offers it again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.by_session: dict[str, dict[int, Upload]] = {}
        self._waiting: deque[Upload] = deque()
        self._in_line: set[Upload] = set()  # waiting or begun: all but those waiting for others of their session
        self._begun_bytes = 0

    def find(self, session: str, seq: int) -> Upload | None:
        """Return the upload of a request, None if there is none."""
        return self.by_session.get(session, {}).get(seq)

    def offer(self, session: str, seq: int, sizes: tuple[int, int]) -> Upload:
        """Add an upload, or find it. Raises ProtocolError for invalid sizes, and above SESSION_UPLOADS."""
        if (upload := self.find(session, seq)) is not None:
            return upload
        if not 0 < sizes[0] <= BODY_BYTES or sizes[1] < 0 or sum(sizes) > self._max_bytes:
            raise ProtocolError(f"a request of {sizes} bytes")
        uploads = self.by_session.setdefault(session, {})
        if len(uploads) >= SESSION_UPLOADS:
            raise ProtocolError(f"session {session} has {len(uploads)} unfinished uploads")
        upload = uploads[seq] = Upload(session, seq, sizes)
        self._line_up(session)
        return upload

    def admit(self) -> Iterator[Upload]:
        """Begin waiting uploads, in order, within the limits and this process's memory. Yield each."""
        while self._waiting:
            nbytes = sum(self._waiting[0].sizes)
            if self._begun_bytes and self._begun_bytes + nbytes > self._max_bytes:
                return
            try:
                self._waiting[0].begin()
            except MemoryError:
                return
            self._begun_bytes += nbytes
            yield self._waiting.popleft()

    def remove(self, upload: Upload) -> None:
        """Remove an upload. Its sink now belongs to the caller."""
        uploads = self.by_session[upload.session]
        del uploads[upload.seq]
        if not uploads:
            del self.by_session[upload.session]
        if upload.incoming is not None:
            self._begun_bytes -= sum(upload.sizes)
        elif upload in self._in_line:
            self._waiting.remove(upload)
        self._in_line.discard(upload)
        self._line_up(upload.session)

    def _line_up(self, session: str) -> None:
        """Let the uploads of a session wait for admission, in order, within its limits."""
        bodies = total = 0
        for upload in self.by_session.get(session, {}).values():
            nbytes = sum(upload.sizes)
            bodies, total = bodies + upload.sizes[0], total + nbytes
            if bodies > BODY_BYTES or nbytes < total > SESSION_BYTES:
                return
            if upload not in self._in_line:
                self._in_line.add(upload)
                self._waiting.append(upload)

    def release(self, session: str, seq: int | None = None, before_s: float = math.inf) -> None:
        """Remove the upload of a request, or all of a session, without a message since ``before_s``, and discard
        what has arrived."""
        for upload in list(self.by_session.get(session, {}).values()):
            if seq in (None, upload.seq) and upload.active_s < before_s:
                self.remove(upload)
                if not isinstance(upload.sink, AsyncFlowError | None):
                    upload.sink.release()

    def sweep(self, now: float) -> None:
        """Release uploads inactive for more than SILENCE_S."""
        for session in list(self.by_session):
            self.release(session, before_s=now - SILENCE_S)


Post: TypeAlias = Callable[[bytes, "Piece | None", Any], "zmq.MessageTracker | None"]
"""Sends a message of body, piece and its data. Returns a tracker while the data are not sent."""


class Download:
    """An answer being sent: in pieces, or whole if it is small. It can be released at any time, because a retry
    makes it again. It sends no piece twice at once, and two windows at most."""

    def __init__(self, body: bytes, payload: Sequence[Any]) -> None:
        self._message, self._body = Outgoing(body, payload), body
        self._in_flight: dict[int, zmq.MessageTracker] = {}
        self._unsent = self._message.nbytes
        self.active_s = time.monotonic()

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Bytes of body and payload; None if it is small enough for one message."""
        return self._message.sizes if self._message.nbytes > PIECE_BYTES else None

    @property
    def complete(self) -> bool:
        """True if all of it has left this process."""
        return self._unsent <= 0 and self._idle()

    def send(self, starts: tuple[int, ...], post: Post) -> None:
        """Send the pieces at ``starts``, by default as many as a client asks for at once. Raises ProtocolError if no
        piece begins there."""
        self.active_s = time.monotonic()
        sizes, message = self.sizes, self._message
        for start in (0,) if sizes is None else starts or Incoming(sizes).ask(0):
            if self._idle() or (start not in self._in_flight and len(self._in_flight) < 2 * MOST_ASKED):
                if sizes is None:
                    tracker = post(self._body, None, message.read(len(self._body), message.nbytes))
                    self._unsent = 0
                else:
                    data = message.read(start, piece_end(start, sizes))
                    tracker = post(b"", Piece(start, sizes), data)
                    self._unsent -= len(data)
                if tracker is not None:
                    self._in_flight[start] = tracker

    def _idle(self) -> bool:
        self._in_flight = {start: tracker for start, tracker in self._in_flight.items() if not tracker.done}
        return not self._in_flight
