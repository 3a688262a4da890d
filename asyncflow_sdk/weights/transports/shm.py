"""Weights through shared memory on one host: chunks lie in the run's directory, receivers map them.

A receiver's mapping is its own (copy-on-write) and holds its version: the memory is used again only when the version is
kept no longer and no receiver holds it, else the sender takes other memory: receivers never hold it up. What was
sent outlives the sender; the next one of the same rank takes over what is kept and removes the rest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from ...errors import ConfigError, DigestMismatch, LeaseLost, VersionGone
from ...interfaces.weights import Bytes, Fetched, FilePlace, Host, WeightReceiver, WeightSender, WeightTransport
from ...memory import Mapper, PrivateMaps
from ...types import Manifest
from .version_memory import HEAD_BYTES, ChunkPlace, SharedRoom, VersionMemory

_NAME = re.compile(r"w[\w.-]{1,100}", re.ASCII)  # nothing else in the directory, and nothing outside it


class ShmTransport(WeightTransport):
    """Both ends, by the name ``shm``."""

    def sender(self, host: Host) -> ShmSender:
        return ShmSender(_directory(host), host.name, rank=host.rank)

    def receiver(self, host: Host) -> ShmReceiver:
        return ShmReceiver(_directory(host))


def _directory(host: Host) -> Path:
    if host.directory is None:
        raise ConfigError(
            "transport 'shm' goes through the run's shared memory, which is not in sight of this process: it works on the"
            " server's host alone; use 'tcp' or 'file'"
        )
    return host.directory


class ShmSender(WeightSender):
    """Writes versions into files of ``directory`` that are named ``w``, its rank, ``name`` and a number."""

    outlives: ClassVar[bool] = True

    def __init__(self, directory: Path, name: str, *, rank: int = 0) -> None:
        self._directory, self._family, self._mine = directory, f"w{rank}.", f"w{rank}.{name}-"
        self._staging = VersionMemory(directory, self._mine)
        self._adopted: dict[int, set[str]] = {}

    def adopt(self, kept: Sequence[tuple[Manifest, bytes]]) -> None:
        for manifest, where in kept:
            with contextlib.suppress(VersionGone):
                self._adopted[manifest.version] = {place.segment for place in _places(manifest, where)}
        self._sweep()

    def room(self, nbytes: int) -> SharedRoom:
        return self._staging.room(nbytes)

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        return self._staging.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        return msgspec.msgpack.encode(self._staging.seal(manifest.version))

    def abandon(self) -> None:
        self._staging.abandon()

    def keep(self, versions: Sequence[int]) -> None:
        self._staging.keep(versions)
        gone = [version for version in self._adopted if version not in versions]
        if gone:
            for version in gone:
                del self._adopted[version]
            self._sweep()

    @property
    def nbytes(self) -> int:
        """Its own, and what it took over."""
        adopted = {name for segments in self._adopted.values() for name in segments}
        return self._staging.nbytes + sum(_held(self._directory / name) for name in adopted)

    def close(self) -> None:
        self._staging.close()

    def _sweep(self) -> None:
        """Remove what earlier senders of this rank left and nobody may ask for. Who has it mapped keeps it."""
        kept = {name for segments in self._adopted.values() for name in segments}
        for path in self._directory.glob(f"{self._family}*"):
            if path.name not in kept and not path.name.startswith(self._mine):
                path.unlink(missing_ok=True)


class ShmReceiver(WeightReceiver):
    """Maps versions that a sender on this host wrote into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mapper, self._maps = Mapper(directory), PrivateMaps()

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        places = _places(manifest, where)
        self._maps.prune()
        if manifest.digested:  # digests tell, too, what an engine wrote into; looking for it takes a tenth of a copy
            chunks = self._mapped(manifest, places, look=False)
            try:
                return self._verified(manifest, chunks, places)
            except DigestMismatch:
                del chunks  # none of them is used again without a look from here on
        return self._verified(manifest, self._mapped(manifest, places, look=True), places)

    def _verified(self, manifest: Manifest, chunks: Sequence[Bytes], places: Sequence[ChunkPlace]) -> Fetched:
        for bucket in manifest.buckets():
            manifest.check(bucket, memoryview(chunks[bucket.chunk][bucket.start : bucket.stop]))  # type: ignore[arg-type]
        files = [FilePlace(str(self._directory / place.segment), place.start + HEAD_BYTES) for place in places]
        return Fetched(manifest, chunks, encoding="mapped", places=files)

    def _mapped(self, manifest: Manifest, places: Sequence[ChunkPlace], *, look: bool) -> list[Bytes]:
        try:
            return [
                self._mapper.private_view(*place, skip=HEAD_BYTES, maps=self._maps, unwritten=look)
                for place in places
            ]
        except LeaseLost as error:
            raise VersionGone(f"version {manifest.version} is no longer kept ({error}); take the newest") from None

    def close(self) -> None:
        self._maps.close()
        self._mapper.close()


def _places(manifest: Manifest, where: bytes) -> list[ChunkPlace]:
    """Raises VersionGone for what no sender of such a version ever said."""
    try:
        places = msgspec.msgpack.decode(where, type=list[ChunkPlace])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise VersionGone(f"version {manifest.version}: where it lies cannot be read: {error}") from None
    sizes = [chunk.nbytes + HEAD_BYTES for chunk in manifest.chunks]
    known = all(_NAME.fullmatch(place.segment) and 0 <= place.start < 1 << 62 for place in places)
    if [place.nbytes for place in places] != sizes or not known:
        raise VersionGone(f"version {manifest.version}: where it lies does not fit its {len(sizes)} chunks")
    return places


def _held(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_blocks * 512
    return 0
