"""MappedSegment: a segment in a reader's address space, and the locks of the blocks that its views hold."""

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

    ``pins``: weak references to the arrays through which views hold a block. ``users``: holds and readers at work, for
    which the mapping stays although no view pins it. ``lock`` is the mapper's one, re-entrant: any allocation may collect
    a view, and its pin goes then and there.
    """

    def __init__(self, path: Path, lock: threading.RLock) -> None:
        self.name = path.name
        self.fd = os.open(path, os.O_RDONLY)
        try:
            self.map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self.fd)
            raise
        self.bytes: Bytes = np.frombuffer(self.map, np.uint8)
        self._pins: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id: a weak reference hashes as its array
        self._starts: dict[int, int] = {}  # of locked blocks → pins
        self._users = self._copying = 0
        self._lock, self._leaving, self._pid = lock, False, os.getpid()

    @property
    def size(self) -> int:
        return len(self.bytes)

    def read(self, start: int, nbytes: int, serial: int) -> bytes:
        """A copy of a block's first ``nbytes``. Raises LeaseLost. It touches no page that is not there."""
        raw = os.pread(self.fd, nbytes, start)
        self.check(start, serial)
        return raw

    def check(self, start: int, serial: int) -> None:
        """Raises LeaseLost unless the block is there. What was copied before is right then, since a block loses its
        serial before anything else."""
        head = os.pread(self.fd, HEADER_BYTES, start) if start >= 0 else b""
        if len(head) < HEADER_BYTES or HEADER.unpack(head) != (MAGIC, serial):
            raise LeaseLost(USED_AGAIN)

    def pin(self, start: int, serial: int, array: Bytes) -> None:
        """BlockHold a block for as long as ``array`` lives. The caller holds the lock. Raises LeaseLost."""
        ref = weakref.ref(array, self._unpin)
        self._pins[id(ref)] = ref, start  # first of all: a view collected from here on must not unlock the block
        self._starts[start] = self._starts.get(start, 0) + 1
        try:
            if self._starts[start] == 1 and not try_lock(self.fd, start, start + 1, exclusive=False):
                raise LeaseLost(USED_AGAIN)  # its writer takes it back this moment
            self.check(start, serial)
        except BaseException:
            self._unpin(ref)
            raise

    def enter(self) -> None:
        """Keep the mapping until ``exit``, also if its file goes meanwhile."""
        with self._lock:
            self._users += 1

    def exit(self) -> None:
        """One user less."""
        if os.getpid() != self._pid:
            return  # a forked child must not wait for a lock that another thread of its parent held
        with self._lock:
            self._users -= 1
            if self._leaving and self._idle:
                self._close()

    def hold(self, starts: Sequence[int]) -> BlockHold:
        """Keep the blocks that begin at ``starts``, which must live, and this mapping of them, until the answer goes.
        Raises LeaseLost."""
        return BlockHold(self, starts)

    @contextlib.contextmanager
    def whole(self) -> Iterator[bool]:
        """While it lasts, no page of the segment goes. Yields whether all are there, so that ``bytes`` may be read
        anywhere: a late reader must not bring back pages that were given to the system."""
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

    def leave(self) -> None:
        """Close, once nobody views or uses it any more."""
        self._leaving = True
        if self._idle:
            self._close()

    @property
    def abandoned(self) -> bool:
        """True if nobody views or uses it and its file is gone."""
        return self._idle and self.gone

    @property
    def _idle(self) -> bool:
        return not self._pins and not self._users

    @property
    def gone(self) -> bool:
        """Whether its file is."""
        return self.fd < 0 or os.fstat(self.fd).st_nlink == 0

    def _unpin(self, ref: weakref.ref[Any]) -> None:
        if os.getpid() != self._pid:
            return  # a forked child shares the lock on the file, which protects its parent's views
        with self._lock:
            _, start = self._pins.pop(id(ref))
            self._starts[start] -= 1
            if not self._starts[start]:
                del self._starts[start]
                unlock(self.fd, start, start + 1)
            if self._leaving and self._idle:
                self._close()

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BlockHold:
    """Locks on blocks of a segment, by a descriptor of its own, and the mapping that they are read through: they can be
    read until it is closed, also when the segment's writer has left and the file is gone."""

    def __init__(self, mapped: MappedSegment, starts: Sequence[int]) -> None:
        self._fd = -1
        self._mapped: MappedSegment | None = None
        self._fd = os.open(f"/proc/self/fd/{mapped.fd}", os.O_RDONLY)
        mapped.enter()
        self._mapped = mapped
        if try_lock(self._fd, min(starts), max(starts) + 1, exclusive=False):
            return
        for start in starts:  # a writer takes back something that lies between them this moment
            if not try_lock(self._fd, start, start + 1, exclusive=False):
                raise LeaseLost(USED_AGAIN)

    def close(self) -> None:
        """Let go. In a forked child too: its parent's descriptor keeps the locks."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.exit()

    def __del__(self) -> None:
        self.close()
