"""BufferPool: private host memory for large values, reused without page faults.

    chunks = pool.take([1 << 20, 1 << 20])      # uint8 arrays, to be filled
    del chunks                                  # with every view of them: the next take reuses their memory

A take returns idle memory of other sizes to the system: a pool holds the buffers in use and the last take's."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import MemoryFull
from .segment import free_memory


class BufferPool:
    """Thread-safe. ``purpose``: the use of the memory, for errors."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._idle: list[mmap.mmap] = []
        self._used: dict[int, tuple[weakref.ref[Any], mmap.mmap]] = {}  # by id: a reference hashes as its array
        self._lock = threading.RLock()  # any allocation may collect an array, which returns its memory at once
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes held, in use and idle."""
        with self._lock:
            return sum(map(len, list(self._idle))) + sum(len(memory) for _, memory in list(self._used.values()))

    def take(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Return contiguous writable arrays of these sizes in bytes, with any content. Raises MemoryFull."""
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
                made = iter([_allocate(size) for size in missing if size])
            except (OSError, ValueError, OverflowError) as error:
                self._idle += [memory for memory in found if memory is not None]
                raise MemoryFull(f"no memory for {sum(missing)} more bytes of {self._purpose} ({error})") from None
            return [
                self._lend(memory or next(made)) if size else np.empty(0, np.uint8)
                for size, memory in zip(sizes, found, strict=True)
            ]

    def give_back(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Reuse the memory of these arrays, even if the traceback of an error still refers to them."""
        with self._lock:
            for buffer in buffers:
                if id(buffer) in self._used:
                    self._collected(self._used[id(buffer)][0])

    def close(self) -> None:
        """Free idle memory, and memory in use once nobody refers to it. Idempotent."""
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _lend(self, memory: mmap.mmap) -> npt.NDArray[np.uint8]:
        array = np.frombuffer(memory, np.uint8)
        self._used[id(array)] = weakref.ref(array, self._collected), memory
        return array

    def _collected(self, ref: weakref.ref[Any]) -> None:
        with self._lock:
            for number, (known, memory) in list(self._used.items()):
                if known is ref:
                    del self._used[number]
                    if not self._closed:
                        self._idle.append(memory)


def _allocate(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
