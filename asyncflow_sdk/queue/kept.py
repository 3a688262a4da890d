"""Kept: rows of an acknowledged step that somebody has still to read, in any thread, also after their memory was freed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import AsyncFlowError
from ..types import Batch


class Kept:
    """Rows that are read at the first call, once. ``now`` reads them before, where they are about to go. ``unread``: until
    either. Thread-safe."""

    def __init__(self, read: Callable[[], Batch]) -> None:
        self.unread = True
        self._read: Callable[[], Batch] | None = read
        self._lock = threading.Lock()

    def __call__(self) -> Batch:
        """Return the rows. Raises LeaseLost, SchemaError, OSError when they cannot be read."""
        with self._lock:
            read, self._read = self._read, None
            assert read is not None, "the rows of a step are read once"
            self.unread = False
            return read()

    def now(self) -> None:
        """Read the rows, unless they were. An error is raised to the caller who asks for them."""
        with self._lock:
            if not self.unread or self._read is None:
                return
            self.unread = False
            try:
                batch = self._read()
            except (AsyncFlowError, OSError) as error:
                failure = error

                def fail() -> Batch:
                    raise failure

                self._read = fail
            else:
                self._read = lambda: batch
