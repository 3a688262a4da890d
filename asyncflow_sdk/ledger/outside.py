"""Outside: what the state machine learns that is not a function of its inputs, so that a log of inputs can be replayed.

    picked = outside(lambda: sampler.choose(...).tobytes())

Live, the function is called and what it gave is noted with the input under way; in a replay the note is given
again and nothing is called. Everything else that decides a state must come from the inputs and their times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from ..errors import AsyncFlowError, by_name


class Outside:
    """Not thread-safe: whoever owns the ledger owns it."""

    def __init__(self) -> None:
        self.keep = False
        """Whether somebody takes the notes."""
        self._notes: list[bytes] = []
        self._replay: deque[bytes] | None = None

    @property
    def noting(self) -> bool:
        """Whether notes are taken or given: where not, a caller may spare itself the making of them."""
        return self.keep or self._replay is not None

    def __call__(self, produce: Callable[[], bytes]) -> bytes:
        """What ``produce`` gives; in a replay, what it gave. It must change nothing; if it raises, nothing is noted."""
        if self._replay is not None:
            return self._replay.popleft()
        note = produce()
        if self.keep:
            self._notes.append(note)
        return note

    def guarded(self, produce: Callable[[], bytes]) -> bytes:
        """The same for what may fail: an AsyncFlowError is noted too, and raised again in a replay."""

        def look() -> bytes:
            try:
                return b"+" + produce()
            except AsyncFlowError as error:
                return b"-" + msgspec.msgpack.encode((type(error).__name__, str(error)))

        note = self(look)
        if note[:1] == b"-":
            raise by_name(*msgspec.msgpack.decode(note[1:], type=tuple[str, str]))
        return note[1:]

    def take(self) -> tuple[bytes, ...]:
        """The notes since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def replay(self, notes: tuple[bytes, ...] | None) -> bool:
        """Give these from here on; None: live again. Returns whether those of the last call were all asked for."""
        used = not self._replay
        self._replay = None if notes is None else deque(notes)
        return used
