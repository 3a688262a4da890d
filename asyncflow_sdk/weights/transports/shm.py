"""VersionMemory: host memory of a sender, for the versions still kept and the one being written.

    room = memory.room(nbytes); room.memory[:] = ...; room.trim(used)    # chunk after chunk
    places = memory.seal(version)                                        # the rooms become that version
    views = memory.chunks(version)                                       # read-only; valid while they are held
    memory.keep([version])                                               # the memory of others is reused

A block is reused as it is for a chunk of the same size, without page faults: successive versions of one model always
find theirs. A version that is still read keeps its memory until its readers end; nothing waits for them.

Transport ``shm``: shared memory on one host. Chunks lie in the run's directory, and receivers map them, copy-on-write.
Versions outlive the sender; the next sender of the same rank adopts the kept ones and removes the rest.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, DeadlineExceeded, DigestMismatch, LeaseLost, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, FilePlace, Host, Room, WeightReceiver, WeightSender, WeightTransport
from ...memory import Allocation, Arena, Mapper, PrivateMaps, SharedDirectory
from ...types import Manifest

HEADER_BYTES = 64
SEGMENT_BYTES = 1 << 20
_NAME = re.compile(r"w[\w.-]{1,100}", re.ASCII)  # no other file of the directory, and none outside it


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


class ShmTransport(WeightTransport):
    """Both ends, by the name ``shm``."""

    def sender(self, host: Host) -> ShmSender:
        """Return the sending end. Raises ConfigError on another host."""
        return ShmSender(_directory(host), host.name, rank=host.rank)

    def receiver(self, host: Host) -> ShmReceiver:
        """Return the receiving end. Raises ConfigError on another host."""
        return ShmReceiver(_directory(host))


def _directory(host: Host) -> Path:
    if host.directory is None:
        raise ConfigError(
            "transport 'shm' goes through the run's shared memory, which is not in sight of this process: it"
            " works on the server's host alone; use 'tcp' or 'file'"
        )
    return host.directory


class ShmSender(WeightSender):
    """Writes versions to files of ``directory``, named by "w", rank, ``name`` and a number."""

    outlives: ClassVar[bool] = True

    def __init__(self, directory: Path, name: str, *, rank: int = 0) -> None:
        self._directory, self._family, self._mine = directory, f"w{rank}.", f"w{rank}.{name}-"
        self._memory = VersionMemory(directory, self._mine)
        self._adopted: dict[int, set[str]] = {}

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        """See ``WeightSender.adopt``."""
        for manifest, where in kept:
            with contextlib.suppress(VersionGone):
                self._adopted[manifest.version] = {place.segment for place in _decode_places(manifest, where)}
        self._sweep()

    def room(self, nbytes: int) -> SharedRoom:
        """See ``WeightSender.room``."""
        return self._memory.room(nbytes)

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """See ``WeightSender.prepare``."""
        return self._memory.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        return msgspec.msgpack.encode(self._memory.seal(manifest.version))

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._memory.abandon()

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._memory.keep(versions)
        gone = [version for version in self._adopted if version not in versions]
        if gone:
            for version in gone:
                del self._adopted[version]
            self._sweep()

    @property
    def nbytes(self) -> int:
        """Return the bytes of its own and of adopted versions."""
        adopted = {name for segments in self._adopted.values() for name in segments}
        return self._memory.nbytes + sum(_disk_bytes(self._directory / name) for name in adopted)

    def close(self) -> None:
        """See ``WeightSender.close``."""
        self._memory.close()

    def _sweep(self) -> None:
        """Remove unused files of earlier senders of this rank. Existing mappings stay valid."""
        kept = {name for segments in self._adopted.values() for name in segments}
        for path in self._directory.glob(f"{self._family}*"):
            if path.name not in kept and not path.name.startswith(self._mine):
                path.unlink(missing_ok=True)


class ShmReceiver(WeightReceiver):
    """Maps versions that a sender on this host wrote to ``directory``. ``interrupted``: the event that ends a fetch,
    if another receiver owns it."""

    def __init__(self, directory: Path, interrupted: threading.Event | None = None) -> None:
        self.directory = directory
        self._mapper, self._maps = Mapper(directory), PrivateMaps()
        self._interrupted, self._owns_event = interrupted or threading.Event(), interrupted is None

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        try:
            return self._fetch(manifest, _decode_places(manifest, where), time.monotonic() + timeout_s)
        finally:
            if self._owns_event:
                self._interrupted.clear()

    def interrupt(self) -> None:
        """See ``WeightReceiver.interrupt``."""
        self._interrupted.set()

    def _fetch(self, manifest: Manifest, places: Sequence[ChunkPlace], until: float) -> Fetched:
        self._maps.prune()
        if manifest.digested:  # digests detect pages written through a mapping that is used again
            with contextlib.suppress(DigestMismatch):
                return self._verify(manifest, self._map(manifest, places), places, until)
        self._maps.close()  # earlier versions give their mappings, with what engines wrote, to no later one
        self._maps = PrivateMaps()
        return self._verify(manifest, self._map(manifest, places), places, until)

    def _verify(
        self, manifest: Manifest, chunks: Sequence[Bytes], places: Sequence[ChunkPlace], until: float
    ) -> Fetched:
        what = f"version {manifest.version} in {self.directory}"
        for bucket in manifest.buckets():
            if self._interrupted.is_set():
                raise WireError(f"the fetch of {what} was interrupted: it is wanted no more")
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{what} was not mapped and verified in time")
            manifest.check(bucket, memoryview(chunks[bucket.chunk][bucket.start : bucket.stop]))  # type: ignore[arg-type]
        files = [FilePlace(str(self.directory / place.segment), place.start + HEADER_BYTES) for place in places]
        return Fetched(manifest, chunks, encoding="mapped", places=files)

    def _map(self, manifest: Manifest, places: Sequence[ChunkPlace]) -> list[Bytes]:
        try:
            return [self._mapper.private_view(*place, skip=HEADER_BYTES, maps=self._maps) for place in places]
        except LeaseLost as error:
            raise VersionGone(f"version {manifest.version} is no longer kept ({error}); take the newest") from None

    def close(self) -> None:
        """See ``WeightReceiver.close``."""
        self._maps.close()
        self._mapper.close()


def _decode_places(manifest: Manifest, where: bytes) -> list[ChunkPlace]:
    """Decode and validate the places of a version's chunks. Raises VersionGone."""
    try:
        places = msgspec.msgpack.decode(where, type=list[ChunkPlace])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise VersionGone(f"version {manifest.version}: its place cannot be decoded: {error}") from None
    sizes = [chunk.nbytes + HEADER_BYTES for chunk in manifest.chunks]
    known = all(_NAME.fullmatch(place.segment) and 0 <= place.start < 1 << 62 for place in places)
    if [place.nbytes for place in places] != sizes or not known:
        raise VersionGone(f"version {manifest.version}: its place does not fit its {len(sizes)} chunks")
    return places


def _disk_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0
