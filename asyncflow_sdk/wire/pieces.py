"""Pieces of a large message of body and payload. The receiver asks for them, so it decides about its memory.

The body comes first. A piece has PIECE_BYTES; the last of the body and the last of the payload may be shorter, and
none has bytes of both. So a receiver derives the length of a piece from its start.

A client offers a large request, and the server asks for its pieces, in the order of the session's offers, within
its limits. Of a large answer the server sends the first pieces, and the client asks for the others. After a silence
the client offers again, or asks for an offer. One connection keeps the order of its messages: pieces expected before
the question and missing when it is answered were lost with an earlier connection, and only these are sent again.

Both sides use Outgoing and Incoming; Uploads and Download are a server's."""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import zmq

from ..errors import AsyncFlowError, ProtocolError
from .envelope import PIECE_BYTES, Piece, Read
from .router_sockets import Route

MOST_ASKED = 8  # pieces of one message in flight
SILENCE_S = 60.0
"""Released are an upload without a requested piece, or an offer while it waits, and a download without a message."""
SESSION_BYTES = 64 << 20
"""The largest body, and the limit for all unfinished uploads of one session together, but for a single one."""
SESSION_UPLOADS = 256  # the most unfinished uploads of one session


def piece_end(start: int, sizes: tuple[int, int]) -> int:
    """Return the end of the piece at ``start``. Raises ProtocolError if none begins there."""
    body, total = sizes[0], sum(sizes)
    first, end = (0, body) if start < body else (body, total)
    if min(sizes) < 0 or not first <= start < end or (start - first) % PIECE_BYTES:
        raise ProtocolError(f"no piece of a message of {sizes} bytes begins at {start}")
    return min(start + PIECE_BYTES, end)


