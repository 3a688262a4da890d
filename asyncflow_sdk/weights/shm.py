"""Weights through shared memory on one host: one copy into a segment that is used again version after version.

The sender keeps the newest versions it sent (``keep``); a segment is written again only when its version is
older than those and no receiver holds a view of it, else another segment is made: receivers never hold up
the sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import DigestMismatch, LeaseLost, VersionGone, WeightMismatch
from ..interfaces import WeightReceiver, WeightSender, WeightTransport, WeightUpdate
from ..memory import Allocation, Arena, Mapper
from ..types import Manifest, TensorInfo, carrier, dtype_name, from_torch, to_torch
from ..types.dtypes import is_torch
from ..types.manifest import BUCKET_BYTES, digest

ALIGN = 64
Array = np.ndarray[Any, Any]


class _Where(msgspec.Struct, frozen=True, array_like=True):
    """A block: a header of ALIGN bytes, then manifest.nbytes."""

    segment: str
    start: int
    serial: int


class ShmTransport(WeightTransport):
    """Both ends, by the name ``shm``."""

    def sender(self, directory: Path, name: str) -> ShmSender:
        return ShmSender(directory, f"w{name}-")

    def receiver(self, directory: Path) -> ShmReceiver:
        return ShmReceiver(directory)


class ShmSender(WeightSender):
    """Copies versions into segments of ``directory``, named ``prefix`` and a number."""

    def __init__(self, directory: Path, prefix: str, *, keep: int = 2, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._arena = Arena(directory, prefix, segment_bytes=1 << 20)
        self._kept: deque[tuple[int, Allocation]] = deque()  # oldest first
        self._keep = keep
        self._bucket_bytes = bucket_bytes

    @property
    def nbytes(self) -> int:
        """Shared memory held: at most (keep + 1) × model, and one more for each a slow receiver holds."""
        return self._arena.nbytes

    def send(self, version: int, weights: Iterable[tuple[str, Any]]) -> tuple[Manifest, bytes]:
        arrays = {}
        for name, tensor in weights:
            if name in arrays:
                raise WeightMismatch(f"version {version}: tensor {name!r} is sent twice")
            arrays[name] = _plain(tensor)
        if not arrays:
            raise WeightMismatch(f"version {version} has no tensors")
        tensors, nbytes = _layout(arrays)
        while len(self._kept) >= self._keep:
            self._free(self._kept.popleft()[1])
        space = self._arena.allocate(ALIGN + nbytes)
        try:
            digests = _copy(arrays, tensors, space.memory[ALIGN:], self._bucket_bytes)
        except BaseException:
            self._free(space)
            raise
        self._kept.append((version, space))
        manifest = Manifest(version, tensors, nbytes, self._bucket_bytes, digests)
        return manifest, msgspec.msgpack.encode(_Where(space.segment, space.start, space.serial))

    def withdraw(self, version: int) -> None:
        if self._kept and self._kept[-1][0] == version:
            self._free(self._kept.pop()[1])

    def close(self) -> None:
        self._arena.close(unlink=False)

    def _free(self, space: Allocation) -> None:
        self._arena.free([space.serial])


class ShmReceiver(WeightReceiver):
    """Maps versions that a sender on this host wrote into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._mapper = Mapper(directory)

    def fetch(self, manifest: Manifest, where: bytes) -> ShmUpdate:
        place = msgspec.msgpack.decode(where, type=_Where)
        block = place.segment, place.start, place.serial, ALIGN + manifest.nbytes
        try:
            shared = self._mapper.view(*block)
            _verify(manifest, shared[ALIGN:])
            own = self._mapper.private(*block, skip=ALIGN)
        except LeaseLost as error:
            raise VersionGone(f"version {manifest.version} is no longer kept ({error}); take the newest") from None
        return ShmUpdate(manifest, own)

    def close(self) -> None:
        self._mapper.close()


class ShmUpdate(WeightUpdate):
    """Views of a verified version; copy-on-write, so that an engine may work in place."""

    def __init__(self, manifest: Manifest, memory: Array) -> None:
        self.manifest = manifest
        self._memory: Array | None = memory

    def arrays(self) -> Iterator[tuple[str, Array]]:
        for tensor in self.manifest.tensors:
            if self._memory is None:
                raise VersionGone(f"version {self.version} was released")
            raw = self._memory[tensor.offset : tensor.offset + tensor.nbytes]
            yield tensor.name, raw.view(carrier(tensor.dtype)).reshape(tensor.shape)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, to_torch(array)) for name, array in self.arrays())

    def release(self) -> None:
        self._memory = None


def _plain(tensor: Any) -> Array:
    """Contiguous, in native byte order; a view where it is so already."""
    if is_torch(tensor):
        return from_torch(tensor)
    array = np.asarray(tensor, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _layout(arrays: dict[str, Array]) -> tuple[tuple[TensorInfo, ...], int]:
    tensors, end = [], 0
    for name, array in arrays.items():
        tensors.append(TensorInfo(name, dtype_name(array.dtype), array.shape, end))
        end += -(-array.nbytes // ALIGN) * ALIGN
    return tuple(tensors), end


def _copy(
    arrays: dict[str, Array], tensors: tuple[TensorInfo, ...], memory: Array, bucket_bytes: int
) -> tuple[bytes, ...]:
    """Copy tensor by tensor; digest each bucket as soon as it is full, while it is in the cache."""
    digests: list[bytes] = []
    view = memoryview(memory)  # type: ignore[arg-type]

    def digest_until(end: int) -> None:
        while (len(digests) + 1) * bucket_bytes <= end:
            start = len(digests) * bucket_bytes
            digests.append(digest(view[start : start + bucket_bytes]))

    for tensor in tensors:
        raw = arrays[tensor.name].reshape(-1).view(np.uint8)
        stop = tensor.offset + tensor.nbytes
        for start in range(tensor.offset, stop, bucket_bytes):
            piece = raw[start - tensor.offset : start - tensor.offset + bucket_bytes]
            memory[start : start + len(piece)] = piece
            digest_until(start + len(piece))
        memory[stop : stop + -stop % ALIGN] = 0  # what lies between tensors is part of the digest
        digest_until(stop + -stop % ALIGN)
    if len(digests) * bucket_bytes < len(memory):
        digests.append(digest(view[len(digests) * bucket_bytes :]))
    return tuple(digests)


def _verify(manifest: Manifest, memory: Array) -> None:
    buckets = -(-manifest.nbytes // manifest.bucket_bytes)
    if len(manifest.digests) != buckets:
        raise DigestMismatch(f"version {manifest.version}: {len(manifest.digests)} digests for {buckets} buckets")
    for index, wanted in enumerate(manifest.digests):
        part = manifest.bucket(index)
        if digest(memoryview(memory[part])) != wanted:  # type: ignore[arg-type]
            inside = [t.name for t in manifest.tensors if t.offset < part.stop and t.offset + t.nbytes > part.start]
            raise DigestMismatch(
                f"version {manifest.version}: bucket {index} (bytes {part.start} to {part.stop}) differs from what"
                f" was published; it holds {', '.join(inside[:5])}{' and more' if len(inside) > 5 else ''}"
            )
