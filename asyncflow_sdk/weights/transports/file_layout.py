"""TensorFile: the chunks of a manifest as safetensors files: names, headers and byte ranges.

The whole tensors of a chunk share one file, without the zero padding between them: safetensors allows no holes. A
tensor in pieces has a file of its own, and each rank writes its piece there. The layout follows from one rank's
manifest: readers know all headers in advance, and ranks write to one file without coordination.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from ...errors import WeightMismatch
from ...types import Manifest, TensorInfo, carrier
from ...types.safetensors import METADATA, TensorEntry, dtype_metadata, encode_header, entry
from ..update import check_place

INDEX = "model.safetensors.index.json"
ALIGN = 64  # of a file's first tensor


class FileRun(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk lie in ``file``, from byte ``place`` on."""

    chunk: int
    start: int
    stop: int
    file: str
    place: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file of ``nbytes``. ``runs``: its bytes behind the header. ``holds``: its tensors' names.
    ``tied``: further names of them. ``shared``: True for one tensor in pieces, written by several ranks."""

    name: str
    header: bytes
    nbytes: int
    runs: tuple[FileRun, ...]
    holds: tuple[str, ...]
    tied: dict[str, str]
    shared: bool = False


def tensor_files(manifest: Manifest, prefix: str = "") -> list[TensorFile]:
    """Return the files of a rank's part. ``prefix``: of its own files. Raises WeightMismatch for tensors outside
    their chunks, that overlap, or with the name of another."""
    chunks: list[list[TensorInfo]] = [[] for _ in manifest.chunks]
    pieces: dict[str, list[TensorInfo]] = {}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for tensor in manifest.tensors:
        check_place(manifest.version, manifest.chunks, tensor)
        if (tensor.name, tensor.start) in seen:
            raise WeightMismatch(f"version {manifest.version}: tensor {tensor.name!r} is there twice")
        if tensor.name == METADATA:
            raise WeightMismatch(
                f"version {manifest.version}: tensor {tensor.name!r} cannot go into a file: safetensors has that name"
                " for what is no tensor; publish it by another name (rename=)"
            )
        seen.add((tensor.name, tensor.start))
        if chunks:  # else all tensors are empty
            chunks[tensor.chunk].append(tensor)
    files = []
    for number, tensors in enumerate(chunks, 1):
        name = f"model-{prefix}{number:05}-of-{len(chunks):05}.safetensors"
        files += _own_file(manifest.version, name, tensors, pieces)
    return files + [_shared_file(found) for found in pieces.values()]


def encode_index(version: int, root: str, files: Iterable[TensorFile]) -> bytes:
    """Return the index file of Hugging Face tools: the file of each tensor. Tied names are listed
    in its metadata only, as ``save_pretrained`` does."""
    each = {file.name: file for file in files}
    metadata = {
        "total_size": sum(file.nbytes - len(file.header) for file in each.values()),
        "version": version,
        "root": root,
        "tied": {alias: name for file in each.values() for alias, name in file.tied.items()},
    }
    where = {name: file.name for file in each.values() for name in file.holds}
    return json.dumps({"metadata": metadata, "weight_map": where}, indent=1).encode()


def _own_file(
    version: int, name: str, tensors: list[TensorInfo], pieces: dict[str, list[TensorInfo]]
) -> list[TensorFile]:
    """Return the file of a chunk's whole tensors, unless there are none. Add its pieces of others to ``pieces``."""
    header: dict[str, TensorEntry] = {}
    metadata = {"format": "pt"}
    own: list[tuple[TensorInfo, int]] = []  # with the place in the file's data
    tied: dict[str, str] = {}
    last: TensorInfo | None = None
    size = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.nbytes and last is not None and tensor.offset < last.offset + last.nbytes:
            if (tensor.offset, tensor.nbytes) != (last.offset, last.nbytes):
                raise WeightMismatch(f"version {version}: tensors {tensor.name!r} and {last.name!r} overlap")
            tied[tensor.name] = last.name
            continue
        last = tensor if tensor.nbytes else last
        if tensor.whole:
            pieces.setdefault(tensor.name, []).append(tensor)
            continue
        header[tensor.name] = entry(tensor.dtype, tensor.shape, size)
        metadata |= dtype_metadata(tensor.name, tensor.dtype)
        own.append((tensor, size))
        size += tensor.nbytes
    if tensors and not header:
        return []
    if tied:
        metadata["tied"] = json.dumps(tied)
    front = encode_header(header, metadata, ALIGN)
    runs = [FileRun(t.chunk, t.offset, t.offset + t.nbytes, name, len(front) + at) for t, at in own if t.nbytes]
    tied = {alias: other for alias, other in tied.items() if other in header}
    return [TensorFile(name, front, len(front) + size, tuple(runs), tuple(header), tied)]


def _shared_file(pieces: list[TensorInfo]) -> TensorFile:
    """Return the file of a whole tensor, of which this rank has pieces: the same file for every rank."""
    tensor = pieces[0]
    metadata = {"format": "pt"} | dtype_metadata(tensor.name, tensor.dtype)
    size = math.prod(tensor.whole) * carrier(tensor.dtype).itemsize
    front = encode_header({tensor.name: entry(tensor.dtype, tensor.whole, 0)}, metadata, ALIGN)
    name = f"model-tensor-{xxhash.xxh3_64_hexdigest(tensor.name.encode())}.safetensors"
    runs = tuple(run for piece in pieces for run in _piece_runs(piece, name, len(front)))
    return TensorFile(name, front, len(front) + size, runs, (tensor.name,), {}, shared=True)


def _piece_runs(tensor: TensorInfo, file: str, first: int) -> Iterator[FileRun]:
    """Yield a piece as runs of bytes that are adjacent in the whole, too. ``first``: where the whole begins."""
    if not tensor.nbytes:
        return
    shape, whole, start = tensor.shape, tensor.whole, tensor.start
    cut = len(shape)  # from this dimension on the piece is whole
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    itemsize = carrier(tensor.dtype).itemsize
    nbytes = math.prod(shape[outer:]) * itemsize
    strides = [math.prod(whole[n + 1 :]) * itemsize for n in range(len(whole))]
    first += sum(at * stride for at, stride in zip(start, strides, strict=True))
    for number, at in enumerate(itertools.product(*map(range, shape[:outer]))):
        begin = tensor.offset + number * nbytes
        place = first + sum(n * stride for n, stride in zip(at, strides, strict=False))
        yield FileRun(tensor.chunk, begin, begin + nbytes, file, place)
