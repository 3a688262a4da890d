"""Rows of an acknowledged step that a listener reads later, in any thread, also after their memory was freed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import AsyncFlowError
from ..types import Batch


class DeferredStepRead:
    """Rows that are read at the first call, once. Thread-safe. ``unread``: True until they are read."""

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
        """Read the rows before their memory is freed, unless they were read. The later call raises an error of this read."""
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
