"""DeltaCache: deltas that were made for one replica and serve the next ones, in bounded memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import NamedTuple


class DeltaKey(NamedTuple):
    """A bucket of version ``new``, as a difference from the same one of ``base``; both by their root."""

    new: str
    base: str
    bucket: int


class DeltaCache:
    """Keeps up to ``most_bytes``, the last ones used. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._made: OrderedDict[DeltaKey, Future[bytes | None]] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, pair: DeltaKey, make: Callable[[], bytes | None]) -> bytes | None:
        """The code, made now unless it is there, or another thread makes it: then that one is waited for."""
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
        """Drop those of versions that are kept no longer."""
        with self._lock:
            for pair in [p for p in self._made if p.new not in roots or p.base not in roots]:
                self._drop(pair)

    def _drop(self, pair: DeltaKey) -> None:
        code = self._made[pair]
        if code.done():  # one that is being made is counted once it is there, and dropped when room is needed
            del self._made[pair]
            self.nbytes -= _size(code)


def _size(code: Future[bytes | None]) -> int:
    return len(code.result() or b"")
