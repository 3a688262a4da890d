"""KeyValueStore: the values that members of a process group exchange before they are connected,
kept by the publisher."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow_sdk.errors import ProtocolError

from .dist_group import StoreProxy

MAX_KEYS, MAX_BYTES = 1024, 16 << 10
"""Of a board, and of a key with its value: gloo has a key of 200 bytes for each member, NCCL one of 128 in all."""
Found = Callable[[list[bytes] | None], Any]


class KeyValueStore:
    """Values by key, and the requests that wait for them. Thread-safe."""

    def __init__(self) -> None:
        self.failed = ""
        self._values: dict[str, bytes] = {}
        self._looking: list[tuple[Sequence[str], Found]] = []
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """Set a key. Raises ProtocolError for more keys or bytes than a group needs."""
        if len(key) + len(value) > MAX_BYTES:
            raise ProtocolError(
                f"a word of {len(key) + len(value)} bytes; a group is made with less than {MAX_BYTES}"
            )
        with self._lock:
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise ProtocolError(f"more than {MAX_KEYS} words; a group is made with less")
            self._values[key] = value
        self._tell()

    def look(self, keys: Sequence[str], found: Found) -> None:
        """Request keys. ``found`` is called once, with all values, or with None when the store has
        failed. Raises ProtocolError."""
        if len(keys) > MAX_KEYS:
            raise ProtocolError(f"{len(keys)} words are looked for; a board has {MAX_KEYS}")
        with self._lock:
            if len(self._looking) >= MAX_KEYS:
                raise ProtocolError(f"{MAX_KEYS} wait for words already")
            self._looking.append((keys, found))
        self._tell()

    def fail(self, why: str) -> None:
        self.failed = self.failed or why
        self._tell()

    def store(self, limit_s: Callable[[], float]) -> StoreProxy:
        """Return a store for a member in this process. It waits up to ``limit_s()`` seconds for
        values of other members."""

        def look(keys: list[str]) -> list[bytes]:
            found: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
            self.look(keys, found.put)
            seconds = max(limit_s(), 0.0)
            try:
                values = found.get(timeout=seconds)
            except queue.Empty:
                raise TimeoutError(f"no word of {', '.join(keys)} in {seconds:.3g} s") from None
            if values is None:
                raise ConnectionError(self.failed)
            return values

        return StoreProxy(self.put, look)

    def _tell(self) -> None:
        ready, still = [], []
        with self._lock:
            for keys, found in self._looking:
                if self.failed or self._values.keys() >= set(keys):
                    ready.append((found, [self._values.get(key, b"") for key in keys]))
                else:
                    still.append((keys, found))
            self._looking = still
        for found, values in ready:
            found(None if self.failed else values)
