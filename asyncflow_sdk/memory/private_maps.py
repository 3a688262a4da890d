"""PrivateMaps: a cache of copy-on-write mappings. A mapping with present pages costs no page
faults, a new one a fault per page.

Later writes to the shared block are visible through such a mapping, except in pages written through
the mapping. The kernel reports such pages (/proc/self/pagemap); a mapping with any is discarded.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from .mapped_segment import MappedSegment

_POPULATE_READ = 22  # madvise advice since Linux 5.14, unnamed in Python
_STEP_BYTES = 16 << 20  # the interpreter is blocked while the kernel populates
_PAGEMAP = "/proc/self/pagemap"
_PRESENT, _OF_FILE = np.uint64(3 << 62), np.uint64(1 << 61)  # in memory or swapped out; of the file, so not a copy


class PrivateMaps:
    """The cached mappings of one reader without views, by segment and range. Thread-safe."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int, int], tuple[MappedSegment, mmap.mmap]] = {}
        self._closed = False

    def take(self, mapped: MappedSegment, low: int, stop: int, *, unwritten: bool = True) -> mmap.mmap:
        """Return a mapping of bytes ``low`` to ``stop`` of a segment, with its pages present.
        ``unwritten`` False: it may have been written to, which saves the check."""
        before, own = self._idle.pop((mapped.name, low, stop), (None, None))
        if own is not None and before is mapped and not (unwritten and _written(own)):
            return own
        # A copy of the keys: a view released in any thread, or collected here, adds its mapping meanwhile.
        for key in [k for k in list(self._idle) if k[0] == mapped.name and k[1] < stop and low < k[2]]:
            self._idle.pop(key, None)  # the blocks have moved
        own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
        with contextlib.suppress(OSError, ValueError):  # an older kernel: pages are read on access
            for start in range(0, stop - low, _STEP_BYTES):
                own.madvise(_POPULATE_READ, start, min(_STEP_BYTES, stop - low - start))
        return own

    def give(self, mapped: MappedSegment, low: int, stop: int, own: mmap.mmap) -> None:
        """Cache a mapping without views."""
        if not self._closed:
            self._idle[mapped.name, low, stop] = mapped, own

    def prune(self) -> None:
        """Discard the mappings of removed segments: nothing else keeps their memory."""
        for key, (mapped, _) in list(self._idle.items()):
            if mapped.gone:
                self._idle.pop(key, None)

    def close(self) -> None:
        """Discard all mappings, those with views when the views end."""
        self._closed = True
        self._idle.clear()


def _written(own: mmap.mmap) -> bool:
    """True if a page was copied by a write, or if the kernel does not report it."""
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
