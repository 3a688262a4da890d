"""Transfers: requests that arrive in fragments, and answers that leave in fragments, on the server's side.

The payload of a request goes from each fragment straight to where the handler wants it (PayloadSink). Until the last
fragment is there, nothing of it counts: an upload is released with its session, when its request is dropped, or after a
silence. The client then begins it anew, under the same request number.
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
from .fragments import Fragments, Reassembly, end_of
from .router_sockets import Route

SILENCE_S = 60.0
"""An upload, or an answer in fragments, of which nothing was heard for so long is released."""
BODY_BYTES = 64 << 20
"""The largest body. It lies in the server's own memory until it is read."""
SESSION_UPLOADS = 256
"""Unfinished uploads of one session."""


class PayloadSink(Protocol):
    """Where the payload of one request goes."""

    @property
    def error(self) -> Exception | None:
        """Why it can go nowhere; then the request is carried out without it, and fails. Else None."""

    def write(self, start: int, data: Any) -> None:
        """Take bytes ``start`` to ``start + len(data)`` of the payload, in any order."""

    def release(self) -> None:
        """The rest will not come. Called instead of the request."""


class MemorySink:
    """A sink in memory of its own."""

    error: Exception | None = None

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)

    def write(self, start: int, data: Any) -> None:
        self.memory[start : start + len(data)] = np.frombuffer(data, np.uint8)

    def release(self) -> None:
        self.memory = self.memory[:0].copy()


class Upload:
    """One request that arrives in fragments. ``route``: the connection that its last fragment came over."""

    def __init__(self, session: str, seq: int, sizes: tuple[int, int]) -> None:
        self.session, self.seq = session, seq
        self.number = secrets.randbits(62) + 1
        self.reassembly = Reassembly(sizes)
        self.sink: PayloadSink | None = None
        self.route: Route | None = None
        self.heard_s = time.monotonic()

    @property
    def ready(self) -> bool:
        """True if its request can be carried out."""
        return self.reassembly.whole or (self.sink is not None and self.sink.error is not None)

    def progress(self, asked: int, query: int = 0) -> Progress:
        got = self.reassembly
        limit = got.sizes[0] if self.sink is None else got.low + WINDOW_BYTES
        return Progress(True, self.number, asked, got.low, got.beyond, limit, query)


