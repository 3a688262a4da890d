"""The reader's side of shared memory. Mapper: views of blocks. The bytes of a view never change.
MappedSegment: one segment, and the locks of the blocks with views. PrivateMaps: a cache of writable mappings."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, LeaseLost
from .segment import COPYING, HEADER, HEADER_BYTES, MAGIC, try_lock, unlock

Bytes: TypeAlias = npt.NDArray[np.uint8]
USED_AGAIN = "the rows ended and their memory was used again while this reader was away"
_POPULATE_READ = 22  # madvise advice since Linux 5.14, unnamed in Python
_STEP_BYTES = 16 << 20  # the interpreter is blocked while the kernel populates


class MappedSegment:
    """A segment, mapped read-only. ``bytes``: all of it, uint8. It stays mapped while it has a view, which pins it by
    a weak reference to its array, or a user: a hold or a read. ``lock``: re-entrant: any allocation may unpin."""

    def __init__(self, path: Path, lock: threading.RLock) -> None:
        self.name = path.name
        self.fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)
        self._pins: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id: hashing a weak reference hashes its array
        self._starts: dict[int, int] = {}  # start of a locked block → its pins
        self._users = self._copying = 0
        self._lock, self._closing, self._pid = lock, False, os.getpid()

    def check(self, start: int, serial: int) -> None:
        """Raise LeaseLost if the block was freed, which clears the serial first: else a copy made before is valid."""
        head = os.pread(self.fd, HEADER_BYTES, start) if start >= 0 else b""
        if len(head) < HEADER_BYTES or HEADER.unpack(head) != (MAGIC, serial):
            raise LeaseLost(USED_AGAIN)

    def pin(self, start: int, serial: int, array: Bytes) -> None:
        """Hold a block while ``array`` lives. The caller holds the lock."""
        ref = weakref.ref(array, self._unpin)
        self._pins[id(ref)] = ref, start  # first: a view collected from here on must not unlock the block
        self._starts[start] = self._starts.get(start, 0) + 1
        try:
            if self._starts[start] == 1 and not try_lock(self.fd, start, start + 1, exclusive=False):
                raise LeaseLost(USED_AGAIN)  # its writer is reclaiming it
            self.check(start, serial)
        except BaseException:
            self._unpin(ref)
            raise

    def acquire(self) -> None:
        """Keep the mapping until ``release``, also if its file is deleted."""
        with self._lock:
            self._users += 1

    def release(self) -> None:
        """Undo one ``acquire``."""
        if os.getpid() != self._pid:
            return  # in a forked child, a lock held by another thread of its parent is never released
        with self._lock:
            self._users -= 1
            self._close_unused()

    @contextlib.contextmanager
    def keep_pages(self) -> Iterator[bool]:
        """Keep the writer from returning pages to the system. Yield True if all pages are present:
        only then read all of ``bytes``, because reading a missing page would allocate it again."""
        with self._lock:
            self._copying += 1
            if self._copying == 1:
                locked = try_lock(self.fd, COPYING, COPYING + 1, exclusive=False)
                self._copying = self._copying if locked else 0
            locked = self._copying > 0
        try:
            state = os.fstat(self.fd)
            yield locked and state.st_blocks * 512 >= state.st_size
        finally:
            if locked:
                with self._lock:
                    self._copying -= 1
                    if not self._copying:
                        unlock(self.fd, COPYING, COPYING + 1)

    def close(self) -> None:
        """Close the file, once no view or user is left. The caller holds the lock."""
        self._closing = True
        self._close_unused()

    @property
    def idle(self) -> bool:
        """True if it has no view or user."""
        return not self._pins and not self._users

    @property
    def gone(self) -> bool:
        """True if its file was deleted or closed."""
        return self.fd < 0 or os.fstat(self.fd).st_nlink == 0

    def _unpin(self, ref: weakref.ref[Any]) -> None:
        if os.getpid() != self._pid:
            return  # a forked child shares the file lock, which protects its parent's views
        with self._lock:
            _, start = self._pins.pop(id(ref))
            self._starts[start] -= 1
            if not self._starts[start]:
                del self._starts[start]
                unlock(self.fd, start, start + 1)
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closing and self.idle and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BlockHold:
    """Locks on the blocks at ``starts``, by a descriptor of its own: the mapping stays readable
    until ``close``, also after the end of the writer and its file. Raises LeaseLost."""

    def __init__(self, mapped: MappedSegment, starts: Sequence[int]) -> None:
        self._fd, self._mapped = -1, mapped
        self._fd = os.open(f"/proc/self/fd/{mapped.fd}", os.O_RDONLY)
        mapped.acquire()
        if try_lock(self._fd, min(starts), max(starts) + 1, exclusive=False):
            return
        for start in starts:  # a writer is reclaiming a block between them
            if not try_lock(self._fd, start, start + 1, exclusive=False):
                raise LeaseLost(USED_AGAIN)

    def close(self) -> None:
        """Release the locks. In a forked child, its parent's descriptor keeps them. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._mapped.release()

    def __del__(self) -> None:
        self.close()


