"""Pieces of a message of body and payload. The receiver asks for them, so it decides about its memory.

The body comes first. A piece has PIECE_BYTES; the last of the body and the last of the payload may be shorter, and
none has bytes of both. So a receiver derives the length of a piece from its start.

A client offers a large request, and the server asks for its pieces, in the order of the session's offers, within
its limits. Of a large answer the server sends the first pieces, and the client asks for the others. After a silence
the client offers again, or asks for an offer. One connection keeps the order of its messages: pieces expected before
the question and missing when it is answered were lost with an earlier connection, and only these are sent again."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ProtocolError
from .envelope import PIECE_BYTES

MOST_ASKED = 8  # pieces of one message in flight


def piece_end(start: int, sizes: tuple[int, int]) -> int:
    """Return the end of the piece at ``start``. Raises ProtocolError if none begins there."""
    body, total = sizes[0], sum(sizes)
    first, end = (0, body) if start < body else (body, total)
    if min(sizes) < 0 or not first <= start < end or (start - first) % PIECE_BYTES:
        raise ProtocolError(f"no piece of a message of {sizes} bytes begins at {start}")
    return min(start + PIECE_BYTES, end)


def nbytes_of(body: bytes, payload: Sequence[Any]) -> int:
    """Return the bytes of a message."""
    return len(body) + sum(memoryview(each).nbytes for each in payload) if payload else len(body)


class Outgoing:
    """A message to send. ``payload``: contiguous buffers, sent one after another without a copy."""

    def __init__(self, body: bytes, payload: Sequence[Any] = ()) -> None:
        views = [memoryview(each) for each in (body, *payload)]
        self._views = [view.cast("B") for view in views if view.nbytes]
        self._ends = list(itertools.accumulate(view.nbytes for view in self._views))
        self.nbytes = self._ends[-1] if self._ends else 0
        self.sizes = (len(body), self.nbytes - len(body))

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
    """A message to receive. ``body``: memory of the body; the caller stores the payload. Raises ProtocolError for
    sizes of no message."""

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
