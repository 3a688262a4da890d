"""RequestExchange: one request and its answer on the client's side, of any size. It uses no socket
and no clock.

A small request is one message. Of a large one the body is sent first; the server makes room for the
payload, and reports how far the client may send. After a silence the client queries what has
arrived, and sends only the rest. Of a large answer, the client requests one more fragment for each
that arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from .envelope import FRAGMENT_BYTES, WINDOW_BYTES, Fragment, Progress, ProgressQuery, Pull, ResponseEnvelope
from .fragments import Fragments, Reassembly, fragment_end, nbytes_of
from .sequence_numbers import SequenceNumbers

_NOTHING = Fragments(b"")
_NO_BYTES: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class WireReply(NamedTuple):
    """An answer. ``payload``: uint8, or None if there is none."""

    body: bytes
    payload: npt.NDArray[np.uint8] | None = None


class Message(NamedTuple):
    """A message with its payload frame. The socket must copy it: its owner may change it."""

    envelope: bytes
    data: bytes | memoryview | None = None


class RequestExchange:
    """Not thread-safe. ``payload``: contiguous buffers, which must not change before the reply.
    ``max_bytes``: limit for body and payload of an answer in fragments; None: no limit.

    ``reply``: None until the answer is complete. ``received``: messages received so far.
    ``answer_bytes``: 0 until known."""

    def __init__(
        self,
        numbers: SequenceNumbers,
        seq: int,
        body: bytes,
        payload: Sequence[Any] = (),
        max_bytes: int | None = None,
    ) -> None:
        self._numbers, self.seq, self._body, self._max_bytes = numbers, seq, body, max_bytes
        self._payload = payload
        self._large = nbytes_of(body, payload) > FRAGMENT_BYTES
        self._request = Fragments(body, payload) if self._large else _NOTHING
        self._queries = 0
        self.reply: WireReply | None = None
        self.received = self.answer_bytes = 0

    def begin(self) -> list[Message]:
        """Return the first messages, sent again to a server without this request."""
        self._upload = self._next = self._limit = 0
        self._in_flight: dict[int, int] = {}  # start of a sent fragment → queries sent before it
        self._answer: Reassembly | None = None
        self._memory = _NO_BYTES
        self._pulled: dict[int, int] = {}  # start of a requested fragment → queries sent before the request
        self._next_pull = 0
        if self._large:
            self._limit = min(self._request.sizes[0], WINDOW_BYTES)
            return self._send_next()
        data = b"".join(self._payload) if self._payload else None
        return [Message(self._numbers.envelope(self.seq, self._body), data)]

    def receive(self, response: ResponseEnvelope, data: Any) -> list[Message]:
        """Process a message of the server and return the messages to send. Raises ProtocolError."""
        self.received += 1
        part = response.part
        if isinstance(part, Progress):
            return self._continue(part)
        if isinstance(part, Fragment):
            return self._collect(part, b"" if data is None else data)
        payload = None if data is None else np.frombuffer(data, np.uint8).copy()  # ZeroMQ's memory is not aligned
        self.reply = WireReply(response.body, payload)
        return []

    def resend(self) -> list[Message]:
        """Return the messages to send after a silence."""
        if self._answer is None and not self._large:
            return self.begin()
        self._queries += 1
        query = ProgressQuery(self._upload, self._queries, self._answer is not None)
        return [Message(self._numbers.envelope(self.seq, b"", query))]

    # ---- the request

    def _continue(self, progress: Progress) -> list[Message]:
        if not progress.known:
            return self.begin() if progress.message_upload == self._upload else []
        if self._answer is None and progress.answer is not None:
            self._expect(progress.answer)
            return self._pull(list(self._pulled))
        if self._answer is not None:
            return self._pull(_lost(self._pulled, progress))
        if not self._large or self._upload not in (progress.upload, progress.message_upload):
            return []  # of an upload that was released
        self._upload, self._limit = progress.upload, progress.limit
        for start in [each for each in self._in_flight if each < progress.low or each in progress.beyond]:
            del self._in_flight[start]
        return self._send(_lost(self._in_flight, progress)) + self._send_next()

    def _send_next(self) -> list[Message]:
        """Return fragments that were never sent, up to the server's limit."""
        starts = []
        while self._next < min(self._limit, self._request.nbytes):
            starts.append(self._next)
            self._next = fragment_end(self._next, self._request.sizes)
        return self._send(starts)

    def _send(self, starts: Iterable[int]) -> list[Message]:
        messages, sizes = [], self._request.sizes
        for start in starts:
            self._in_flight[start] = self._queries
            envelope = self._numbers.envelope(self.seq, b"", Fragment(self._upload, start, sizes))
            messages.append(Message(envelope, self._request.read(start, fragment_end(start, sizes))))
        return messages

    # ---- the answer

    def _collect(self, fragment: Fragment, data: Any) -> list[Message]:
        sizes = fragment.sizes
        if self._answer is None or self._answer.sizes != sizes:
            self._expect(sizes)
        assert self._answer is not None
        if self._answer.add(fragment.start, data):
            at = fragment.start - sizes[0]
            self._memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._pulled.pop(fragment.start, None)
        if self._answer.complete:
            self.reply = WireReply(self._answer.body, self._memory if sizes[1] else None)
            return []
        if self._next_pull == self.answer_bytes:
            return []
        start, self._next_pull = self._next_pull, fragment_end(self._next_pull, sizes)
        return self._pull([start])

    def _expect(self, sizes: tuple[int, int]) -> None:
        """Prepare for an answer. The server sends its first window without a Pull."""
        fragment_end(0, sizes)
        most = self._max_bytes
        if most is not None and sum(sizes) > most:
            raise ProtocolError(f"an answer of {sum(sizes)} bytes, where at most {most} are expected")
        self._answer, self._memory = Reassembly(sizes), np.empty(sizes[1], np.uint8)
        self.answer_bytes, self._next_pull, self._pulled = sum(sizes), 0, {}
        while self._next_pull < min(WINDOW_BYTES, self.answer_bytes):
            self._pulled[self._next_pull] = self._queries
            self._next_pull = fragment_end(self._next_pull, sizes)

    def _pull(self, starts: list[int]) -> list[Message]:
        if not starts:
            return []
        self._pulled.update(dict.fromkeys(starts, self._queries))
        return [Message(self._numbers.envelope(self.seq, b"", Pull(tuple(starts))))]


def _lost(in_flight: dict[int, int], progress: Progress) -> list[int]:
    """Return fragments sent before a query and missing when it was answered: messages keep their
    order, so their connection was lost."""
    return [start for start, queries in in_flight.items() if queries < progress.query]
