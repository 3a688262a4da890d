"""RequestExchange: one request and its answer on the client's side, whatever their sizes. It has no socket and no clock.

A small request goes as one message. Of a large one the body goes first; the server makes room for the payload, and
says how far the client may send. After a silence the client asks what has arrived, and sends only what has not.
The fragments of a large answer are pulled: one more for each that arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ProtocolError
from .envelope import FRAGMENT_BYTES, WINDOW_BYTES, Fragment, Progress, ProgressQuery, Pull, ResponseEnvelope
from .fragments import Fragments, Reassembly, end_of, nbytes_of
from .sequence_numbers import SequenceNumbers

_NOTHING = Fragments(b"")
_NO_BYTES: npt.NDArray[np.uint8] = np.empty(0, np.uint8)


class WireReply(NamedTuple):
    """An answer. ``payload``: uint8, or None if there is none."""

    body: bytes
    payload: npt.NDArray[np.uint8] | None = None


class Message(NamedTuple):
    """To be sent: an envelope, and the frame beside it, if any, which must be copied: the payload's owner may change it."""

    envelope: bytes
    data: bytes | memoryview | None = None


class RequestExchange:
    """``reply`` is None until the answer is whole. ``heard``: messages about it so far. ``answer_bytes``: 0 until known.

    Not thread-safe. ``payload``: contiguous buffers, which must not change before the answer is whole. ``most_bytes``: of
    the answer, body and payload; None: any number."""

    def __init__(
        self,
        numbers: SequenceNumbers,
        seq: int,
        body: bytes,
        payload: Sequence[Any] = (),
        most_bytes: int | None = None,
    ) -> None:
        self._numbers, self.seq, self._body, self._most_bytes = numbers, seq, body, most_bytes
        self._payload = payload
        self._large = nbytes_of(body, payload) > FRAGMENT_BYTES
        self._request = Fragments(body, payload) if self._large else _NOTHING
        self._queries = 0
        self.reply: WireReply | None = None
        self.heard = self.answer_bytes = 0

    def begin(self) -> list[Message]:
        """What to send first, and again to a server that knows nothing of it."""
        self._forget()
        if self._large:
            self._limit = min(self._request.sizes[0], WINDOW_BYTES)
            return self._send_on()
        data = b"".join(self._payload) if self._payload else None
        return [Message(self._numbers.frame(self.seq, self._body), data)]

    def hear(self, response: ResponseEnvelope, data: Any) -> list[Message]:
        """Take a message of the server, with the frame beside it; return what to send. Raises ProtocolError."""
        self.heard += 1
        part = response.part
        if isinstance(part, Progress):
            return self._go_on(part)
        if isinstance(part, Fragment):
            return self._collect(part, b"" if data is None else data)
        payload = None if data is None else np.frombuffer(data, np.uint8).copy()  # its own memory is not aligned
        self.reply = WireReply(response.body, payload)
        return []

    def again(self) -> list[Message]:
        """What to send after a silence."""
        if self._answer is None and not self._large:
            return self.begin()
        self._queries += 1
        query = ProgressQuery(self._upload, self._queries, self._answer is not None)
        return [Message(self._numbers.frame(self.seq, b"", query))]

    def _forget(self) -> None:
        self._upload = self._next = self._limit = 0
        self._flying: dict[int, int] = {}  # start of a fragment sent → queries before it
        self._answer: Reassembly | None = None
        self._memory = _NO_BYTES
        self._pulled: dict[int, int] = {}  # the same of fragments asked for
        self._next_pull = 0

    # ---- the request

    def _go_on(self, progress: Progress) -> list[Message]:
        if not progress.known:
            return self.begin() if progress.message_upload == self._upload else []
        if self._answer is None and progress.answer is not None:
            self._expect(progress.answer)
            return self._pull(list(self._pulled))
        if self._answer is not None:
            return self._pull(self._lost(self._pulled, progress))
        if not self._large or self._upload not in (progress.upload, progress.message_upload):
            return []  # of an upload that was given up
        self._upload, self._limit = progress.upload, progress.limit
        there = {start for start in self._flying if start < progress.low or start in progress.beyond}
        for start in there:
            del self._flying[start]
        return self._send(self._lost(self._flying, progress)) + self._send_on()

    def _lost(self, under_way: dict[int, int], progress: Progress) -> list[int]:
        """Fragments under way when a query was sent, and not there when it was answered: messages keep their order, so
        their connection was lost."""
        return [start for start, queries in under_way.items() if queries < progress.query]

    def _send_on(self) -> list[Message]:
        """Fragments that were never sent, as far as they may be."""
        starts = []
        while self._next < min(self._limit, self._request.nbytes):
            starts.append(self._next)
            self._next = end_of(self._next, self._request.sizes)
        return self._send(starts)

    def _send(self, starts: Iterable[int]) -> list[Message]:
        messages, sizes = [], self._request.sizes
        for start in starts:
            self._flying[start] = self._queries
            envelope = self._numbers.frame(self.seq, b"", Fragment(self._upload, start, sizes))
            messages.append(Message(envelope, self._request.read(start, end_of(start, sizes))))
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
        if self._answer.whole:
            self.reply = WireReply(self._answer.body, self._memory if sizes[1] else None)
            return []
        if self._next_pull == self.answer_bytes:
            return []
        start, self._next_pull = self._next_pull, end_of(self._next_pull, sizes)
        return self._pull([start])

    def _expect(self, sizes: tuple[int, int]) -> None:
        """The answer has so many bytes. Its first window is sent without being asked for."""
        end_of(0, sizes)
        most = self._most_bytes
        if most is not None and sum(sizes) > most:
            raise ProtocolError(f"an answer of {sum(sizes)} bytes, where {most} are the most expected")
        self._answer, self._memory = Reassembly(sizes), np.empty(sizes[1], np.uint8)
        self.answer_bytes, self._next_pull, self._pulled = sum(sizes), 0, {}
        while self._next_pull < min(WINDOW_BYTES, self.answer_bytes):
            self._pulled[self._next_pull] = self._queries
            self._next_pull = end_of(self._next_pull, sizes)

    def _pull(self, starts: list[int]) -> list[Message]:
        if not starts:
            return []
        self._pulled.update(dict.fromkeys(starts, self._queries))
        return [Message(self._numbers.frame(self.seq, b"", Pull(tuple(starts))))]
