"""DeltaCache: encoded deltas for further replicas, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple


class DeltaKey(NamedTuple):
    """A bucket of version ``new`` against the same bucket of ``base``. Versions are named by
    root."""

    new: str
    base: str
    bucket: int


class DeltaCache:
    """Keeps the most recently used deltas, up to ``most_bytes``. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._made: OrderedDict[DeltaKey, Future[bytes | None]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, pair: DeltaKey, make: Callable[[], bytes | None]) -> bytes | None:
        """Return the delta. The first caller makes it; others wait for its result."""
        with self._lock:
            found = self._made.get(pair)
            mine = found is None
            code = found or Future[bytes | None]()
            self._made[pair] = code
            self._made.move_to_end(pair)
        if not mine:
            return code.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                self._made.pop(pair, None)
            code.set_exception(error)
            raise
        with self._lock:
            code.set_result(value)
            self.nbytes += _size(code)
            for old in list(self._made):
                if self.nbytes <= self._most_bytes:
                    break
                self._drop(old)
        return value

    def keep(self, roots: Collection[str]) -> None:
        """Drop deltas of all other versions."""
        with self._lock:
            for pair in [p for p in self._made if p.new not in roots or p.base not in roots]:
                self._drop(pair)

    def _drop(self, pair: DeltaKey) -> None:
        code = self._made[pair]
        if code.done():  # one in progress is counted once it is made
            del self._made[pair]
            self.nbytes -= _size(code)


def _size(code: Future[bytes | None]) -> int:
    return len(code.result() or b"")
