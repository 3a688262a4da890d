"""Uploads and downloads: requests received in fragments and answers sent in fragments, on the
server's side.

Each payload fragment of a request goes straight to the handler's PayloadSink. The request is
executed once all fragments have arrived. An upload is released with its session, when its request
is cancelled, or after SILENCE_S; the client then begins it again under the same request number.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import zmq

from ..errors import ProtocolError
from .envelope import FRAGMENT_BYTES, WINDOW_BYTES, Fragment, Progress
from .fragments import Fragments, Reassembly, fragment_end
from .router_sockets import Route

SILENCE_S = 60.0
"""An upload or download without a message for this long is released."""
BODY_BYTES = 64 << 20
"""The largest body. The server holds it in memory until it is executed."""
SESSION_UPLOADS = 256
"""The most unfinished uploads of one session."""


class PayloadSink(Protocol):
    """Destination of the payload of one request."""

    @property
    def error(self) -> Exception | None:
        """Why the payload cannot be stored, else None. The request then fails without it."""

    def write(self, start: int, data: Any) -> None:
        """Store bytes ``start`` to ``start + len(data)``. Fragments arrive in any order."""

    def release(self) -> None:
        """Discard the payload: the rest will not arrive, and the request will not be executed."""


class MemorySink:
    """A sink in memory of its own."""

    error: Exception | None = None

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)

    def write(self, start: int, data: Any) -> None:
        """Store bytes ``start`` to ``start + len(data)``."""
        self.memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def release(self) -> None:
        """Free the memory."""
        self.memory = self.memory[:0].copy()


class Upload:
    """One request arriving in fragments. ``route``: the connection of its last fragment."""

    def __init__(self, session: str, seq: int, sizes: tuple[int, int]) -> None:
        self.session, self.seq = session, seq
        self.number = secrets.randbits(62) + 1
        self.reassembly = Reassembly(sizes)
        self.sink: PayloadSink | None = None
        self.route: Route | None = None
        self.active_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """True if its request can be executed: it is complete, or its sink has an error."""
        return self.reassembly.complete or (self.sink is not None and self.sink.error is not None)

    def progress(self, message_upload: int, query: int = 0) -> Progress:
        """Return the progress report to send to the client."""
        got = self.reassembly
        limit = got.sizes[0] if self.sink is None else got.low + WINDOW_BYTES
        return Progress(True, self.number, message_upload, got.low, got.beyond, limit, query)


class Uploads:
    """All unfinished uploads of a server. Not thread-safe. ``make_sink``: called with session, body
    and payload bytes. Payloads above ``max_bytes`` in total wait until others are complete."""

    def __init__(self, make_sink: Callable[[str, bytes, int], PayloadSink], max_bytes: int) -> None:
        self._make_sink, self._max_bytes = make_sink, max_bytes
        self._uploads: dict[str, dict[int, Upload]] = {}
        self._waiting: deque[Upload] = deque()
        self._admitted_bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._uploads.values()))

    def find(self, session: str, seq: int) -> Upload | None:
        """Return the upload of a request, None if there is none."""
        return self._uploads.get(session, {}).get(seq)

    def begin(self, session: str, seq: int, sizes: tuple[int, int]) -> Upload:
        """Add an upload. Raises ProtocolError for invalid sizes, and above SESSION_UPLOADS."""
        if not 0 < sizes[0] <= BODY_BYTES or sizes[1] < 0 or sum(sizes) > self._max_bytes:
            raise ProtocolError(f"a request of {sizes} bytes")
        uploads = self._uploads.setdefault(session, {})
        if len(uploads) >= SESSION_UPLOADS:
            raise ProtocolError(f"session {session} has {len(uploads)} unfinished uploads")
        upload = uploads[seq] = Upload(session, seq, sizes)
        return upload

    def add(self, upload: Upload, fragment: Fragment, data: Any) -> None:
        """Store a fragment. Raises ProtocolError if it is no fragment of this upload."""
        body = upload.reassembly.sizes[0]
        if fragment.sizes != upload.reassembly.sizes or (upload.sink is None and fragment.start >= body):
            raise ProtocolError(f"no fragment of upload {upload.number} is expected at {fragment.start}")
        waits = upload.reassembly.low < body < sum(fragment.sizes)
        if upload.reassembly.add(fragment.start, data):
            assert upload.sink is not None
            upload.sink.write(fragment.start - body, data)
        upload.active_s = time.monotonic()
        if waits and upload.reassembly.low >= body:
            self._waiting.append(upload)

    def admit(self) -> Iterator[Upload]:
        """Make sinks for uploads with a complete body, in order, within ``max_bytes``. Yield each."""
        while self._waiting:
            upload = self._waiting[0]
            payload = upload.reassembly.sizes[1]
            if self._admitted_bytes and self._admitted_bytes + payload > self._max_bytes:
                return
            self._waiting.popleft()
            upload.sink = self._make_sink(upload.session, upload.reassembly.body, payload)
            self._admitted_bytes += payload
            yield upload

    def remove(self, upload: Upload) -> None:
        """Remove an upload. Its sink now belongs to the caller."""
        uploads = self._uploads[upload.session]
        del uploads[upload.seq]
        if not uploads:
            del self._uploads[upload.session]
        if upload.sink is not None:
            self._admitted_bytes -= upload.reassembly.sizes[1]
        else:
            self._waiting = deque(each for each in self._waiting if each is not upload)

    def release(self, session: str, seq: int | None = None) -> None:
        """Remove the upload of a request, or all of a session, and release their sinks."""
        for upload in list(self._uploads.get(session, {}).values()):
            if seq is None or upload.seq == seq:
                self.remove(upload)
                if upload.sink is not None and upload.sink.error is None:
                    upload.sink.release()

    def sweep(self, now: float) -> None:
        """Release uploads inactive for more than SILENCE_S."""
        for uploads in list(self._uploads.values()):
            for upload in list(uploads.values()):
                if now - upload.active_s > SILENCE_S:
                    self.release(upload.session, upload.seq)


class Download:
    """An answer being sent: in fragments, or whole if it is small. It can be released at any time,
    because a retry makes it again. It sends no fragment twice at once, and one window at most."""

    def __init__(self, body: bytes, payload: Sequence[Any]) -> None:
        self._message = Fragments(body, payload)
        self._body = body
        self._in_flight: dict[int, zmq.MessageTracker] = {}
        self._unsent = set() if self.sizes is None else set(_starts(self.sizes))
        self.active_s = time.monotonic()

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Bytes of body and payload; None if it is small enough for one message."""
        return self._message.sizes if self._message.nbytes > FRAGMENT_BYTES else None

    @property
    def complete(self) -> bool:
        """True if all of it has left this process."""
        return not self._unsent and self._idle()

    def messages(self, starts: tuple[int, ...]) -> Iterator[tuple[int, bytes, Fragment | None, Any]]:
        """Yield start, body, fragment and data of messages for the fragments at ``starts``, by
        default the first window. Raises ProtocolError if no fragment begins there."""
        self.active_s = time.monotonic()
        sizes = self.sizes
        if sizes is None:
            if self._may_send(0):
                yield 0, self._body, None, self._message.read(len(self._body), self._message.nbytes)
            return
        for start in starts or (each for each in _starts(sizes) if each < WINDOW_BYTES):
            end = fragment_end(start, sizes)
            if self._may_send(start):
                yield start, b"", Fragment(0, start, sizes), self._message.read(start, end)

    def mark_sent(self, start: int, tracker: zmq.MessageTracker | None) -> None:
        """Record a sent fragment. ``tracker``: None if nothing refers to its data any more."""
        self._unsent.discard(start)
        if tracker is not None:
            self._in_flight[start] = tracker

    def _idle(self) -> bool:
        self._in_flight = {start: tracker for start, tracker in self._in_flight.items() if not tracker.done}
        return not self._in_flight

    def _may_send(self, start: int) -> bool:
        most = 2 * WINDOW_BYTES // FRAGMENT_BYTES
        return self._idle() or (start not in self._in_flight and len(self._in_flight) < most)


def _starts(sizes: tuple[int, int]) -> Iterator[int]:
    start = 0
    while start < sum(sizes):
        yield start
        start = fragment_end(start, sizes)