class Uploads:
    """All unfinished uploads of a server. ``make_sink`` is given session, body and the bytes of the payload. Payload of
    more than ``most_bytes`` together waits for that of others. Not thread-safe."""

    def __init__(self, make_sink: Callable[[str, bytes, int], PayloadSink], most_bytes: int) -> None:
        self._make_sink, self._most_bytes = make_sink, most_bytes
        self._uploads: dict[str, dict[int, Upload]] = {}
        self._waiting: deque[Upload] = deque()
        self.nbytes = 0
        """Of payload that room was made for."""

    def __len__(self) -> int:
        return sum(map(len, self._uploads.values()))

    def find(self, session: str, seq: int) -> Upload | None:
        return self._uploads.get(session, {}).get(seq)

    def begin(self, session: str, seq: int, sizes: tuple[int, int]) -> Upload:
        """Raises ProtocolError for sizes that no request has, and for a session that has begun too many."""
        if not 0 < sizes[0] <= BODY_BYTES or sizes[1] < 0 or sum(sizes) > self._most_bytes:
            raise ProtocolError(f"a request of {sizes} bytes")
        uploads = self._uploads.setdefault(session, {})
        if len(uploads) >= SESSION_UPLOADS:
            raise ProtocolError(f"session {session} has {len(uploads)} unfinished uploads")
        upload = uploads[seq] = Upload(session, seq, sizes)
        return upload

    def add(self, upload: Upload, fragment: Fragment, data: Any) -> None:
        """Raises ProtocolError for what is no fragment of it."""
        body = upload.reassembly.sizes[0]
        if fragment.sizes != upload.reassembly.sizes or (upload.sink is None and fragment.start >= body):
            raise ProtocolError(f"no fragment of upload {upload.number} is expected at {fragment.start}")
        waits = upload.reassembly.low < body < sum(fragment.sizes)
        if upload.reassembly.add(fragment.start, data):
            assert upload.sink is not None
            upload.sink.write(fragment.start - body, data)
        upload.heard_s = time.monotonic()
        if waits and upload.reassembly.low >= body:
            self._waiting.append(upload)

    def make_room(self) -> Iterator[Upload]:
        """For the uploads whose body is there, in order, as far as all may hold so much; gives those that may go on."""
        while self._waiting:
            upload = self._waiting[0]
            payload = upload.reassembly.sizes[1]
            if self.nbytes and self.nbytes + payload > self._most_bytes:
                return
            self._waiting.popleft()
            upload.sink = self._make_sink(upload.session, upload.reassembly.body, payload)
            self.nbytes += payload
            yield upload

    def remove(self, upload: Upload) -> None:
        """It is whole, and its request is the handler's from now on."""
        uploads = self._uploads[upload.session]
        del uploads[upload.seq]
        if not uploads:
            del self._uploads[upload.session]
        if upload.sink is not None:
            self.nbytes -= upload.reassembly.sizes[1]
        else:
            self._waiting = deque(each for each in self._waiting if each is not upload)

    def release(self, session: str, seq: int | None = None) -> None:
        """Nobody wants the uploads of a session any more, or one of them."""
        for upload in list(self._uploads.get(session, {}).values()):
            if seq is None or upload.seq == seq:
                self.remove(upload)
                if upload.sink is not None and upload.sink.error is None:
                    upload.sink.release()

    def sweep(self, now: float) -> None:
        """Release those of which nothing was heard for long."""
        for uploads in list(self._uploads.values()):
            for upload in list(uploads.values()):
                if now - upload.heard_s > SILENCE_S:
                    self.release(upload.session, upload.seq)


class Download:
    """An answer that leaves in fragments, or whole where it is small. It is held until it is settled, or was silent: what it
    is made of can be made again. A fragment that is still under way is not sent again, nor more than a window."""

    def __init__(self, body: bytes, payload: Sequence[Any]) -> None:
        self._message = Fragments(body, payload)
        self._body = body
        self._unsent: dict[int, zmq.MessageTracker] = {}
        self._left = set() if self._message.nbytes <= FRAGMENT_BYTES else set(_starts(self._message.sizes))
        self.heard_s = time.monotonic()

    def messages(self, starts: tuple[int, ...]) -> Iterator[tuple[int, bytes, Fragment | None, Any]]:
        """Start, body, fragment and data of the messages for these fragments, or for the first window of them."""
        self.heard_s = time.monotonic()
        sizes, whole = self._message.sizes, self._message.nbytes
        if whole <= FRAGMENT_BYTES:
            if self._may_send(0):
                yield 0, self._body, None, self._message.read(sizes[0], whole)
            return
        for start in starts or (each for each in _starts(sizes) if each < WINDOW_BYTES):
            end = end_of(start, sizes)
            if self._may_send(start):
                yield start, b"", Fragment(0, start, sizes), self._message.read(start, end)

    def sent(self, start: int, tracker: zmq.MessageTracker | None) -> None:
        self._left.discard(start)
        if tracker is not None:
            self._unsent[start] = tracker

    @property
    def sizes(self) -> tuple[int, int] | None:
        """None if it is small enough to be sent whole."""
        return self._message.sizes if self._message.nbytes > FRAGMENT_BYTES else None

    @property
    def gone(self) -> bool:
        """True if all of it has left."""
        return not self._left and self._idle()

    def _idle(self) -> bool:
        """True if nothing of it is under way."""
        self._unsent = {start: tracker for start, tracker in self._unsent.items() if not tracker.done}
        return not self._unsent

    def _may_send(self, start: int) -> bool:
        return self._idle() or (start not in self._unsent and len(self._unsent) < 2 * WINDOW_BYTES // FRAGMENT_BYTES)


def _starts(sizes: tuple[int, int]) -> Iterator[int]:
    start = 0
    while start < sum(sizes):
        yield start
        start = end_of(start, sizes)
