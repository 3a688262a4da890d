"""A segment: a file of shared memory, mapped once by its writer, and what a block in it begins with.

A block is bytes ``start`` to ``start + n`` of a segment. Its first 16 bytes are the arena's: a magic number and
the block's serial, which no other block of any arena has. Where the serial is another one, the block is gone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import MemoryFull, ServerLost
from .free_space import free_bytes
from .locks import COPYING, try_lock, unlock

ALIGN = 64
HEADER_BYTES = 16
PAGE = mmap.PAGESIZE
MAGIC = int.from_bytes(b"asyncflw", "little")
HEADER = struct.Struct("<qq")
Sizes: TypeAlias = npt.NDArray[np.int64]
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_POPULATE_WRITE = 23  # of madvise; Python has no name for it


def find_blocks(path: Path, starts: Sizes, serials: Sizes, sizes: Sizes) -> npt.NDArray[np.bool_]:
    """Which blocks a segment's file still has. A file that is not there has none."""
    there = np.zeros(len(starts), np.bool_)
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            for number, start in enumerate(starts.tolist()):  # read, not mapped: a hole must not become a page
                if start + int(sizes[number]) <= size:
                    there[number] = os.pread(fd, HEADER.size, start) == HEADER.pack(MAGIC, int(serials[number]))
        finally:
            os.close(fd)
    return there


def sync_directory(path: Path) -> None:
    """What was made or renamed in it stays, also when the host dies."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Segment:
    """A file of ``size`` bytes. Pages are *there* (posix_fallocate, touched) or not; blocks lie in those that are.
    Raises MemoryFull, ServerLost."""

    def __init__(self, path: Path, number: int, size: int, filled: int) -> None:
        self.path, self.name, self.number, self.size = path, path.name, number, size
        self.missing = size
        self.named = False  # on disk, so that it would be found there
        self.lost = False  # its file was seen to be gone: no block is cut from it any more
        try:
            self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except FileNotFoundError:
            raise ServerLost(f"{path.parent} is gone: its run has ended, or somebody removed it") from None
        except OSError as error:
            raise self._no_room(error, filled) from None
        try:
            self._check_room(filled)
            self._there = bytearray(size // PAGE)
            os.ftruncate(self.fd, size)
            self.map = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
            self.fill(0, filled)
        except BaseException as error:
            os.close(self.fd)
            path.unlink(missing_ok=True)
            raise self._no_room(error, filled) from None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)

    @property
    def held(self) -> int:
        """Bytes of its pages that are there."""
        return self.size - self.missing

    @property
    def gone(self) -> bool:
        """True if its file was removed by somebody else: no reader will find what is written here."""
        return os.fstat(self.fd).st_nlink == 0

    def lacks(self, start: int, stop: int) -> int:
        """Bytes of the pages below a range that are not there."""
        return self._there.count(0, start // PAGE, -(-stop // PAGE)) * PAGE if self.missing else 0

    def fill(self, start: int, stop: int) -> None:
        """Get the pages below a range. A full file system is an error here, not a SIGBUS later. Raises MemoryFull."""
        low, high = start // PAGE, -(-stop // PAGE)
        lacking = self.lacks(start, stop)
        if not lacking:
            return
        try:
            self._check_room(lacking)
            os.posix_fallocate(self.fd, low * PAGE, (high - low) * PAGE)
        except OSError as error:
            raise self._no_room(error, lacking) from None
        try:
            self.map.madvise(_POPULATE_WRITE, low * PAGE, (high - low) * PAGE)
        except (OSError, ValueError):  # a kernel before 5.14: touch what nobody has written yet
            pages = np.frombuffer(self._there, np.uint8)[low:high]
            np.frombuffer(self.map, np.uint8)[(low + np.flatnonzero(pages == 0)) * PAGE] = 0
        self._there[low:high] = b"\1" * (high - low)
        self.missing -= lacking

    def _check_room(self, nbytes: int) -> None:
        """Raises OSError. To find out by filling it up would starve all others."""
        if free_bytes(self.path.parent) < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def punch(self, start: int, stop: int, most: int) -> None:
        """Give pages wholly in a free range back to the system, the last first, at least ``most`` bytes if there
        are so many. Does nothing while somebody copies out of the segment."""
        low, high = -(-start // PAGE), stop // PAGE
        there = self._there.count(1, low, high)
        if not there:
            return
        if there * PAGE > most:
            low = high - int(np.flatnonzero(np.frombuffer(self._there, np.uint8)[low:high][::-1])[most // PAGE]) - 1
        if not try_lock(self.fd, COPYING, COPYING + 1, exclusive=True):
            return
        try:
            with contextlib.suppress(OSError):  # a file system that cannot
                self.map.madvise(mmap.MADV_REMOVE, low * PAGE, (high - low) * PAGE)
                self.missing += self._there.count(1, low, high) * PAGE
                self._there[low:high] = bytes(high - low)
        finally:
            unlock(self.fd, COPYING, COPYING + 1)

    def head(self, start: int, serial: int) -> None:
        """Begin a block."""
        HEADER.pack_into(self.map, start, MAGIC, serial)

    def behead(self, starts: list[int]) -> None:
        """The blocks that begin at ``starts`` are gone: who comes late finds no serial."""
        if len(starts) == 1:
            HEADER.pack_into(self.map, starts[0], 0, 0)
        else:
            self.bytes.view(np.int64)[np.array(starts) // 8 + 1] = 0

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self.fd)
        self.bytes = self.bytes[:0].copy()
        with contextlib.suppress(BufferError):  # blocks still in somebody's hand keep the mapping until they go
            self.map.close()

    def _no_room(self, error: BaseException, nbytes: int) -> BaseException:
        if isinstance(error, OSError) and error.errno in _NO_ROOM and not isinstance(error, MemoryFull):
            return MemoryFull(
                f"no room for {nbytes} more bytes in {self.path.parent}: {os.strerror(error.errno or 0)}. Free"
                " space there, or enlarge it (a container: --shm-size)"
            )
        return error
