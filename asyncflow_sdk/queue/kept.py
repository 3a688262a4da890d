"""Kept: rows of an acknowledged step that somebody has still to read, in any thread, also after their memory was freed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from ..errors import AsyncFlowError
from ..types import Batch


class Kept:
    """Called once, it reads the rows; ``now`` has it done before, where their memory is about to go."""

    def __init__(self, read: Callable[[], Batch]) -> None:
        self._read: Callable[[], Batch] | None = read
        self._batch: Batch | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Batch:
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is None:
                assert self._read is not None, "the rows of a step are read once"
                batch = self._read()
            self._read = None
            return batch

    def now(self) -> None:
        """Raises what reading does."""
        with self._lock:
            if self._read is not None and self._batch is None:
                self._batch = self._read()


def read_now(kept: Iterable[Kept]) -> None:
    """What cannot be read is told to who asks for it."""
    for each in kept:
        try:
            each.now()
        except (AsyncFlowError, OSError):
            continue
