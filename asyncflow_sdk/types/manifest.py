"""Manifest: what a version of the weights consists of, and how to tell that bytes are it.

A version is *tensors* that lie in *chunks* (contiguous memory of up to CHUNK_BYTES, or of one larger tensor), which are
moved and hashed in *buckets* of ``bucket_bytes``, the last of a chunk shorter. Buckets split tensors; chunks do not.
A version that several ranks publish has one manifest from each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import xxhash

from ..errors import DigestMismatch
from .dtypes import carrier

BUCKET_BYTES = 4 << 20
CHUNK_BYTES = 64 << 20
_PIECE = 512 << 10  # hashing in pieces keeps each one in cache


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, or a piece of one, by its name in the Hugging Face checkpoint: ``shape`` elements of ``dtype`` in C order,
    ``offset`` bytes from the start of chunk ``chunk``. Tied weights have the same place.

    Of a piece, ``whole`` is the shape of the whole tensor, and ``start`` where the piece begins in each dimension;
    both are empty for a whole tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    offset: int
    start: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * carrier(self.dtype).itemsize


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """``digests``: xxh3-128 of each bucket; none of a version that is published without."""

    nbytes: int
    digests: tuple[bytes, ...] = ()


class Bucket(msgspec.Struct, frozen=True):
    """Bytes ``start`` to ``stop`` of chunk ``chunk``; ``index``: which of its buckets."""

    chunk: int
    index: int
    start: int
    stop: int


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What one rank published of a version. One whose buckets or chunks have no size cannot be made: ValueError, and
    ValidationError where it is decoded."""

    version: int
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[Chunk, ...]
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"buckets of {self.bucket_bytes} bytes have no size")
        for number, chunk in enumerate(self.chunks):
            if chunk.nbytes < 0:
                raise ValueError(f"chunk {number} has {chunk.nbytes} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks: what is moved."""
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def digested(self) -> bool:
        """Whether its bytes can be verified."""
        return all(len(c.digests) == -(-c.nbytes // self.bucket_bytes) for c in self.chunks)

    @property
    def root(self) -> str:
        """One digest over names, dtypes, shapes, layout and all bucket digests; equal for equal weights."""
        body = msgspec.msgpack.encode((self.tensors, self.chunks, self.bucket_bytes))
        return xxhash.xxh3_128_hexdigest(body)

    def buckets(self) -> Iterator[Bucket]:
        """All of them, in order."""
        for number, chunk in enumerate(self.chunks):
            for index, start in enumerate(range(0, chunk.nbytes, self.bucket_bytes)):
                yield Bucket(number, index, start, min(start + self.bucket_bytes, chunk.nbytes))

    def check(self, bucket: Bucket, data: memoryview) -> None:
        """Raises DigestMismatch, naming version, bucket and tensors, unless ``data`` is what was published there. A version
        without digests passes."""
        digests = self.chunks[bucket.chunk].digests
        if not digests:
            return
        if bucket.index >= len(digests) or digest(data) != digests[bucket.index]:
            inside = [
                t.name
                for t in self.tensors
                if t.nbytes
                and t.chunk == bucket.chunk
                and t.offset < bucket.stop
                and t.offset + t.nbytes > bucket.start
            ]
            raise DigestMismatch(
                f"version {self.version}: bucket {bucket.index} of chunk {bucket.chunk} (bytes {bucket.start} to"
                f" {bucket.stop}) differs from what was published; it holds"
                f" {', '.join(inside[:5])}{' and more' if len(inside) > 5 else ''}"
            )


def digest(data: memoryview) -> bytes:
    """xxh3-128 of bytes. It finds corruption; it authenticates nothing. Releases the GIL."""
    state = xxhash.xxh3_128()
    for start in range(0, len(data), _PIECE):
        state.update(data[start : start + _PIECE])
    return state.digest()
