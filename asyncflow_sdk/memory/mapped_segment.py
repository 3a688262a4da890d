"""MappedSegment: a segment mapped by a reader, and the locks of the blocks that its views hold."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost
from .locks import COPYING, try_lock, unlock
from .segment import HEADER, HEADER_BYTES, MAGIC

Bytes: TypeAlias = npt.NDArray[np.uint8]
USED_AGAIN = "the rows ended and their memory was used again while this reader was away"


class MappedSegment:
    """A segment, mapped read-only. ``bytes``: all of it, uint8.

    Views pin it by weak references to their arrays; holds and running reads use it without a view.
    It stays mapped while it has either. ``lock``: the mapper's re-entrant lock, because any
    allocation may collect a view and so remove its pin.
    """

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

    def read(self, start: int, nbytes: int, serial: int) -> bytes:
        """Return a copy of a block, without allocating missing pages. Raises LeaseLost."""
        raw = os.pread(self.fd, nbytes, start)
        self.check(start, serial)
        return raw

    def check(self, start: int, serial: int) -> None:
        """Raises LeaseLost if the block was freed. Otherwise a copy made before is valid, because
        freeing clears the serial first."""
        head = os.pread(self.fd, HEADER_BYTES, start) if start >= 0 else b""
        if len(head) < HEADER_BYTES or HEADER.unpack(head) != (MAGIC, serial):
            raise LeaseLost(USED_AGAIN)

    def pin(self, start: int, serial: int, array: Bytes) -> None:
        """Hold a block while ``array`` lives. The caller holds the lock. Raises LeaseLost."""
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
    def abandoned(self) -> bool:
        """True if it has no view or user, and its file was deleted."""
        return self._idle and self.gone

    @property
    def _idle(self) -> bool:
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
        if self._closing and self._idle and self.fd >= 0:
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
