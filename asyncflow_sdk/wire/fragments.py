"""Fragments of a message of body and payload, cut by the sender and reassembled by the receiver.

The body comes first. A fragment has FRAGMENT_BYTES; the last of the body and the last of the
payload may be shorter, and none has bytes of both. So a receiver derives the length of a fragment
from its start.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ..errors import ProtocolError
from .envelope import FRAGMENT_BYTES


def fragment_end(start: int, sizes: tuple[int, int]) -> int:
    """Return the end of the fragment that begins at ``start``. Raises ProtocolError if none does."""
    body, total = sizes[0], sum(sizes)
    first, end = (0, body) if start < body else (body, total)
    if min(sizes) < 0 or not first <= start < end or (start - first) % FRAGMENT_BYTES:
        raise ProtocolError(f"no fragment of a message of {sizes} bytes begins at {start}")
    return min(start + FRAGMENT_BYTES, end)


def nbytes_of(body: bytes, payload: Sequence[Any]) -> int:
    """Return the bytes of a message."""
    return len(body) + sum(memoryview(each).nbytes for each in payload) if payload else len(body)


class Fragments:
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


class Reassembly:
    """The received ranges of a message, and its body. The caller stores the payload.

    ``low``: all bytes before it have arrived."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes, self.low = sizes, 0
        self._ends: dict[int, int] = {}
        self._body: dict[int, bytes] = {}

    @property
    def beyond(self) -> tuple[int, ...]:
        """Starts of the fragments received after ``low``."""
        return tuple(self._ends)

    @property
    def body(self) -> bytes:
        """The body; empty until it is complete."""
        return b"".join(map(self._body.__getitem__, sorted(self._body))) if self.low >= self.sizes[0] else b""

    @property
    def complete(self) -> bool:
        """True if all bytes have arrived."""
        return self.low == sum(self.sizes)

    def add(self, start: int, data: Any) -> bool:
        """Record a fragment. Return True if it is new payload. Raises ProtocolError if invalid."""
        end = fragment_end(start, self.sizes)
        if len(data) != end - start:
            raise ProtocolError(f"a fragment of {len(data)} bytes, where {end - start} are expected")
        if start < self.low or start in self._ends:
            return False
        self._ends[start] = end
        if start < self.sizes[0]:
            self._body[start] = bytes(data)
        while self.low in self._ends:
            self.low = self._ends.pop(self.low)
        return start >= self.sizes[0]
