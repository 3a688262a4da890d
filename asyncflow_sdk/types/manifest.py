"""Manifest: what a version of the weights consists of, and how to tell that bytes are it."""

from __future__ import annotations

import math

import msgspec
import xxhash

from .dtypes import carrier

BUCKET_BYTES = 4 << 20
_PIECE = 512 << 10  # hashing in pieces keeps each one in cache


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor, by its name in the Hugging Face checkpoint. ``offset``: bytes from the start of the version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * carrier(self.dtype).itemsize


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """A version: its tensors, laid out one after another (each at a multiple of 64 bytes), in buckets of
    ``bucket_bytes`` (the last one shorter) that may split tensors, with the xxh3-128 digest of each."""

    version: int
    tensors: tuple[TensorInfo, ...]
    nbytes: int
    bucket_bytes: int
    digests: tuple[bytes, ...]

    @property
    def root(self) -> str:
        """One digest over names, dtypes, shapes, layout and all bucket digests; equal for equal weights."""
        body = msgspec.msgpack.encode((self.tensors, self.nbytes, self.bucket_bytes, self.digests))
        return xxhash.xxh3_128_hexdigest(body)

    def bucket(self, index: int) -> slice:
        """Where bucket ``index`` lies, in bytes from the start of the version."""
        start = index * self.bucket_bytes
        return slice(start, min(start + self.bucket_bytes, self.nbytes))


def digest(data: memoryview) -> bytes:
    """xxh3-128 of bytes. It finds corruption; it authenticates nothing."""
    state = xxhash.xxh3_128()
    for start in range(0, len(data), _PIECE):
        state.update(data[start : start + _PIECE])
    return state.digest()
