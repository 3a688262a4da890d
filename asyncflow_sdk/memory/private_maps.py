"""Copy-on-write mappings that are used again: a mapping whose pages are there costs nothing, a new one a fault for each.

What its writer puts into a block later is seen through such a mapping too, in every page that nobody wrote into
through it; the kernel tells which those are. One that was written into is given up.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import TypeAlias

import numpy as np

from .mapped_segment import MappedSegment

Key: TypeAlias = tuple[str, int, int]
_POPULATE_READ = 22  # of madvise, since Linux 5.14; Python has no name for it
_STEP_BYTES = 16 << 20  # the interpreter stands still while the kernel works
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)  # in memory or swapped out; of the file, so not a copy


class PrivateMaps:
    """Those of one reader that nobody views at the moment, by segment and range. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[Key, tuple[MappedSegment, mmap.mmap]] = {}
        self._closed = False

    def take(self, mapped: MappedSegment, low: int, stop: int, *, look: bool = True) -> mmap.mmap:
        """Bytes ``low`` to ``stop`` of a segment, its pages there. Without ``look`` it may be one that was written into."""
        before, own = self._idle.pop((mapped.name, low, stop), (None, None))
        if own is not None and before is mapped and not (look and _written(own)):
            return own
        # A copy: a view that goes in any thread, or is collected here, gives its mapping meanwhile.
        for key in [k for k in list(self._idle) if k[0] == mapped.name and k[1] < stop and low < k[2]]:
            self._idle.pop(key, None)  # blocks lie elsewhere now
        own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
        with contextlib.suppress(OSError, ValueError):  # an older kernel: they come as they are read
            for start in range(0, stop - low, _STEP_BYTES):
                own.madvise(_POPULATE_READ, start, min(_STEP_BYTES, stop - low - start))
        return own

    def give(self, mapped: MappedSegment, low: int, stop: int, own: mmap.mmap) -> None:
        """Nobody views it any more."""
        if not self._closed:
            self._idle[mapped.name, low, stop] = mapped, own

    def tidy(self) -> None:
        """Give up those of segments that are gone: they alone keep their memory."""
        for key, (mapped, _) in list(self._idle.items()):
            if mapped.gone:
                self._idle.pop(key, None)

    def close(self) -> None:
        """Give all of them up, and those that are viewed when their views go."""
        self._closed = True
        self._idle.clear()


def _written(own: mmap.mmap) -> bool:
    """Whether a page of it is a copy that a write made, or that cannot be told."""
    address = np.frombuffer(own, np.uint8).ctypes.data
    pages = -(-len(own) // mmap.PAGESIZE)
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            file.seek(address // mmap.PAGESIZE * 8)
            raw = file.read(pages * 8)
    except OSError:
        return True
    if len(raw) < pages * 8:
        return True
    state = np.frombuffer(raw, np.uint64)
    return bool(np.any((state & _PRESENT).astype(bool) & ~(state & _OF_FILE).astype(bool)))
