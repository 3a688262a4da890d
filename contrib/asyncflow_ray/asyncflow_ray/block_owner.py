"""BlockOwner: the process that owns the blocks of one host.

Ray loses an object with the process that called ``ray.put``, and frees it with its last reference. So
a producer may end only if another process puts its blocks, and keeps their references.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

KEEP_S = 3600.0
"""An owner that no storage unit asks for this long ends."""


class BlockOwner:
    """``identity``: of its blocks, which end with this process. ``limit_bytes``: of all its blocks."""

    def __init__(self, identity: str, limit_bytes: int) -> None:
        self._identity, self._limit_bytes = identity, limit_bytes
        self._blocks: dict[str, tuple[Any, int]] = {}
        self._bytes = 0
        self._asked = time.monotonic()
        threading.Thread(target=self._end_alone, daemon=True).start()

    def identity(self) -> str:
        """Return the identity. Only the storage unit asks, as a sign of life."""
        self._asked = time.monotonic()
        return self._identity

    def holds(self, identity: str) -> bool:
        return self._identity == identity

    def put(self, name: str, block: Any) -> bool:
        """Keep a block. Return False if there is no room for it."""
        if name in self._blocks:
            return True
        if self._bytes + block.nbytes > self._limit_bytes:
            return False
        self._blocks[name] = ray.put(block), block.nbytes
        self._bytes += block.nbytes
        return True

    def find(self, names: Sequence[str]) -> list[list[Any]]:
        """Return for each name a list with the block's reference, or an empty one."""
        return [[self._blocks[name][0]] if name in self._blocks else [] for name in names]

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            _, nbytes = self._blocks.pop(name, (None, 0))
            self._bytes -= nbytes

    def free_all(self, prefixes: Sequence[str]) -> None:
        begins = tuple(prefixes)
        self.free([name for name in self._blocks if name.startswith(begins)])

    def _end_alone(self) -> None:
        while time.monotonic() - self._asked < KEEP_S:
            time.sleep(KEEP_S / 100)
        os._exit(0)
