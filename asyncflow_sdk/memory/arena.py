"""Arena: one writer's segments. Blocks are cut from the current segment; a segment whose blocks are all free
is used again, without new page faults, once no reader holds a view of it.

    block = arena.allocate(nbytes); block.memory[:] = ...     # writer
    view = mapper.view(block.segment, block.generation, block.start, block.stop)    # readers, any process

Readers hold a shared lock (flock) on a segment while views of it live; the kernel drops it when they die.
The writer takes the exclusive lock for the moment in which it raises the generation: without it, no reuse.
A reader that comes late finds another generation and not somebody else's data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AsyncFlowError, MemoryFull, ServerLost

HEADER_BYTES = 64
ALIGN = 64
SEGMENT_BYTES = 8 << 20
MAGIC = b"asyncfl1"
_GENERATION_AT = 8


@dataclass(frozen=True)
class Allocation:
    """Bytes ``start`` to ``stop`` of a segment, writable through ``memory`` (uint8) until announced."""

    segment: str
    generation: int
    start: int
    stop: int
    memory: npt.NDArray[np.uint8]


class _Segment:
    """A file, locked in memory by posix_fallocate, mapped once."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.generation, self.used, self.blocks = 0, HEADER_BYTES, 0
        self.fd = -1
        try:
            self.fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.posix_fallocate(self.fd, 0, size)  # a full file system is an error here, not a SIGBUS later
            self.map = mmap.mmap(self.fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            if self.fd >= 0:
                os.close(self.fd)
                path.unlink(missing_ok=True)
            if error.errno == errno.ENOENT:
                raise ServerLost(f"{path.parent} is gone: the run whose segments it held has ended") from None
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
                raise MemoryFull(
                    f"no room for a segment of {size} bytes in {path.parent}: {os.strerror(error.errno)}. Free"
                    " space there, or enlarge it (a container: --shm-size)"
                ) from None
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)
        self.map[: len(MAGIC)] = MAGIC
        self.renew()

    def renew(self) -> bool:
        """Start over with a new generation, if no reader holds a view. Returns whether it did."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self.generation += 1
        struct.pack_into("<Q", self.map, _GENERATION_AT, self.generation)
        self.used = HEADER_BYTES
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        return True

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        os.close(self.fd)
        self.bytes = self.bytes[:0].copy()
        with contextlib.suppress(BufferError):  # blocks still in somebody's hand keep the mapping until they go
            self.map.close()


class Arena:
    """The segments one session writes. Thread-safe. Files are named ``prefix`` and a number, never reused.
    Refuses to work in a child after a bare fork, which would write into what its parent writes."""

    def __init__(self, directory: Path, prefix: str, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory, self._prefix, self._segment_bytes = directory, prefix, segment_bytes
        self._segments: dict[str, _Segment] = {}
        self._current: _Segment | None = None
        self._made = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all segments held."""
        with self._lock:
            return sum(segment.size for segment in self._segments.values())

    def allocate(self, nbytes: int) -> Allocation:
        """Room for a block, aligned to 64 bytes. Raises MemoryFull."""
        if os.getpid() != self._pid:
            raise AsyncFlowError(
                "shared memory cannot be written in a child made by fork(); connect again in the child"
            )
        with self._lock:
            segment = self._with_room(nbytes)
            start = segment.used
            segment.used += -(-nbytes // ALIGN) * ALIGN
            segment.blocks += 1
            stop = start + nbytes
            return Allocation(segment.path.name, segment.generation, start, stop, segment.bytes[start:stop])

    def free(self, segment: str, generation: int, blocks: int = 1) -> None:
        """Blocks are no longer needed by anyone who could still ask for them. Views of them stay valid."""
        with self._lock:
            found = self._segments.get(segment)
            if found is not None and found.generation == generation:
                found.blocks -= blocks
                assert found.blocks >= 0, "a block is freed once"

    def close(self, *, unlink: bool) -> None:
        """Stop writing. ``unlink``: remove the files too; else whoever owns the directory does."""
        with self._lock:
            for segment in self._segments.values():
                segment.unlink() if unlink else segment.close()
            self._segments.clear()
            self._current = None

    def _with_room(self, nbytes: int) -> _Segment:
        current = self._current
        if current is not None:
            if not current.blocks and current.used > HEADER_BYTES:
                current.renew()
            if current.size - current.used >= nbytes:
                return current
        idle = sorted((s for s in self._segments.values() if not s.blocks), key=lambda s: s.size)
        for segment in idle:
            if segment is not current and segment.size - HEADER_BYTES >= nbytes and segment.renew():
                self._current = segment
                return segment
        for segment in idle:  # one that was made for a larger block, and is too small now, would wait for ever
            if self._segment_bytes < segment.size < nbytes + HEADER_BYTES:
                self._remove(segment)
        self._current = self._make(
            max(self._segment_bytes, -(-(nbytes + HEADER_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE)
        )
        return self._current

    def _make(self, size: int) -> _Segment:
        self._made += 1
        path = self._directory / f"{self._prefix}{self._made}"
        try:
            segment = _Segment(path, size)
        except MemoryFull:
            idle = [s for s in self._segments.values() if not s.blocks]
            if not idle:
                raise
            for each in idle:
                self._remove(each)
            segment = _Segment(path, size)
        self._segments[path.name] = segment
        return segment

    def _remove(self, segment: _Segment) -> None:
        """An idle segment goes. Views of it stay valid."""
        if segment is self._current:
            self._current = None
        del self._segments[segment.path.name]
        segment.unlink()


def generation_of(mapped: Any) -> int:
    """The generation in a segment's header."""
    return int(struct.unpack_from("<Q", mapped, _GENERATION_AT)[0])
