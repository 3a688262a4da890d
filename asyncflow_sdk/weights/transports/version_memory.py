"""VersionMemory: host memory of a sender, for the versions that may still be asked for and the one being written.

    room = staging.room(nbytes); room.memory[:] = ...; room.trim(used)   # chunk after chunk
    places = staging.seal(version)                                       # they are that version's now
    views = staging.chunks(version)                                      # read-only; valid for as long as they are held
    staging.keep([version])                                              # the memory of others is used again

A block is used again as it is for a chunk of the same size, without page faults: versions of one model always find
theirs. A version that somebody still reads keeps its memory until they are done, and nobody waits for them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import LeaseLost, VersionGone
from ...interfaces.weights import Bytes, Room
from ...memory import Allocation, Arena, Mapper, SharedDirectory

HEAD_BYTES = 64
SEGMENT_BYTES = 1 << 20


class ChunkPlace(NamedTuple):
    """A block of the arena: ``nbytes`` from ``start`` of a segment. The chunk begins HEAD_BYTES after its start."""

    segment: str
    start: int
    serial: int
    nbytes: int


class SharedRoom(Room):
    """Room for a chunk in shared memory."""

    memory: npt.NDArray[np.uint8]

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.block: Allocation = arena.allocate(HEAD_BYTES + nbytes)
        self.memory = self.block.memory[HEAD_BYTES:]
        self.when_full: Callable[[ChunkPlace], None] | None = None

    def trim(self, nbytes: int) -> None:
        self._arena.trim(self.block, HEAD_BYTES + nbytes)
        self.memory = self.block.memory[HEAD_BYTES:]

    def full(self) -> None:
        if self.when_full is not None:
            self.when_full(self.place)

    @property
    def place(self) -> ChunkPlace:
        return ChunkPlace(self.block.segment, self.block.start, self.block.serial, self.block.nbytes)


class VersionMemory:
    """Memory in files of ``directory`` that are named ``prefix`` and a number. Thread-safe."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.directory = directory
        self._own: SharedDirectory | None = None
        self._arena = Arena(directory, prefix, segment_bytes=SEGMENT_BYTES)
        self._mapper = Mapper(directory)
        self._writing: list[SharedRoom] = []
        self._sent: int | None = None
        self._versions: dict[int, list[SharedRoom]] = {}
        self._idle: list[SharedRoom] = []  # nobody's: nobody knows their serials
        self._read: list[SharedRoom] = []  # of versions that are gone, but for those who hold them
        self._lock = threading.Lock()

    @classmethod
    def private(cls, name: str) -> VersionMemory:
        """In a directory of its own, which goes with ``close``, or after the process has died."""
        own = SharedDirectory()
        staging = cls(own.path, f"w{name}-")
        staging._own = own
        return staging

    @property
    def nbytes(self) -> int:
        """Bytes held: the versions kept, the one being written, and those that are still being read."""
        return self._arena.nbytes

    @property
    def versions(self) -> list[int]:
        """Those that are there, oldest first."""
        return list(self._versions)

    def room(self, nbytes: int) -> SharedRoom:
        """Room for the next chunk. Raises MemoryFull."""
        with self._lock:
            self._sent = None
            self._look_again()
            room = self._idle_room(nbytes)
            if room is None:
                if all(len(room.memory) != nbytes for room in self._read):  # another model than before
                    self._free(self._idle)
                room = SharedRoom(self._arena, nbytes)
            self._writing.append(room)
        return room

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """Get memory for a version of such chunks, step by step, as far as there is none yet. Raises MemoryFull."""
        with self._lock:
            there = Counter(len(room.memory) for room in (*self._idle, *self._read))
        for size, count in (Counter(sizes) - there).items():
            for _ in range(count):
                room = SharedRoom(self._arena, size)
                with self._lock:
                    self._idle.append(room)
                yield

    def seal(self, version: int) -> list[ChunkPlace]:
        """The rooms given since the last one are the chunks of ``version``, in order."""
        with self._lock:
            rooms, self._writing = self._writing, []
            self._retire(self._versions.pop(version, []))
            if self._idle:  # of another model, or more than are needed since a reader let go
                self._free(self._idle)
                self._arena.shrink()
            self._versions[version], self._sent = rooms, version
            return [room.place for room in rooms]

    def abandon(self) -> None:
        """The rooms given since the last version are free again; if there are none, those of the newest version, which was
        sealed and never kept."""
        with self._lock:
            rooms, self._writing = self._writing, []
            if not rooms and self._sent is not None:
                rooms = self._versions.pop(self._sent, [])
            self._sent = None
            self._retire(rooms)

    def chunks(self, version: int) -> list[Bytes]:
        """uint8 (nbytes,) each, read-only; their memory is not used again while they are held. Raises VersionGone."""
        with self._lock:
            rooms = self._versions.get(version)
            places = None if rooms is None else [room.place for room in rooms]
        try:
            if places is None:
                raise LeaseLost("its memory is free")
            return [self.view(place) for place in places]
        except LeaseLost as error:
            raise VersionGone(f"version {version} is no longer kept ({error}); take the newest") from None

    def view(self, place: ChunkPlace) -> Bytes:
        """The chunk there, as ``chunks`` gives it. Raises LeaseLost."""
        return self._mapper.view(*place)[HEAD_BYTES:]

    def keep(self, versions: Sequence[int]) -> None:
        """The memory of all others is free. Never waits."""
        with self._lock:
            for version in [version for version in self._versions if version not in versions]:
                self._retire(self._versions.pop(version))
            self._sent = None

    def close(self) -> None:
        """Stop writing. Views stay valid; the files stay where the directory is somebody else's. Idempotent."""
        with self._lock:
            for rooms in (self._writing, self._idle, self._read):
                rooms.clear()
            self._versions.clear()
        self._mapper.close()
        self._arena.close(unlink=False)
        if self._own is not None:
            self._own.close()

    # ---- with the lock held

    def _retire(self, rooms: Sequence[SharedRoom]) -> None:
        """Nobody may ask for them any more."""
        for room in rooms:
            (self._idle if self._arena.renew(room.block) else self._read).append(room)

    def _idle_room(self, nbytes: int) -> SharedRoom | None:
        """A room to be used again; one whose file somebody removed is given up."""
        while (room := next((room for room in self._idle if len(room.memory) == nbytes), None)) is not None:
            self._idle.remove(room)
            if not self._arena.is_lost(room.block):
                break
            self._free([room])
        return room

    def _look_again(self) -> None:
        held, self._read = self._read, []
        self._retire(held)

    def _free(self, rooms: list[SharedRoom]) -> None:
        self._arena.free([room.block.serial for room in rooms])
        rooms.clear()
