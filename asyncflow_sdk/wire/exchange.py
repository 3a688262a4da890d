"""RequestExchange: one request and its answer on the client's side, of any size, without a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from .envelope import PIECE_BYTES, PROTOCOL, Offer, Part, Read, RequestEnvelope, ResponseEnvelope, encode
from .pieces import Incoming, Outgoing

SLOWEST_BYTES_PER_S = 10e6
"""The slowest expected transfer: the deadline of a request is extended by its bytes over this rate."""


class WireReply(NamedTuple):
    """An answer. ``payload``: uint8, or None if there is none."""

    body: bytes
    payload: npt.NDArray[np.uint8] | None = None


Waits: TypeAlias = tuple[float, float, float]
Message: TypeAlias = "tuple[bytes, bytes | memoryview | None]"
"""Envelope and payload frame of a message. The socket must copy the latter: its owner may change it."""


class SequenceNumbers:
    """The request numbers of one session, and the confirmations and cancellations to be sent. Thread-safe.

    A number is open until its answer arrives. A cancelled one stays open until an answer proves that the server knows
    of it: if ``done`` passed it before, the server would forget the answer without undoing its effect."""

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

    def envelope(self, seq: int, body: bytes, part: Part | None = None) -> bytes:
        """Encode a message with confirmations and cancellations; ``seq`` 0: about no request."""
        with self._lock:
            settled, self._settled = tuple(self._settled), []
            dropped = tuple(self._dropped)
            if seq:
                self._reported.setdefault(seq, dropped)
            done = min(self._open, default=self._last + 1)
        return encode(RequestEnvelope(PROTOCOL, self._session, seq, done, settled, dropped, body, part))

    def settle(self, seq: int) -> None:
        """Record the arrival of an answer."""
        with self._lock:
            if reported := self._reported.pop(seq, ()):
                self._dropped.difference_update(reported)
                self._open.difference_update(reported)
            self._open.discard(seq)
            self._settled.append(seq)

    def drop(self, seq: int) -> None:
        """Cancel a request: nothing waits for its answer any more."""
        with self._lock:
            self._reported.pop(seq, None)
            self._dropped.add(seq)


class RequestExchange:
    """Not thread-safe. ``payload``: contiguous buffers; they must not change before the reply. ``waits``: seconds for
    the answer, beyond these, and of silence before ``resend``. ``limit``: the most bytes of an answer in pieces;
    None: no limit.

    ``nbytes``: the size of body and payload. ``reply``: None until the answer is complete. ``began``: the time of the
    start. ``seq``: 0 before ``begin``."""

    def __init__(
        self, numbers: SequenceNumbers, body: bytes, payload: Sequence[Any], waits: Waits, limit: int | None = None
    ) -> None:
        timeout_s, self._grace_s, self._resend_s = waits
        self._numbers, self._body, self._payload, self._limit = numbers, body, payload, limit
        self.nbytes = len(body) + sum(memoryview(each).nbytes for each in payload) if payload else len(body)
        self._request = Outgoing(body, payload) if self.nbytes > PIECE_BYTES else None
        self.seq = self._questions = 0
        self.reply: WireReply | None = None
        self.began = time.monotonic()
        # a NaN timeout counts as 0: it must not wait for ever
        wait_s = (timeout_s if timeout_s > 0.0 else 0.0) + self._grace_s + self.nbytes / SLOWEST_BYTES_PER_S
        self._until, self._resend_at = self.began + wait_s, self.began + self._resend_s

    @property
    def left_s(self) -> float:
        """Seconds until ``resend`` is due."""
        return min(self._until, self._resend_at) - time.monotonic()

    def begin(self) -> list[Message]:
        """Return the first message, sent again to a server without this request."""
        self.seq = self.seq or self._numbers.begin()
        self._answer: Incoming | None = None
        self._sent: dict[int, int] = {}  # start of a piece of the request → questions before it was sent
        return [self._first()]

    def _first(self) -> Message:
        if self._request is not None:
            return self._message(Offer(self._request.sizes, self._questions))
        data = b"".join(self._payload) if self._payload else None
        return self._numbers.envelope(self.seq, self._body), data

    def receive(self, response: ResponseEnvelope, data: Any) -> list[Message]:
        """Process a message of the server and return the messages to send. Raises ProtocolError."""
        part = response.part
        if part is None:
            payload = None if data is None else np.frombuffer(data, np.uint8).copy()  # ZeroMQ's is not aligned
            self.reply = WireReply(response.body, payload)
            return []
        self._resend_at = time.monotonic() + self._resend_s
        if isinstance(part, Read):
            return self._send(part)
        answer, before = self._answer, getattr(part, "number", 0)
        if answer is None or answer.sizes != part.sizes:
            answer, before = self._expect(part.sizes), self._questions + 1
        if isinstance(part, Offer):
            starts = answer.ask_again(before, self._questions)
        else:
            at = part.start - part.sizes[0]
            if answer.add(part.start, b"" if data is None else data) and at >= 0:
                self._memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
            if answer.complete:
                self.reply = WireReply(answer.body.tobytes(), self._memory if part.sizes[1] else None)
            starts = answer.ask(self._questions)
        return [self._message(Read(starts))] if starts else []

    def resend(self) -> list[Message] | None:
        """Return the messages to send after a silence; None after the deadline."""
        if (now := time.monotonic()) >= self._until:
            return None
        self._questions += 1
        self._resend_at = now + self._resend_s
        return [self._first() if self._answer is None else self._message(Read((), self._questions))]

    def drop(self) -> list[Message]:
        """Cancel the request. Return the message to send."""
        self._numbers.drop(self.seq)
        return [(self._numbers.envelope(0, b""), None)]

    def _send(self, read: Read) -> list[Message]:
        """Return the requested pieces of the request. Without any, the server knows nothing of an answer."""
        if not read.starts:
            return self.begin() if self._answer is not None else []
        if (request := self._request) is None:
            return []
        messages = []
        for start in read.starts:
            if self._sent.get(start, -1) < read.number:
                self._sent[start] = self._questions
                messages.append(self._message(*request.piece(start)))
        return messages

    def _expect(self, sizes: tuple[int, int]) -> Incoming:
        """Prepare for an answer. The server sends its first pieces without a question."""
        if self._limit is not None and sum(sizes) > self._limit:
            raise ProtocolError(f"an answer of {sum(sizes)} bytes, where at most {self._limit} are expected")
        self._answer, self._memory = Incoming(sizes), np.empty(sizes[1], np.uint8)
        self._until = max(self._until, time.monotonic() + self._grace_s + sum(sizes) / SLOWEST_BYTES_PER_S)
        self._answer.ask(self._questions)
        return self._answer

    def _message(self, part: Part, data: bytes | memoryview | None = None) -> Message:
        return self._numbers.envelope(self.seq, b"", part), data