class Outgoing:
    """A message to send. ``payload``: contiguous buffers, not copied. ``large``: True if it is sent in pieces."""

    def __init__(self, body: bytes, payload: Sequence[Any] = ()) -> None:
        views = [memoryview(each) for each in (body, *payload)]
        self._views = [view.cast("B") for view in views if view.nbytes]
        self._ends = list(itertools.accumulate(view.nbytes for view in self._views))
        self.nbytes = self._ends[-1] if self._ends else 0
        self.sizes, self.large = (len(body), self.nbytes - len(body)), self.nbytes > PIECE_BYTES

    def piece(self, start: int) -> tuple[Piece, bytes | memoryview]:
        """Return the piece at ``start`` and its bytes. Raises ProtocolError if none begins there."""
        return Piece(start, self.sizes), self.read(start, piece_end(start, self.sizes))

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return a range of bytes: a view of one buffer, or the joined copy of several."""
        number = bisect_right(self._ends, start)
        pieces = []
        while start < stop:
            view, end = self._views[number], self._ends[number]
            first = end - view.nbytes
            pieces.append(view[start - first : stop - first])
            start, number = min(end, stop), number + 1
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Incoming:
    """A message to receive. ``body``: its bytes; the caller stores payload. Raises ProtocolError for bad sizes."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        piece_end(0, sizes)
        self.sizes, self.body = sizes, np.empty(sizes[0], np.uint8)
        self._next = 0
        self._asked: dict[int, int] = {}  # start of an expected piece → number of questions before it

    @property
    def has_body(self) -> bool:
        """True if the whole body has arrived."""
        return self._next >= self.sizes[0] <= min(self._asked, default=self._next)

    @property
    def complete(self) -> bool:
        """True if all bytes have arrived."""
        return not self._asked and self._next == sum(self.sizes)

    def ask(self, number: int, stop: int | None = None) -> tuple[int, ...]:
        """Return the starts of pieces to ask for next, all before ``stop``."""
        stop, starts = sum(self.sizes) if stop is None else stop, []
        while len(self._asked) < MOST_ASKED and self._next < stop:
            starts.append(self._next)
            self._asked[self._next] = number
            self._next = piece_end(self._next, self.sizes)
        return tuple(starts)

    def ask_again(self, before: int, number: int) -> tuple[int, ...]:
        """Return the starts of lost pieces: expected since before question ``before``."""
        lost = tuple(start for start, asked in self._asked.items() if asked < before)
        self._asked.update(dict.fromkeys(lost, number))
        return lost

    def add(self, start: int, data: Any) -> bool:
        """Receive a piece. Return True if it is an expected one. Raises ProtocolError if it is none."""
        end = piece_end(start, self.sizes)
        if len(data) != end - start:
            raise ProtocolError(f"a piece of {len(data)} bytes, where {end - start} are expected")
        if self._asked.pop(start, None) is None:
            return False  # a repeated one
        if start < self.sizes[0]:
            self.body[start:end] = np.frombuffer(data, np.uint8)
        return True


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
    """All unfinished uploads of a server. Not thread-safe. Above ``max_bytes`` in total, or above SESSION_BYTES in
    their session, they wait until others are complete. An upload is released with its session, when its request is
    cancelled, or after SILENCE_S; the client then offers it again."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.by_session: dict[str, dict[int, Upload]] = {}
        self._waiting: dict[Upload, None] = {}  # in order; without those waiting for others of their session
        self._begun_bytes = 0

    def find(self, session: str, seq: int) -> Upload | None:
        """Return the upload of a request, None if there is none."""
        return self.by_session.get(session, {}).get(seq)

    def offer(self, session: str, seq: int, sizes: tuple[int, int]) -> Upload:
        """Add an upload, or find it. Raises ProtocolError for invalid sizes, and above SESSION_UPLOADS."""
        if (upload := self.find(session, seq)) is not None:
            return upload
        if not 0 < sizes[0] <= SESSION_BYTES or sizes[1] < 0 or sum(sizes) > self._max_bytes:
            raise ProtocolError(f"a request of {sizes} bytes")
        uploads = self.by_session.setdefault(session, {})
        if len(uploads) >= SESSION_UPLOADS:
            raise ProtocolError(f"session {session} has {len(uploads)} unfinished uploads")
        upload = uploads[seq] = Upload(session, seq, sizes)
        self._line_up(session)
        return upload

    def admit(self) -> Iterator[Upload]:
        """Begin waiting uploads, in order, within the limits and this process's memory. Yield each."""
        while (upload := next(iter(self._waiting), None)) is not None:
            nbytes = sum(upload.sizes)
            if self._begun_bytes and self._begun_bytes + nbytes > self._max_bytes:
                return
            try:
                upload.begin()
            except MemoryError:
                return
            self._begun_bytes += nbytes
            del self._waiting[upload]
            yield upload

    def remove(self, upload: Upload) -> None:
        """Remove an upload. Its sink now belongs to the caller."""
        uploads = self.by_session[upload.session]
        del uploads[upload.seq]
        if not uploads:
            del self.by_session[upload.session]
        if upload.incoming is not None:
            self._begun_bytes -= sum(upload.sizes)
        self._waiting.pop(upload, None)
        self._line_up(upload.session)

    def _line_up(self, session: str) -> None:
        """Let the uploads of a session wait for admission, in order, within its limit."""
        total = 0
        for upload in self.by_session.get(session, {}).values():
            total += sum(upload.sizes)
            if sum(upload.sizes) < total > SESSION_BYTES:
                return
            if upload.incoming is None:
                self._waiting.setdefault(upload)

    def release(self, session: str, seq: int | None = None, before_s: float = math.inf) -> None:
        """Discard the upload of a request, or all of a session, without a message since ``before_s``."""
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


class Download(Outgoing):
    """An answer being sent: in pieces, or whole if it is small. It can be released at any time, because a retry
    makes it again. It sends no piece twice at once, and two windows at most."""

    def __init__(self, body: bytes, payload: Sequence[Any]) -> None:
        super().__init__(body, payload)
        self._body, self._unsent = body, self.nbytes
        self._in_flight: dict[int, zmq.MessageTracker] = {}
        self.active_s = time.monotonic()

    @property
    def complete(self) -> bool:
        """True if all of it has left this process."""
        return self._unsent <= 0 and self._idle()

    def send(self, starts: tuple[int, ...], post: Post) -> None:
        """Send the pieces at ``starts``, by default the first ones. Raises ProtocolError if none begins there."""
        self.active_s = time.monotonic()
        for start in (starts or Incoming(self.sizes).ask(0)) if self.large else (0,):
            if self._idle() or (start not in self._in_flight and len(self._in_flight) < 2 * MOST_ASKED):
                piece, data = self.piece(start) if self.large else (None, self.read(len(self._body), self.nbytes))
                body = b"" if self.large else self._body
                self._unsent -= len(body) + len(data)
                if (tracker := post(body, piece, data)) is not None:
                    self._in_flight[start] = tracker

    def _idle(self) -> bool:
        self._in_flight = {start: tracker for start, tracker in self._in_flight.items() if not tracker.done}
        return not self._in_flight
