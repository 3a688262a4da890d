"""Manifest: tensors, layout and digests of a version of the weights.

A version's *tensors* lie in *chunks*: contiguous memory of up to CHUNK_BYTES, or of one larger tensor. Chunks are
moved and hashed in *buckets* of ``bucket_bytes``, the last of a chunk shorter. Buckets split tensors; chunks do not.
Each publishing rank writes its own manifest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from ..errors import DigestMismatch
from .dtypes import carrier

BUCKET_BYTES = 512 << 10
FIRST_CHUNK_BYTES = 4 << 20
CHUNK_BYTES = 64 << 20
_PIECE = 512 << 10  # pieces fit the CPU cache


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """A tensor or a piece of one, by its Hugging Face checkpoint name: ``shape`` elements of ``dtype`` in C order,
    ``offset`` bytes from the start of chunk ``chunk``. Tied weights share chunk and offset. For a piece, ``whole`` is
    the shape of the whole tensor, and ``start`` the piece's first index in each dimension; else both are empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    offset: int
    start: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return math.prod(self.shape) * carrier(self.dtype).itemsize


@dataclass(frozen=True)
class Shard:
    """A piece of a tensor; ``named_weights`` may yield it instead of a tensor. ``tensor``: the
    piece, starting at index ``start`` of a tensor of shape ``whole``. The pieces of all ranks must
    cover the tensor without gap or overlap; otherwise receivers refuse the version."""

    tensor: Any
    start: tuple[int, ...]
    whole: tuple[int, ...]

    def problem(self) -> str:
        """Return why the piece does not fit the whole tensor; "" if it fits."""
        shape = tuple(self.tensor.shape)
        if not len(shape) == len(self.start) == len(self.whole):
            return f"a piece of shape {shape} at {tuple(self.start)} of a tensor of shape {tuple(self.whole)}"
        for begin, size, whole in zip(self.start, shape, self.whole, strict=True):
            if begin < 0 or begin + size > whole:
                return (
                    f"a piece of shape {shape} at {tuple(self.start)} does not lie in a tensor of {tuple(self.whole)}"
                )
        return ""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A chunk. ``digests``: xxh3-128 of each bucket; empty for a version without digests."""

    nbytes: int
    digests: tuple[bytes, ...] = ()


class Bucket(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``stop`` of chunk ``chunk``. ``index``: its number in the chunk."""

    chunk: int
    index: int
    start: int
    stop: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a version. ``untrained``: names of the model folder left out of every version.
    Raises ValueError for buckets or chunks of invalid size; decoding raises ValidationError."""

    version: int
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[Chunk, ...]
    bucket_bytes: int = BUCKET_BYTES
    untrained: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"buckets of {self.bucket_bytes} bytes have no size")
        for number, chunk in enumerate(self.chunks):
            if chunk.nbytes < 0:
                raise ValueError(f"chunk {number} has {chunk.nbytes} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def digested(self) -> bool:
        """True if every bucket has a digest."""
        return all(len(c.digests) == -(-c.nbytes // self.bucket_bytes) for c in self.chunks)

    @property
    def root(self) -> str:
        """Digest of names, dtypes, shapes, layout and all bucket digests; equal for equal weights."""
        body = (self.tensors, self.chunks, self.bucket_bytes) + ((self.untrained,) if self.untrained else ())
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(body))

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets in order."""
        for number, chunk in enumerate(self.chunks):
            for index, start in enumerate(range(0, chunk.nbytes, self.bucket_bytes)):
                yield Bucket(number, index, start, min(start + self.bucket_bytes, chunk.nbytes))

    def check(self, bucket: Bucket, data: memoryview) -> None:
        """Raise DigestMismatch if ``data`` differ from the published bytes. A version without digests passes."""
        digests = self.chunks[bucket.chunk].digests
        if not digests:
            return
        if bucket.index >= len(digests) or digest(data) != digests[bucket.index]:
            there = (t for t in self.tensors if t.nbytes and t.chunk == bucket.chunk)
            inside = [t.name for t in there if t.offset < bucket.stop and t.offset + t.nbytes > bucket.start]
            raise DigestMismatch(
                f"version {self.version}: bucket {bucket.index} of chunk {bucket.chunk} (bytes {bucket.start} to"
                f" {bucket.stop}) differs from the published bytes; it holds"
                f" {', '.join(inside[:5])}{' and more' if len(inside) > 5 else ''}"
            )


def digest(data: memoryview) -> bytes:
    """Return the xxh3-128 digest. It detects corruption, not forgery. Releases the GIL."""
    state = xxhash.xxh3_128()
    for start in range(0, len(data), _PIECE):
        state.update(data[start : start + _PIECE])
    return state.digest()
