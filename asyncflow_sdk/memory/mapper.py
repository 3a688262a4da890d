"""Mapper: a reader's views of blocks. A view never changes while it is held, however long that is."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import AsyncFlowError, LeaseLost
from .mapped_segment import BlockHold, Bytes, MappedSegment
from .private_maps import PrivateMaps


class Mapper:
    """Maps segments of a directory. Thread-safe. Refuses to work in a child after a bare fork."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapped: dict[str, MappedSegment] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def view(self, segment: str, start: int, serial: int, nbytes: int) -> Bytes:
        """The bytes of a block, read-only, without a copy. Raises LeaseLost when they are gone."""
        with self._lock:
            mapped = self._find(segment, start + nbytes)
            array = np.frombuffer(mapped.map, np.uint8)
            mapped.pin(start, serial, array)
        return array[start : start + nbytes]

    def private(
        self,
        segment: str,
        start: int,
        serial: int,
        nbytes: int,
        skip: int = 0,
        *,
        maps: PrivateMaps | None = None,
        look: bool = True,
    ) -> Bytes:
        """Bytes ``skip`` to ``nbytes`` of a block in a copy-on-write mapping of their own: writable, harming nobody.
        ``maps``: where it is left when nobody views it any more, and found again for the next block in that place, unless it was written into; with ``look`` False that is not looked at."""
        first, stop = start + skip, start + nbytes
        low = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            mapped = self._find(segment, stop)
            if maps is None:
                own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
            else:
                own = maps.take(mapped, low, stop, look=look)
            array = np.frombuffer(own, np.uint8)
            if maps is not None:
                weakref.finalize(array, maps.give, mapped, low, stop, own).atexit = False
            mapped.pin(start, serial, array)
        return array[first - low : stop - low]

    def copy(self, segment: str, start: int, serial: int, nbytes: int) -> bytes:
        """A copy of a block. Raises LeaseLost when it is gone."""
        with self._lock:
            return self._find(segment, start + nbytes).read(start, nbytes, serial)

    @contextlib.contextmanager
    def mapped(self, segment: str, stop: int) -> Iterator[MappedSegment]:
        """A segment of at least ``stop`` bytes, which stays mapped for as long as this lasts. Raises LeaseLost."""
        with self._lock:
            mapped = self._find(segment, stop)
            mapped.enter()
        try:
            yield mapped
        finally:
            mapped.exit()

    def hold(self, segment: str, starts: Sequence[int]) -> BlockHold:
        """Keep blocks of a segment: see ``MappedSegment.hold``. Raises LeaseLost."""
        with self.mapped(segment, max(starts) + 1) as mapped:
            return mapped.hold(starts)

    def _find(self, segment: str, stop: int) -> MappedSegment:
        """The caller holds the lock."""
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be mapped in a child made by fork(), where nothing would protect the view;"
                " connect again in the child, or hand it copies"
            )
        mapped = self._mapped.get(segment) or self._open(segment)
        if stop > mapped.size:
            raise LeaseLost(f"segment {segment} has {mapped.size} bytes, not {stop}")
        return mapped

    def close(self) -> None:
        """Forget all segments, and map none any more. Views and holds stay valid."""
        if os.getpid() == self._pid:
            with self._lock:
                self._closed = True
                for mapped in self._mapped.values():
                    mapped.leave()
                self._mapped.clear()

    def _open(self, segment: str) -> MappedSegment:
        for name in [n for n, m in self._mapped.items() if m.abandoned]:
            self._mapped.pop(name).leave()
        if "/" in segment:
            raise LeaseLost(f"{segment!r} is no segment name")
        if self._closed:
            raise LeaseLost(f"segment {segment} cannot be read any more: the connection that reads it is closed")
        try:
            mapped = self._mapped[segment] = MappedSegment(self._directory / segment, self._lock)
        except FileNotFoundError:
            raise LeaseLost(f"segment {segment} is gone: its rows ended") from None
        return mapped
