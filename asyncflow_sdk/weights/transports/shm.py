"""Transport ``shm``: shared memory on one host. Chunks lie in the run's directory, and receivers map them.

A receiver's mapping is copy-on-write. The memory of a version is reused once the version is no longer kept and no
receiver maps it; otherwise the sender allocates other memory, and never waits. Versions outlive the sender; the next
sender of the same rank adopts the kept ones and removes the rest.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from ...errors import ConfigError, DeadlineExceeded, DigestMismatch, LeaseLost, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, FilePlace, Host, WeightReceiver, WeightSender, WeightTransport
from ...memory import Mapper, PrivateMaps
from ...types import Manifest
from .version_memory import HEADER_BYTES, ChunkPlace, SharedRoom, VersionMemory

_NAME = re.compile(r"w[\w.-]{1,100}", re.ASCII)  # no other file of the directory, and none outside it


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
