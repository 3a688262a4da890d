<<<<<<<< HEAD:adapters/asyncflow_torch/dist_store.py
"""KeyValueStore: what the members of a process group tell each other before they are connected, kept by the publisher."""
========
"""Rendezvous: values exchanged by the members of a process group before they are connected, kept by the
publisher."""
>>>>>>>> w-adapters:adapters/asyncflow_torch/dist_rendezvous.py

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from asyncflow_sdk.errors import ProtocolError

from .dist_group import StoreProxy

MAX_KEYS, MAX_BYTES = 1024, 16 << 10
"""Limits of a rendezvous, and of a key with its value: gloo needs a key of 200 bytes per member, NCCL one of 128."""
Found = Callable[[list[bytes] | None], Any]


<<<<<<<< HEAD:adapters/asyncflow_torch/dist_store.py
class KeyValueStore:
    """Values by key, and who waits for them. Thread-safe."""
========
class Rendezvous:
    """Values by key, and callers waiting for them. Thread-safe."""
>>>>>>>> w-adapters:adapters/asyncflow_torch/dist_rendezvous.py

    def __init__(self) -> None:
        self.failed = ""
        self._values: dict[str, bytes] = {}
        self._looking: list[tuple[Sequence[str], Found]] = []
        self._lock = threading.Lock()

    def put(self, key: str, value: bytes) -> None:
        """Store a value. Raises ProtocolError above MAX_KEYS and MAX_BYTES."""
        if len(key) + len(value) > MAX_BYTES:
            raise ProtocolError(
                f"a value of {len(key) + len(value)} bytes; a group is made with less than {MAX_BYTES}"
            )
        with self._lock:
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise ProtocolError(f"more than {MAX_KEYS} values; a group is made with less")
            self._values[key] = value
        self._notify()

    def look(self, keys: Sequence[str], found: Found) -> None:
        """Call ``found`` once: with all values, or with None after ``fail``. Raises ProtocolError."""
        if len(keys) > MAX_KEYS:
            raise ProtocolError(f"{len(keys)} keys were requested; a board has {MAX_KEYS}")
        with self._lock:
            if len(self._looking) >= MAX_KEYS:
                raise ProtocolError(f"{MAX_KEYS} callers are waiting already")
            self._looking.append((keys, found))
        self._notify()

    def fail(self, why: str) -> None:
        """Fail all current and future calls of ``look``."""
        self.failed = self.failed or why
        self._notify()

<<<<<<<< HEAD:adapters/asyncflow_torch/dist_store.py
    def store(self, stall_s: float) -> StoreProxy:
        """For a member in this process."""
========
    def store(self, stall_s: float) -> Exchange:
        """Return a store for a member in this process."""
>>>>>>>> w-adapters:adapters/asyncflow_torch/dist_rendezvous.py

        def look(keys: list[str]) -> list[bytes]:
            """Wait for values."""
            found: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
            self.look(keys, found.put)
            try:
                values = found.get(timeout=stall_s)
            except queue.Empty:
                raise TimeoutError(f"no value of {', '.join(keys)} in {stall_s:g} s") from None
            if values is None:
                raise ConnectionError(self.failed)
            return values

        return StoreProxy(self.put, look)

    def _notify(self) -> None:
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
