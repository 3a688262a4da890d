"""Slices of a version: parts of its tensors, for a receiver with ranks on several hosts.

    tensors = slice_tensors(manifest, lambda name, shape: (0, shape[0] // 2) if "q_proj" in name else None)
    part = cut_slice(manifest, tensors)          # the buckets with these bytes, as a manifest of their own

A bucket of the slice keeps its digest, so the slice is verified without the rest of the version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from ..errors import ConfigError, WeightMismatch
from ..interfaces.weights import SliceOf
from ..types import Manifest, TensorInfo
from ..types.manifest import Chunk


class VersionSlice(NamedTuple):
    """``manifest``: of the slice. ``numbers``: of its buckets, in the whole version. ``root``: of
    the whole version. ``key``: the same for equal slices of all versions with equal layout."""

    manifest: Manifest
    numbers: Sequence[int]
    root: str
    key: str


def slice_tensors(manifest: Manifest, slices: SliceOf) -> tuple[TensorInfo, ...]:
    """Return the tensors of the slice, at their places in the whole version. Raises ConfigError for
    a range outside a tensor, and WeightMismatch for a tensor outside its chunk."""
    return tuple(_slice(manifest, info, slices) for info in manifest.tensors)


def cut_slice(manifest: Manifest, tensors: Sequence[TensorInfo]) -> VersionSlice:
    """Return the buckets with bytes of ``tensors``. The manifest must have digests."""
    size = manifest.bucket_bytes
    held: dict[int, set[int]] = {}
    for info in tensors:
        if info.nbytes:
            held.setdefault(info.chunk, set()).update(
                range(info.offset // size, -(-(info.offset + info.nbytes) // size))
            )
    chunks, numbers, before = list[Chunk](), list[int](), 0
    places: dict[tuple[int, int], tuple[int, int]] = {}  # of a bucket: its chunk in the slice, and its start there
    for number, chunk in enumerate(manifest.chunks):
        indices = sorted(held.get(number, ()))
        if indices:
            places |= {(number, index): (len(chunks), at * size) for at, index in enumerate(indices)}
            nbytes = sum(min(size, chunk.nbytes - index * size) for index in indices)
            chunks.append(Chunk(nbytes, tuple(chunk.digests[index] for index in indices)))
            numbers += [before + index for index in indices]
        before += len(chunk.digests)
    moved = tuple(_move(info, places.get((info.chunk, info.offset // size), (0, 0)), size) for info in tensors)
    part = Manifest(manifest.version, moved, tuple(chunks), size, manifest.untrained)
    key = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((moved, numbers)))
    return VersionSlice(part, numbers, manifest.root, key)


def _slice(manifest: Manifest, info: TensorInfo, slices: SliceOf) -> TensorInfo:
    if problem := manifest.problem(info):
        raise WeightMismatch(f"version {manifest.version}: tensor {info.name!r}: {problem}")
    whole = info.whole or info.shape
    wanted = slices(info.name, whole)
    if wanted is None:
        return info
    first, stop = wanted
    if not whole or not 0 <= first <= stop <= whole[0]:
        raise ConfigError(
            f"slices returned {wanted!r} for tensor {info.name!r} of shape {list(whole)}; return a range of its first"
            " dimension, or None"
        )
    start = info.start or (0,) * len(whole)
    low = min(max(first, start[0]), stop)
    high = max(min(stop, start[0] + info.shape[0]), low)
    row_bytes = info.nbytes // info.shape[0] if info.shape[0] else 0
    piece = {"start": (low - first, *start[1:]), "whole": (stop - first, *whole[1:])} if info.whole else {}
    return msgspec.structs.replace(
        info, shape=(high - low, *info.shape[1:]), offset=info.offset + (low - start[0]) * row_bytes, **piece
    )


def _move(info: TensorInfo, place: tuple[int, int], size: int) -> TensorInfo:
    """Return a tensor at its place in the slice. ``place``: of the bucket with its first byte."""
    chunk, start = place
    return msgspec.structs.replace(info, chunk=chunk, offset=start + info.offset % size if info.nbytes else 0)
