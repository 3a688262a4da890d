"""Mapper: a reader's views of blocks. The bytes of a view never change while it exists."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ..errors import AsyncFlowError, LeaseLost
from .mapped_segment import BlockHold, Bytes, MappedSegment
from .private_maps import PrivateMaps


class Mapper:
    """Maps segments of a directory, or of several: ``directory`` may be a function that returns the
    one of a segment, or None. Thread-safe; unusable in a child made by fork().

    All methods raise LeaseLost for blocks and segments that are gone, and after ``close``."""

    def __init__(self, directory: Path | Callable[[str], Path | None]) -> None:
        self._directory = directory
        self._mapped: dict[str, MappedSegment] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def view(self, segment: str, start: int, serial: int, nbytes: int) -> Bytes:
        """Return the bytes of a block, read-only, without a copy."""
        with self._lock:
            mapped = self._find(segment, start + nbytes)
            array = np.frombuffer(mapped.map, np.uint8)
            mapped.pin(start, serial, array)
        return array[start : start + nbytes]

    def private_view(
        self,
        segment: str,
        start: int,
        serial: int,
        nbytes: int,
        skip: int = 0,
        *,
        maps: PrivateMaps | None = None,
        unwritten: bool = True,
    ) -> Bytes:
        """Return bytes ``skip`` to ``nbytes`` of a block in a copy-on-write mapping: writing to it
        changes neither the block nor other views.

        ``maps``: caches the mapping after its last view, for the next block in the same place.
        ``unwritten``: reuse it only if it was not written to; False saves the check."""
        first, stop = start + skip, start + nbytes
        low = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            mapped = self._find(segment, stop)
            if maps is None:
                own = mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)
            else:
                own = maps.take(mapped, low, stop, unwritten=unwritten)
            array = np.frombuffer(own, np.uint8)
            if maps is not None:
                weakref.finalize(array, maps.give, mapped, low, stop, own).atexit = False
            mapped.pin(start, serial, array)
        return array[first - low : stop - low]

    def copy(self, segment: str, start: int, serial: int, nbytes: int) -> bytes:
        """Return a copy of a block."""
        with self._lock:
            return self._find(segment, start + nbytes).read(start, nbytes, serial)

    @contextlib.contextmanager
    def mapped(self, segment: str, stop: int) -> Iterator[MappedSegment]:
        """Yield a segment of at least ``stop`` bytes, and keep it mapped meanwhile."""
        with self._lock:
            mapped = self._find(segment, stop)
            mapped.acquire()
        try:
            yield mapped
        finally:
            mapped.release()

    def hold(self, segment: str, starts: Sequence[int]) -> BlockHold:
        """Lock the blocks of a segment that begin at ``starts``: see BlockHold."""
        with self.mapped(segment, max(starts) + 1) as mapped:
            return BlockHold(mapped, starts)

    def _find(self, segment: str, stop: int) -> MappedSegment:
        """The caller holds the lock."""
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be mapped in a child made by fork(), where nothing would protect the view;"
                " connect again in the child, or pass it copies"
            )
        mapped = self._mapped.get(segment) or self._open(segment)
        if stop > len(mapped.bytes):
            raise LeaseLost(f"segment {segment} has {len(mapped.bytes)} bytes, not {stop}")
        return mapped

    def close(self) -> None:
        """Unmap all segments, and map no more. Views and holds stay valid. Idempotent."""
        if os.getpid() == self._pid:
            with self._lock:
                self._closed = True
                for mapped in self._mapped.values():
                    mapped.close()
                self._mapped.clear()

    def _open(self, segment: str) -> MappedSegment:
        for name in [n for n, m in self._mapped.items() if m.abandoned]:
            self._mapped.pop(name).close()
        if "/" in segment:
            raise LeaseLost(f"{segment!r} is no segment name")
        if self._closed:
            raise LeaseLost(f"segment {segment} cannot be read any more: the connection that reads it is closed")
        directory = self._directory(segment) if callable(self._directory) else self._directory
        if directory is None:
            raise LeaseLost(f"segment {segment} is in no memory that is visible here")
        try:
            mapped = self._mapped[segment] = MappedSegment(directory / segment, self._lock)
        except FileNotFoundError:
            raise LeaseLost(f"segment {segment} is gone: its rows ended") from None
        return mapped
