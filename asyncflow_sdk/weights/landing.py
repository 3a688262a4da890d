"""Landing: host memory that versions are fetched into, used again for a later one once nobody looks at it.

    chunks = landing.take([chunk.nbytes for chunk in manifest.chunks])   # uint8 arrays, to be filled
    # when they and every view of them are gone, their memory is idle: the next take has it without page faults

What is idle beyond the sizes of the last take goes back to the system, so that no more is held than the versions that are
looked at, and one.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import MemoryFull
from ..interfaces.weights import Bytes
from ..memory import free_memory


class Landing:
    """Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[mmap.mmap] = []
        self._used: dict[int, tuple[weakref.ref[Any], mmap.mmap]] = {}  # by id: a reference hashes as its array
        self._lock = threading.RLock()  # any allocation may collect an array, whose memory comes back then and there
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes held: in use, and idle."""
        with self._lock:
            return sum(map(len, list(self._idle))) + sum(len(memory) for _, memory in list(self._used.values()))

    def take(self, sizes: Sequence[int]) -> list[Bytes]:
        """Contiguous, writable, with any content. Raises MemoryFull."""
        with self._lock:
            idle: dict[int, list[mmap.mmap]] = {}
            for memory in self._idle:
                idle.setdefault(len(memory), []).append(memory)
            found = [idle[size].pop() if idle.get(size) else None for size in sizes]
            self._idle.clear()
            missing = [size for size, memory in zip(sizes, found, strict=True) if memory is None]
            idle.clear()
            try:
                if sum(missing) > free_memory():
                    raise OSError("the host has no more")
                made = [_fresh(size) for size in missing if size]
            except (OSError, ValueError, OverflowError) as error:
                self._idle += [memory for memory in found if memory is not None]
                raise MemoryFull(
                    f"no memory for {sum(missing)} more bytes to fetch weights into ({error}); a replica needs room for the"
                    " version it has and the one it fetches"
                ) from None
            made.reverse()
            return [
                self._lend(memory or made.pop()) if size else np.empty(0, np.uint8)
                for size, memory in zip(sizes, found, strict=True)
            ]

    def give_back(self, chunks: Sequence[Bytes]) -> None:
        """Nobody has views of these but, for messages, who was to fill them."""
        with self._lock:
            for chunk in chunks:
                if id(chunk) in self._used:
                    self._landed(self._used[id(chunk)][0])

    def close(self) -> None:
        """Free what is idle, and the rest when it is. Idempotent."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _lend(self, memory: mmap.mmap) -> Bytes:
        array = np.frombuffer(memory, np.uint8)
        self._used[id(array)] = weakref.ref(array, self._landed), memory
        return array

    def _landed(self, ref: weakref.ref[Any]) -> None:
        with self._lock:
            for number, (known, memory) in list(self._used.items()):
                if known is ref:
                    del self._used[number]
                    if not self._closed:
                        self._idle.append(memory)


def _fresh(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
