"""Mapper: a reader's views of segments. A view never changes while it is held, however long that is."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost
from .arena import generation_of

Bytes = npt.NDArray[np.uint8]


class _Mapped:
    """A segment, mapped read-only. ``pins``: weak references to the arrays through which views hold it."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        self.map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self.pins: dict[int, weakref.ref[Any]] = {}  # by id: a weak reference hashes as its array, which cannot
        # Re-entrant, because a view may be collected, and its pin taken out, inside any allocation below.
        self.lock = threading.RLock()

    def pin(self, generation: int, array: Bytes) -> None:
        """Hold the segment for as long as ``array`` lives."""
        with self.lock:
            if not self.pins:
                fcntl.flock(self.fd, fcntl.LOCK_SH)
            if generation_of(self.map) != generation:
                if not self.pins:
                    fcntl.flock(self.fd, fcntl.LOCK_UN)
                raise LeaseLost("the rows ended and their memory was used again while this reader was away")
            ref = weakref.ref(array, self._unpin)
            self.pins[id(ref)] = ref

    def _unpin(self, ref: weakref.ref[Any]) -> None:
        with self.lock:
            self.pins.pop(id(ref), None)
            if not self.pins:
                with contextlib.suppress(OSError):  # closed at interpreter exit
                    fcntl.flock(self.fd, fcntl.LOCK_UN)

    @property
    def abandoned(self) -> bool:
        """Whether nobody views it and its file is gone."""
        return not self.pins and os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # views keep the mapping; it goes with the last of them
            self.map.close()
        os.close(self.fd)


class Mapper:
    """Maps segments of a directory. Thread-safe. Not for use in a child after a bare fork."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapped: dict[str, _Mapped] = {}
        self._lock = threading.Lock()

    def view(self, segment: str, generation: int, start: int, stop: int) -> Bytes:
        """Bytes of a segment, read-only, without a copy. Raises LeaseLost when they are gone."""
        mapped = self._get(segment, stop)
        array = np.frombuffer(mapped.map, np.uint8)
        mapped.pin(generation, array)
        return array[start:stop]

    def private(self, segment: str, generation: int, start: int, stop: int) -> Bytes:
        """The same bytes in a copy-on-write mapping of their own: writable, harming nobody."""
        mapped = self._get(segment, stop)
        low = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
        array = np.frombuffer(own, np.uint8)
        mapped.pin(generation, array)
        return array[start - low : stop - low]

    def close(self) -> None:
        """Forget all segments. Views stay valid."""
        with self._lock:
            for mapped in self._mapped.values():
                if not mapped.pins:
                    mapped.close()
            self._mapped.clear()

    def _get(self, segment: str, stop: int) -> _Mapped:
        with self._lock:
            mapped = self._mapped.get(segment)
            if mapped is None:
                for name in [n for n, m in self._mapped.items() if m.abandoned]:
                    self._mapped.pop(name).close()
                if "/" in segment:
                    raise LeaseLost(f"{segment!r} is no segment name")
                try:
                    mapped = self._mapped[segment] = _Mapped(self._directory / segment)
                except FileNotFoundError:
                    raise LeaseLost(f"segment {segment} is gone: its rows ended") from None
        if stop > len(mapped.map):
            raise LeaseLost(f"segment {segment} has {len(mapped.map)} bytes, not {stop}")
        return mapped
