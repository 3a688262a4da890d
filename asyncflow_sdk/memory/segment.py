"""Segment: a shared-memory file, mapped once by its writer; the headers of its blocks, and its locks.

A block is bytes ``start`` to ``start + n`` of a segment. Its header of 16 bytes holds a magic number and the block's
serial, unique among all arenas. A header with another serial means that the block was freed.

A reader locks the first byte of each block that it has views of. ``COPYING`` is a byte beyond the end of every file.
A reader locks it to copy from a segment without a view, and the writer to return pages of free ranges to the system:
reading such a page would allocate it again, and kill the reader if no memory is left. Closing the file ends its locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import MemoryFull, ServerLost

ALIGN = 64
HEADER_BYTES = 16
PAGE = mmap.PAGESIZE
MAGIC = int.from_bytes(b"asyncflw", "little")
HEADER = struct.Struct("<qq")
COPYING = 1 << 62
SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")
Sizes: TypeAlias = npt.NDArray[np.int64]
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)
_POPULATE_WRITE = 23  # madvise advice, unnamed in Python
_flock = struct.Struct("hhqqi4x").pack


def try_lock(fd: int, start: int, stop: int, *, exclusive: bool) -> bool:
    """Lock a byte range without waiting. Return False if another owner's lock conflicts."""
    try:
        fcntl.fcntl(
            fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK, 0, start, stop - start, 0)
        )
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int, start: int, stop: int) -> None:
    """Unlock bytes ``start`` to ``stop``."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, 0, start, stop - start, 0))


def free_memory() -> int:
    """Return the bytes, page cache included, that machine and container give before the kernel kills a process."""
    free = 1 << 62
    with contextlib.suppress(OSError):
        lines = (line.split() for line in MEMINFO.read_text().splitlines())
        free = next((int(line[1]) << 10 for line in lines if line[:1] == ["MemAvailable:"]), free)
    for limit, usage, stat, caches in (
        ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
         ("total_inactive_file", "total_active_file")),
    ):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):
            most, used = int((CGROUPS / limit).read_text()), int((CGROUPS / usage).read_text())
            lines = (line.split() for line in (CGROUPS / stat).read_text().splitlines())
            cached = sum(int(count) for name, count in lines if name in caches)
            return min(free, max(most - used + cached, 0))
    return free


def free_bytes(directory: Path) -> int:
    """Return the free bytes for files in a directory. Below /dev/shm, at most the free memory: beyond it, as in a
    container with a lower limit, the kernel kills a process instead of refusing."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    return min(free, free_memory()) if SHM in directory.parents else free


def block_header(serial: int) -> bytes:
    """Return the first bytes of a block."""
    return HEADER.pack(MAGIC, serial)


def find_blocks(path: Path, starts: Sizes, serials: Sizes, sizes: Sizes) -> npt.NDArray[np.bool_]:
    """Return a mask of the blocks still in a segment's file; all False without a file."""
    found = np.zeros(len(starts), np.bool_)
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for number, start in enumerate(starts.tolist()):  # pread, because mapping would allocate missing pages
            if start + int(sizes[number]) <= size:
                found[number] = os.pread(file.fileno(), HEADER.size, start) == block_header(int(serials[number]))
    return found


