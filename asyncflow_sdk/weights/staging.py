"""Staging: host memory of a sender, for the versions that may still be asked for and the one being written.

    room = staging.room(nbytes); room.memory[:] = ...; room.trim(used)   # chunk after chunk
    places = staging.seal(version)                                       # they are that version's now
    views = staging.chunks(version)                                      # read-only; valid for as long as they are held
    staging.keep([version])                                              # the memory of others is used again

Segments are used again version after version, without page faults; a version that somebody still reads keeps its
memory until they are done, and nobody waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import LeaseLost, VersionGone
from ..interfaces.weights import Bytes, Room
from ..memory import Allocation, Arena, Mapper, SharedDirectory

HEAD_BYTES = 64
SEGMENT_BYTES = 1 << 20


class Place(NamedTuple):
    """A block of the arena: ``nbytes`` from ``start`` of a segment. The chunk begins HEAD_BYTES after its start."""

    segment: str
    start: int
    serial: int
    nbytes: int


class StagingRoom(Room):
    """Room for a chunk in shared memory."""

    memory: npt.NDArray[np.uint8]

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._arena = arena
        self.block: Allocation = arena.allocate(HEAD_BYTES + nbytes)
        self.memory = self.block.memory[HEAD_BYTES:]

    def trim(self, nbytes: int) -> None:
        self._arena.trim(self.block, HEAD_BYTES + nbytes)
        self.memory = self.block.memory[HEAD_BYTES:]

    @property
    def place(self) -> Place:
        return Place(self.block.segment, self.block.start, self.block.serial, self.block.nbytes)


class Staging:
    """Memory in files of ``directory`` that are named ``prefix`` and a number. Thread-safe."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.directory = directory
        self._own: SharedDirectory | None = None
        self._arena = Arena(directory, prefix, segment_bytes=SEGMENT_BYTES)
        self._mapper = Mapper(directory)
        self._writing: list[StagingRoom] = []
        self._sent: int | None = None
        self._versions: dict[int, list[Place]] = {}
        self._lock = threading.Lock()

    @classmethod
    def private(cls, name: str) -> Staging:
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

    def room(self, nbytes: int) -> StagingRoom:
        """Room for the next chunk. Raises MemoryFull."""
        room = StagingRoom(self._arena, nbytes)
        with self._lock:
            self._sent = None
            self._writing.append(room)
        return room

    def seal(self, version: int) -> list[Place]:
        """The rooms given since the last one are the chunks of ``version``, in order."""
        with self._lock:
            places = [room.place for room in self._writing]
            self._writing.clear()
            before = self._versions.pop(version, [])
            self._versions[version], self._sent = places, version
        self._free(before)
        return places

    def abandon(self) -> None:
        """The rooms given since the last version are free again; if there are none, those of the newest version, which was
        sealed and never kept."""
        with self._lock:
            places = [room.place for room in self._writing]
            self._writing.clear()
            if not places and self._sent is not None:
                places = self._versions.pop(self._sent, [])
            self._sent = None
        self._free(places)

    def chunks(self, version: int) -> list[Bytes]:
        """uint8 (nbytes,) each, read-only; their memory is not used again while they are held. Raises VersionGone."""
        with self._lock:
            places = self._versions.get(version)
        try:
            if places is None:
                raise LeaseLost("its memory is free")
            return [self._mapper.view(*place)[HEAD_BYTES:] for place in places]
        except LeaseLost as error:
            raise VersionGone(f"version {version} is no longer kept ({error}); take the newest") from None

    def keep(self, versions: Sequence[int]) -> None:
        """The memory of all others is free. Never waits."""
        with self._lock:
            gone = [version for version in self._versions if version not in versions]
            places = [place for version in gone for place in self._versions.pop(version)]
            self._sent = None
        self._free(places)

    def close(self) -> None:
        """Stop writing. Views stay valid; the files stay where the directory is somebody else's. Idempotent."""
        with self._lock:
            self._writing.clear()
            self._versions.clear()
        self._mapper.close()
        self._arena.close(unlink=False)
        if self._own is not None:
            self._own.close()

    def _free(self, places: Sequence[Place]) -> None:
        self._arena.free([place.serial for place in places])