class PrivateMaps:
    """A cache of the copy-on-write mappings of one reader without views, by segment and range. Thread-safe. A mapping
    with present pages costs no page faults, a new one a fault per page. Later writes to the shared block are visible
    through such a mapping, except in pages written through the mapping: a reader verifies its bytes."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int, int], tuple[MappedSegment, mmap.mmap]] = {}
        self._closed = False

    def take(self, mapped: MappedSegment, low: int, stop: int) -> mmap.mmap:
        """Return a mapping of bytes ``low`` to ``stop`` of a segment, with its pages present."""
        before, own = self._idle.pop((mapped.name, low, stop), (None, None))
        if own is not None and before is mapped:
            return own
        # A copy of the keys: a view released in any thread, or collected here, adds its mapping meanwhile.
        for key in [k for k in list(self._idle) if k[0] == mapped.name and k[1] < stop and low < k[2]]:
            self._idle.pop(key, None)  # the blocks have moved
        own = _private(mapped, low, stop)
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
        """Discard all mappings, each once it has no view."""
        self._closed = True
        self._idle.clear()


def _private(mapped: MappedSegment, low: int, stop: int) -> mmap.mmap:
    return mmap.mmap(mapped.fd, stop - low, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, offset=low)


class Mapper:
    """Maps segments of ``directory``, which may be a function of the segment. Thread-safe; unusable in a child made
    by fork(). All methods raise LeaseLost for blocks and segments gone, and after ``close``."""

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
        self, segment: str, start: int, serial: int, nbytes: int, skip: int = 0, *, maps: PrivateMaps | None = None
    ) -> Bytes:
        """Return bytes ``skip`` to ``nbytes`` of a block in a copy-on-write mapping: writing changes no block and no
        other view. ``maps``: caches the mapping for the next block in the same place, with the pages written."""
        first, stop = start + skip, start + nbytes
        low = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with self._lock:
            mapped = self._find(segment, stop)
            own = _private(mapped, low, stop) if maps is None else maps.take(mapped, low, stop)
            array = np.frombuffer(own, np.uint8)
            if maps is not None:
                weakref.finalize(array, maps.give, mapped, low, stop, own).atexit = False
            mapped.pin(start, serial, array)
        return array[first - low : stop - low]

    def copy(self, segment: str, start: int, serial: int, nbytes: int) -> bytes:
        """Return a copy of a block, without allocating missing pages."""
        with self._lock:
            mapped = self._find(segment, start + nbytes)
            raw = os.pread(mapped.fd, nbytes, start)
            mapped.check(start, serial)
            return raw

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
        """Lock the blocks at ``starts`` of a segment: see BlockHold."""
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
        for name in [n for n, m in self._mapped.items() if m.idle and m.gone]:
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
