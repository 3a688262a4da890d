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

from ..errors import AsyncFlowError, LeaseLost
from .arena import generation_of

Bytes = npt.NDArray[np.uint8]


class _Mapped:
    """A segment, mapped read-only. ``pins``: weak references to the arrays through which views hold it.

    ``lock`` is the mapper's one, re-entrant: any allocation may collect a view, and its pin goes then and there.
    """

    def __init__(self, path: Path, lock: threading.RLock) -> None:
        self.fd = os.open(path, os.O_RDONLY)
        try:
            self.map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self.fd)
            raise
        self.pins: dict[int, weakref.ref[Any]] = {}  # by id: a weak reference hashes as its array, which cannot
        self._lock, self._locked, self._leaving, self._pid = lock, False, False, os.getpid()

    def pin(self, generation: int, array: Bytes) -> None:
        """Hold the segment for as long as ``array`` lives. The caller holds the lock."""
        ref = weakref.ref(array, self._unpin)
        self.pins[id(ref)] = ref  # first of all: a view that is collected from here on must not unlock the segment
        found = -1
        with contextlib.suppress(BlockingIOError):  # its writer is renewing it this moment
            if not self._locked:
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self._locked = True
            found = generation_of(self.map)
        if found != generation:
            self._unpin(ref)
            raise LeaseLost("the rows ended and their memory was used again while this reader was away")

    def leave(self) -> None:
        """Close, once nobody views it any more."""
        self._leaving = True
        if not self.pins:
            self._close()

    @property
    def abandoned(self) -> bool:
        """Whether nobody views it and its file is gone."""
        return not self.pins and os.fstat(self.fd).st_nlink == 0

    def _unpin(self, ref: weakref.ref[Any]) -> None:
        if os.getpid() != self._pid:
            return  # a forked child shares the lock on the file, which protects its parent's views
        with self._lock:
            self.pins.pop(id(ref), None)
            if not self.pins and self._locked:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
                self._locked = False
            if not self.pins and self._leaving:
                self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(BufferError):  # the last view goes this moment, and the mapping with it
                self.map.close()
            os.close(self.fd)
            self.fd = -1


class Mapper:
    """Maps segments of a directory. Thread-safe. Refuses to work in a child after a bare fork."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapped: dict[str, _Mapped] = {}
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def view(self, segment: str, generation: int, start: int, stop: int) -> Bytes:
        """Bytes of a segment, read-only, without a copy. Raises LeaseLost when they are gone."""
        self._check_process()
        with self._lock:
            mapped = self._get(segment, stop)
            array = np.frombuffer(mapped.map, np.uint8)
            mapped.pin(generation, array)
        return array[start:stop]

    def private(self, segment: str, generation: int, start: int, stop: int) -> Bytes:
        """The same bytes in a copy-on-write mapping of their own: writable, harming nobody."""
        self._check_process()
        low = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            mapped = self._get(segment, stop)
            own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
            array = np.frombuffer(own, np.uint8)
            mapped.pin(generation, array)
        return array[start - low : stop - low]

    def close(self) -> None:
        """Forget all segments. Views stay valid."""
        if os.getpid() == self._pid:
            with self._lock:
                for mapped in self._mapped.values():
                    mapped.leave()
                self._mapped.clear()

    def _get(self, segment: str, stop: int) -> _Mapped:
        mapped = self._mapped.get(segment)
        if mapped is None:
            for name in [n for n, m in self._mapped.items() if m.abandoned]:
                self._mapped.pop(name).leave()
            if "/" in segment:
                raise LeaseLost(f"{segment!r} is no segment name")
            try:
                mapped = self._mapped[segment] = _Mapped(self._directory / segment, self._lock)
            except FileNotFoundError:
                raise LeaseLost(f"segment {segment} is gone: its rows ended") from None
        if stop > len(mapped.map):
            raise LeaseLost(f"segment {segment} has {len(mapped.map)} bytes, not {stop}")
        return mapped

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be mapped in a child made by fork(), where nothing would protect the view;"
                " connect again in the child, or hand it copies"
            )
