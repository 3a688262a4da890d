"""ChunkFiles: the chunks of a manifest as safetensors files: names, headers and byte ranges.

The whole tensors of a chunk share one file, without the zero padding between them: safetensors allows no holes. A
tensor in pieces has a file of its own, and each rank writes its piece there. The layout follows from one rank's
manifest: readers know all headers in advance, and ranks write to one file without coordination.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ...errors import WeightMismatch
from ...types import Manifest, TensorInfo, carrier
from ...types.safetensors import METADATA, TensorEntry, dtype_metadata, encode_header, entry

INDEX = "model.safetensors.index.json"
ALIGN = 64  # of a file's first tensor
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file of ``nbytes``. ``holds``: its tensors' names. ``tied``: further names of
    its tensors. ``shared``: True for one tensor in pieces, written by several ranks."""

    name: str
    header: bytes
    nbytes: int
    holds: tuple[str, ...]
    tied: dict[str, str]
    shared: bool = False


class FileRun(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk lie in ``file``, from byte ``place`` on."""

    start: int
    stop: int
    file: TensorFile
    place: int

    def cut(self, start: int, stop: int) -> FileRun:
        """Return the part within these bytes of the chunk."""
        low = max(start, self.start)
        return FileRun(low, min(stop, self.stop), self.file, self.place + low - self.start)


@dataclass(frozen=True)
class ChunkFiles:
    """The files of a chunk. ``runs``: in the chunk's order; other bytes are padding."""

    files: tuple[TensorFile, ...]
    runs: tuple[FileRun, ...]

    def pieces(self, chunk: Bytes, start: int, stop: int) -> Iterator[tuple[TensorFile, int, list[Bytes]]]:
        """Yield bytes of a chunk by file: the file, the position in it, and views of adjacent bytes."""
        first = bisect.bisect_right(self.runs, start, key=lambda run: run.stop)
        runs = itertools.takewhile(lambda run: run.start < stop, itertools.islice(self.runs, first, None))
        return _merge(chunk, (run.cut(start, stop) for run in runs))

    def bytes_of(self, file: TensorFile, chunk: Bytes) -> Iterator[tuple[int, list[Bytes]]]:
        """Yield the bytes of a chunk in ``file``: position in the file, and views of adjacent bytes."""
        for _, place, views in _merge(chunk, (run for run in self.runs if run.file is file)):
            yield place, views

    def gaps(self, chunk: Bytes) -> Iterable[Bytes]:
        """Yield the bytes of a chunk that lie in no file."""
        end = 0
        for run in self.runs:
            if end < run.start:
                yield chunk[end : run.start]
            end = run.stop
        if end < len(chunk):
            yield chunk[end:]


def _merge(chunk: Bytes, runs: Iterable[FileRun]) -> Iterator[tuple[TensorFile, int, list[Bytes]]]:
    """Join runs that are adjacent in their file."""
    file: TensorFile | None = None
    views: list[Bytes] = []
    begin = end = 0
    for run in runs:
        if file is not None and (run.file is not file or run.place != end):
            yield file, begin, views
            file, views = None, []
        if file is None:
            file, begin = run.file, run.place
        views.append(chunk[run.start : run.stop])
        end = run.place + run.stop - run.start
    if file is not None:
        yield file, begin, views


def chunk_files(manifest: Manifest, prefix: str = "") -> list[ChunkFiles]:
    """Return the files of each chunk. ``prefix``: of this rank's own files. Raises WeightMismatch
    for tensors outside their chunks."""
    inside: list[list[TensorInfo]] = [[] for _ in manifest.chunks]
    for tensor in manifest.tensors:
        if not inside and not tensor.nbytes:
            continue  # all tensors are empty
        fits = 0 <= tensor.chunk < len(inside) and tensor.offset >= 0 and all(n >= 0 for n in tensor.shape)
        if (
            not fits
            or tensor.offset + tensor.nbytes > manifest.chunks[tensor.chunk].nbytes
            or not _is_inside_whole(tensor)
        ):
            raise WeightMismatch(
                f"version {manifest.version}: tensor {tensor.name!r} does not lie in chunk {tensor.chunk}"
            )
        inside[tensor.chunk].append(tensor)
    count = len(inside)
    return [
        _chunk_files(manifest.version, f"model-{prefix}{n + 1:05}-of-{count:05}.safetensors", tensors)
        for n, tensors in enumerate(inside)
    ]


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


def _chunk_files(version: int, file: str, tensors: list[TensorInfo]) -> ChunkFiles:
    header: dict[str, TensorEntry] = {}
    metadata = {"format": "pt"}
    own: list[tuple[int, int, int]] = []  # bytes of the chunk, and where in the file's data
    shared: dict[str, TensorFile] = {}
    pieces: list[FileRun] = []
    tied: dict[str, str] = {}
    last: TensorInfo | None = None
    end = size = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if last is not None and tensor.nbytes and _byte_range(tensor) == _byte_range(last):
            tied[tensor.name] = last.name
            continue
        if tensor.offset < end and tensor.nbytes:
            raise WeightMismatch(f"version {version}: tensors {tensor.name!r} and {last and last.name!r} overlap")
        if tensor.name == METADATA:
            raise WeightMismatch(
                f"version {version}: tensor {tensor.name!r} cannot go into a file: safetensors has that name for"
                " what is no tensor; publish it by another name (rename=)"
            )
        if tensor.name in header or (not tensor.whole and tensor.name in shared):
            raise WeightMismatch(f"version {version}: tensor {tensor.name!r} is there twice")
        if tensor.nbytes:
            last, end = tensor, tensor.offset + tensor.nbytes
        if tensor.whole:
            if tensor.name not in shared:
                shared[tensor.name] = _shared_file(tensor)
            pieces += _file_runs(tensor, shared[tensor.name])
            continue
        header[tensor.name] = entry(tensor.dtype, tensor.shape, size)
        metadata |= dtype_metadata(tensor.name, tensor.dtype)
        if tensor.nbytes:
            own.append((tensor.offset, end, size))
            size += tensor.nbytes
    if tied:
        metadata["tied"] = json.dumps(tied)
    held = tuple(header)
    files = list(shared.values())
    if held or not files:
        front = encode_header(header, metadata, ALIGN)
        mine = TensorFile(file, front, len(front) + size, held, {a: n for a, n in tied.items() if n in held})
        files.insert(0, mine)
        pieces += [FileRun(low, high, mine, len(front) + at) for low, high, at in own]
    return ChunkFiles(tuple(files), tuple(sorted(pieces, key=lambda run: run.start)))


def _shared_file(tensor: TensorInfo) -> TensorFile:
    """Return the file of the whole tensor; the same for every rank."""
    metadata = {"format": "pt"} | dtype_metadata(tensor.name, tensor.dtype)
    size = math.prod(tensor.whole) * carrier(tensor.dtype).itemsize
    front = encode_header({tensor.name: entry(tensor.dtype, tensor.whole, 0)}, metadata, ALIGN)
    name = f"model-tensor-{xxhash.xxh3_64_hexdigest(tensor.name.encode())}.safetensors"
    return TensorFile(name, front, len(front) + size, (tensor.name,), {}, shared=True)


def _file_runs(tensor: TensorInfo, file: TensorFile) -> Iterator[FileRun]:
    """Yield a piece as runs of bytes that are adjacent in the whole, too."""
    if not tensor.nbytes:
        return
    shape, whole, start = tensor.shape, tensor.whole, tensor.start
    cut = len(shape)  # from this dimension on the piece is whole
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    nbytes = math.prod(shape[outer:]) * carrier(tensor.dtype).itemsize
    strides = [math.prod(whole[n + 1 :]) * carrier(tensor.dtype).itemsize for n in range(len(whole))]
    first = len(file.header) + sum(at * stride for at, stride in zip(start, strides, strict=True))
    for number, at in enumerate(itertools.product(*map(range, shape[:outer]))):
        place = first + sum(n * stride for n, stride in zip(at, strides, strict=False))
        begins = tensor.offset + number * nbytes
        yield FileRun(begins, begins + nbytes, file, place)


def _is_inside_whole(tensor: TensorInfo) -> bool:
    if not tensor.whole:
        return True
    if not len(tensor.start) == len(tensor.shape) == len(tensor.whole):
        return False
    return all(0 <= a <= a + n <= w for a, n, w in zip(tensor.start, tensor.shape, tensor.whole, strict=True))


def _byte_range(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes
