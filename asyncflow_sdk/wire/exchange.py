"""RequestExchange: one request and its answer on the client's side, of any size. It uses no socket
and no clock.

A small request is one message. A large one is offered, and the server asks for its pieces; of a large
answer, the client asks for the pieces (see ``pieces``). After a silence the client offers again, or
asks. One connection keeps the order of its messages: pieces expected before the question and
missing when it is answered were lost with an earlier connection, and only these are sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from .envelope import PIECE_BYTES, Ask, Offer, Piece, Read, RequestPart, ResponseEnvelope
from .pieces import Incoming, Outgoing, nbytes_of, piece_end
from .sequence_numbers import SequenceNumbers


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
    ``max_bytes``: limit for body and payload of an answer in pieces; None: no limit.

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
        self._request = Outgoing(body, payload) if nbytes_of(body, payload) > PIECE_BYTES else None
        self._questions = 0
        self.reply: WireReply | None = None
        self.received = self.answer_bytes = 0

    def begin(self) -> list[Message]:
        """Return the first message, sent again to a server without this request."""
        self._answer: Incoming | None = None
        if self._request is not None:
            self._sent: dict[int, int] = {}  # start of a piece → questions before it was sent
            return [self._message(Offer(self._request.sizes, self._questions))]
        data = b"".join(self._payload) if self._payload else None
        return [Message(self._numbers.envelope(self.seq, self._body), data)]

    def receive(self, response: ResponseEnvelope, data: Any) -> list[Message]:
        """Process a message of the server and return the messages to send. Raises ProtocolError."""
        self.received += 1
        part = response.part
        if part is None:
            payload = None if data is None else np.frombuffer(data, np.uint8).copy()  # ZeroMQ's is not aligned
            self.reply = WireReply(response.body, payload)
            return []
        if isinstance(part, Read):
            return self._send(part)
        if self._answer is None or self._answer.sizes != part.sizes:
            answer, before = self._expect(part.sizes), self._questions + 1
        else:
            answer, before = self._answer, getattr(part, "number", 0)
        if isinstance(part, Offer):
            return self._ask(answer.ask_again(before, self._questions))
        at = part.start - part.sizes[0]
        if answer.add(part.start, b"" if data is None else data) and at >= 0:
            self._memory[at : at + len(data)] = np.frombuffer(data, np.uint8)
        if answer.complete:
            self.reply = WireReply(answer.body.tobytes(), self._memory if part.sizes[1] else None)
            return []
        return self._ask(answer.ask(self._questions))

    def resend(self) -> list[Message]:
        """Return the messages to send after a silence."""
        self._questions += 1
        if self._answer is not None:
            return [self._message(Ask(self._questions))]
        if self._request is not None:
            return [self._message(Offer(self._request.sizes, self._questions))]
        return self.begin()

    def _send(self, read: Read) -> list[Message]:
        """Return the pieces of the request that the server asks for. Without any, it knows nothing of
        an answer."""
        if not read.starts:
            return self.begin() if self._answer is not None else []
        if (request := self._request) is None:
            return []
        messages = []
        for start in read.starts:
            if self._sent.get(start, -1) < read.number:
                self._sent[start] = self._questions
                data = request.read(start, piece_end(start, request.sizes))
                messages.append(self._message(Piece(start, request.sizes), data))
        return messages

    def _expect(self, sizes: tuple[int, int]) -> Incoming:
        """Prepare for an answer. The server sends its first pieces without a question."""
        if self._max_bytes is not None and sum(sizes) > self._max_bytes:
            raise ProtocolError(f"an answer of {sum(sizes)} bytes, where at most {self._max_bytes} are expected")
        self._answer, self._memory, self.answer_bytes = Incoming(sizes), np.empty(sizes[1], np.uint8), sum(sizes)
        self._answer.ask(self._questions)
        return self._answer

    def _ask(self, starts: tuple[int, ...]) -> list[Message]:
        return [self._message(Read(starts))] if starts else []

    def _message(self, part: RequestPart, data: bytes | memoryview | None = None) -> Message:
        return Message(self._numbers.envelope(self.seq, b"", part), data)