def sync_directory(path: Path) -> None:
    """Make new and renamed files of a directory survive a crash of the host."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Segment:
    """A file of ``size`` bytes with its first ``filled`` allocated. A page is *present* once allocated
    (posix_fallocate) and populated; blocks lie in present pages. ``missing``: bytes of other pages. Raises
    MemoryFull, and ServerLost if the directory cannot be used."""

    def __init__(self, path: Path, number: int, size: int, filled: int) -> None:
        self.path, self.name, self.number, self.size = path, path.name, number, size
        self.missing = size
        self._named = False  # True if its directory entry is synced to disk
        self.lost = False
        try:
            self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise self._failure(error, filled) from None
        try:
            self._check_room(filled)  # before a table of pages beyond all memory
            self._present = bytearray(size // PAGE)
            os.ftruncate(self.fd, size)
            self.map = mmap.mmap(self.fd, size, mmap.MAP_SHARED)
            self.fill(0, filled)
        except BaseException as error:
            os.close(self.fd)
            path.unlink(missing_ok=True)
            raise self._failure(error, filled) from None
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)

    @property
    def held(self) -> int:
        """Bytes of the present pages."""
        return self.size - self.missing

    @property
    def gone(self) -> bool:
        """True if its file was deleted: readers cannot find its blocks."""
        return os.fstat(self.fd).st_nlink == 0

    def lose(self) -> None:
        """Allocate no block in it from now on: its file was found deleted."""
        self.lost = True

    def keep_name(self, directory: Path) -> None:
        """Make its directory entry survive a crash of the host. Raises OSError."""
        if not self._named:
            sync_directory(directory)
            self._named = True

    def lacks(self, start: int, stop: int) -> int:
        """Return the bytes of missing pages in a range."""
        return self._present.count(0, start // PAGE, -(-stop // PAGE)) * PAGE if self.missing else 0

    def fill(self, start: int, stop: int) -> None:
        """Allocate missing pages now: on a full file system a write is a SIGBUS. Raises MemoryFull, ServerLost."""
        low, high = start // PAGE, -(-stop // PAGE)
        lacking = self.lacks(start, stop)
        try:
            self._check_room(lacking)
            os.posix_fallocate(self.fd, low * PAGE, (high - low) * PAGE)
        except OSError as error:
            raise self._failure(error, lacking) from None
        try:
            self.map.madvise(_POPULATE_WRITE, low * PAGE, (high - low) * PAGE)
        except (OSError, ValueError):  # a kernel before 5.14: touch the missing pages
            pages = np.frombuffer(self._present, np.uint8)[low:high]
            np.frombuffer(self.map, np.uint8)[(low + np.flatnonzero(pages == 0)) * PAGE] = 0
        self._present[low:high] = b"\1" * (high - low)
        self.missing -= lacking

    def _check_room(self, nbytes: int) -> None:
        """Raises OSError. Allocating until it fails would starve other processes."""
        if free_bytes(self.path.parent) < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def punch(self, start: int, stop: int, most: int) -> int:
        """Return whole pages of a free range to the system, the last first, until ``most`` bytes are returned. Return
        their bytes: 0 while a reader copies from the segment."""
        low, high = -(-start // PAGE), stop // PAGE
        present = self._present.count(1, low, high)
        if present * PAGE > most:
            low = high - int(np.flatnonzero(np.frombuffer(self._present, np.uint8)[low:high][::-1])[most // PAGE]) - 1
            present = self._present.count(1, low, high)
        if not present or not try_lock(self.fd, COPYING, COPYING + 1, exclusive=True):
            return 0
        try:
            self.map.madvise(mmap.MADV_REMOVE, low * PAGE, (high - low) * PAGE)
            self.missing += present * PAGE
            self._present[low:high] = bytes(high - low)
        except OSError:  # not supported by the file system
            return 0
        finally:
            unlock(self.fd, COPYING, COPYING + 1)
        return present * PAGE

    def write_header(self, start: int, serial: int) -> None:
        """Begin a block."""
        HEADER.pack_into(self.map, start, MAGIC, serial)

    def clear_headers(self, starts: list[int], stop: int) -> bool:
        """End the adjacent blocks at ``starts``, up to ``stop``. Return False without change if one is held."""
        if not try_lock(self.fd, starts[0], stop, exclusive=True):
            return False
        if len(starts) == 1:
            HEADER.pack_into(self.map, starts[0], 0, 0)
        else:
            self.bytes.view(np.int64)[np.array(starts) // 8 + 1] = 0
        unlock(self.fd, starts[0], stop)
        return True

    def close(self, *, unlink: bool = False) -> None:
        """Close the file; ``unlink``: remove it, too. Existing blocks keep the mapping."""
        if unlink:
            self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.bytes = self.bytes[:0].copy()
        with contextlib.suppress(BufferError):  # blocks keep the mapping while referenced
            self.map.close()

    def _failure(self, error: BaseException, nbytes: int) -> BaseException:
        if not isinstance(error, OSError):
            return error
        why = os.strerror(error.errno or 0)
        if error.errno in _NO_ROOM:
            return MemoryFull(
                f"no room for {nbytes} more bytes in {self.path.parent}: {why}. Free space there, or enlarge it (a"
                " container: --shm-size)"
            )
        if error.errno == errno.ENOENT:
            return ServerLost(f"{self.path.parent} is gone: its run has ended, or the directory was deleted")
        return ServerLost(f"{self.path.parent} takes no file: {why}")
