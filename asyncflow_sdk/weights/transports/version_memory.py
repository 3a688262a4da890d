"""VersionMemory: host memory of a sender, for the versions still kept and the one being written.

    room = memory.room(nbytes); room.memory[:] = ...; room.trim(used)    # chunk after chunk
    places = memory.seal(version)                                        # the rooms become that version
    views = memory.chunks(version)                                       # read-only; valid while they are held
    memory.keep([version])                                               # the memory of others is reused

A block is reused as it is for a chunk of the same size, without page faults: successive versions of one model always
find theirs. A version that is still read keeps its memory until its readers end; nothing waits for them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost, VersionGone
from ...interfaces.weights import Bytes, Room
from ...memory import Allocation, Arena, Mapper, SharedDirectory

HEADER_BYTES = 64
SEGMENT_BYTES = 1 << 20


class ChunkPlace(NamedTuple):
    """A block of the arena: ``nbytes`` from ``start`` of a segment. The chunk begins HEADER_BYTES after its start."""

    segment: str
    start: int
    serial: int
    nbytes: int


class SharedRoom(Room):
    """Room for a chunk in shared memory."""

    memory: npt.NDArray[np.uint8]

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.block: Allocation = arena.allocate(HEADER_BYTES + nbytes)
        self.memory = self.block.memory[HEADER_BYTES:]

    def trim(self, nbytes: int) -> None:
        """Keep only the first ``nbytes`` bytes."""
        self._arena.trim(self.block, HEADER_BYTES + nbytes)
        self.memory = self.block.memory[HEADER_BYTES:]

    @property
    def place(self) -> ChunkPlace:
        """Return the place of the chunk."""
        return ChunkPlace(self.block.segment, self.block.start, self.block.serial, self.block.nbytes)


class VersionMemory:
    """Memory in files of ``directory`` with names of ``prefix`` and a number. Thread-safe. ``own``: the directory, if
    it ends with the memory."""

    def __init__(self, directory: Path, prefix: str, own: SharedDirectory | None = None) -> None:
        self.directory, self._own = directory, own
        self._arena = Arena(directory, prefix, segment_bytes=SEGMENT_BYTES)
        self._mapper = Mapper(directory)
        self._writing: list[SharedRoom] = []
        self._sent: int | None = None
        self._versions: dict[int, list[SharedRoom]] = {}
        self._idle: list[SharedRoom] = []  # free; their serials are new
        self._still_read: list[SharedRoom] = []  # of dropped versions that readers still hold
        self._lock = threading.Lock()

    @classmethod
    def private(cls, name: str, base: Path | None = None) -> VersionMemory:
        """Return memory in a new directory, which ``close`` removes; so does a later process if
        this one was killed. ``base``: the parent; by default /dev/shm, or a disk if it is small."""
        own = SharedDirectory(base)
        return cls(own.path, f"w{name}-", own)

    @property
    def nbytes(self) -> int:
        """Return the bytes held: kept versions, the one being written, and those still read."""
        return self._arena.nbytes

    @property
    def versions(self) -> list[int]:
        """Return the versions that ``abandon`` keeps, oldest first."""
        return [version for version in self._versions if version != self._sent]

    def room(self, nbytes: int) -> SharedRoom:
        """Return room for the next chunk. Raises MemoryFull."""
        with self._lock:
            self._sent = None
            self._collect_unread()
            room = self._idle_room(nbytes)
            if room is None:
                if all(len(room.memory) != nbytes for room in self._still_read):  # a model of other sizes
                    self._free(self._idle)
                self._keep_directory()
                room = SharedRoom(self._arena, nbytes)
            self._writing.append(room)
        return room

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """Allocate memory for such chunks, one at each ``next``. Raises MemoryFull."""
        with self._lock:
            self._keep_directory()
            there = Counter(len(room.memory) for room in (*self._idle, *self._still_read))
        for size, count in (Counter(sizes) - there).items():
            for _ in range(count):
                room = SharedRoom(self._arena, size)
                with self._lock:
                    self._idle.append(room)
                yield

    def seal(self, version: int) -> list[ChunkPlace]:
        """Make the rooms since the last call the chunks of ``version``. Return their places."""
        with self._lock:
            rooms, self._writing = self._writing, []
            self._retire(self._versions.pop(version, []))
            if self._idle:  # of other sizes, or spare since a reader ended
                self._free(self._idle)
                self._arena.shrink()
            self._versions[version], self._sent = rooms, version
            return [room.place for room in rooms]

    def abandon(self) -> None:
        """Free the rooms since the last ``seal``, or an unkept newest version if there are none."""
        with self._lock:
            rooms, self._writing = self._writing, []
            if not rooms and self._sent is not None:
                rooms = self._versions.pop(self._sent, [])
            self._sent = None
            self._retire(rooms)

    def chunks(self, version: int) -> list[Bytes]:
        """Return the chunks as read-only uint8 arrays. Their memory is not reused while they are
        held. Raises VersionGone."""
        with self._lock:
            rooms = self._versions.get(version)
            places = None if rooms is None else [room.place for room in rooms]
        try:
            if places is None:
                raise LeaseLost("its memory is free")
            return [self._mapper.view(*place)[HEADER_BYTES:] for place in places]
        except LeaseLost as error:
            raise VersionGone(f"version {version} is no longer kept ({error}); take the newest") from None

    def keep(self, versions: Sequence[int]) -> None:
        """Free the memory of all other versions. Never waits."""
        with self._lock:
            for version in [version for version in self._versions if version not in versions]:
                self._retire(self._versions.pop(version))
            self._sent = None

    def free(self) -> None:
        """Free all memory without readers; the rest at a later call."""
        self.keep(())
        with self._lock:
            self._collect_unread()
            self._free(self._idle)
            self._arena.shrink()

    def close(self) -> None:
        """Stop writing. Views stay valid, and files in a directory of others remain. Idempotent."""
        with self._lock:
            for rooms in (self._writing, self._idle, self._still_read):
                rooms.clear()
            self._versions.clear()
        self._mapper.close()
        self._arena.close(unlink=False)
        if self._own is not None:
            self._own.close()

    # ---- with the lock held

    def _keep_directory(self) -> None:
        if self._own is not None:  # else its server does
            self._own.keep()

    def _retire(self, rooms: Sequence[SharedRoom]) -> None:
        """Free rooms, or note them as still read."""
        for room in rooms:
            (self._idle if self._arena.renew(room.block) else self._still_read).append(room)

    def _idle_room(self, nbytes: int) -> SharedRoom | None:
        """Return a room to reuse. A room without its file is given up."""
        while (room := next((room for room in self._idle if len(room.memory) == nbytes), None)) is not None:
            self._idle.remove(room)
            if not self._arena.is_lost(room.block):
                break
            self._free([room])
        return room

    def _collect_unread(self) -> None:
        held, self._still_read = self._still_read, []
        self._retire(held)

    def _free(self, rooms: list[SharedRoom]) -> None:
        self._arena.free([room.block.serial for room in rooms])
        rooms.clear()
