"""How the chunks of a manifest lie in safetensors files, one file a chunk: which bytes, in which order, behind which header.

safetensors allows no holes: a file holds its chunk's tensors one after another, without what pads them in memory, which is
zero. The layout follows from the manifest alone, so that whoever reads knows every byte of the header beforehand.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WeightMismatch
from ..types import Manifest, TensorInfo, carrier

INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
ALIGN = 64  # of a file's first tensor
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChunkFile:
    """``starts``, ``stops``: the ranges of the chunk that the file holds, in order; ``places``: where in the file each begins.
    ``holds``: names of the tensors in it, as safetensors knows them; ``tied``: other names of some of them."""

    name: str
    header: bytes
    starts: tuple[int, ...]
    stops: tuple[int, ...]
    places: tuple[int, ...]
    holds: tuple[str, ...]
    tied: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        if not self.starts:
            return len(self.header)
        return self.places[-1] + self.stops[-1] - self.starts[-1]

    def pieces(self, chunk: Bytes, start: int, stop: int) -> tuple[int, list[Bytes]]:
        """Of bytes ``start`` to ``stop`` of a chunk, those that are in the file: where there, and views of them, in order."""
        views: list[Bytes] = []
        place = 0
        for n in range(bisect.bisect_right(self.stops, start), len(self.starts)):
            low, high = max(start, self.starts[n]), min(stop, self.stops[n])
            if low >= high:
                break
            if not views:
                place = self.places[n] + low - self.starts[n]
            views.append(chunk[low:high])
        return place, views

    def gaps(self, chunk: Bytes) -> Iterable[Bytes]:
        """The bytes of a chunk that are not in the file."""
        for low, high in zip((0, *self.stops), (*self.starts, len(chunk)), strict=True):
            if low < high:
                yield chunk[low:high]


def chunk_files(manifest: Manifest) -> list[ChunkFile]:
    """One for each chunk. Raises WeightMismatch for tensors that do not fit into their chunks."""
    inside: list[list[TensorInfo]] = [[] for _ in manifest.chunks]
    for tensor in manifest.tensors:
        if not inside and not tensor.nbytes:
            continue  # of nothing but empty tensors
        fits = 0 <= tensor.chunk < len(inside) and tensor.offset >= 0 and all(n >= 0 for n in tensor.shape)
        if not fits or tensor.offset + tensor.nbytes > manifest.chunks[tensor.chunk].nbytes:
            raise WeightMismatch(
                f"version {manifest.version}: tensor {tensor.name!r} does not lie in chunk {tensor.chunk}"
            )
        inside[tensor.chunk].append(tensor)
    count = len(inside)
    return [
        _chunk_file(manifest.version, f"model-{n + 1:05}-of-{count:05}.safetensors", tensors)
        for n, tensors in enumerate(inside)
    ]


def index(manifest: Manifest, files: list[ChunkFile]) -> bytes:
    """What Hugging Face tools read first: in which file each tensor is. Tied names are left out, as ``save_pretrained`` does,
    and listed beside."""
    metadata = {
        "total_size": sum(f.nbytes - len(f.header) for f in files),
        "version": manifest.version,
        "root": manifest.root,
        "tied": {alias: name for f in files for alias, name in f.tied.items()},
    }
    return json.dumps(
        {"metadata": metadata, "weight_map": {n: f.name for f in files for n in f.holds}}, indent=1
    ).encode()


def _chunk_file(version: int, file: str, tensors: list[TensorInfo]) -> ChunkFile:
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    starts: list[int] = []
    stops: list[int] = []
    places: list[int] = []
    tied: dict[str, str] = {}
    last: TensorInfo | None = None
    end = size = 0
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        name = _key(tensor)
        if last is not None and tensor.nbytes and _place(tensor) == _place(last):
            tied[name] = _key(last)
            continue
        if tensor.offset < end and tensor.nbytes:
            raise WeightMismatch(f"version {version}: tensors {tensor.name!r} and {last and last.name!r} overlap")
        if name == METADATA:
            raise WeightMismatch(
                f"version {version}: tensor {tensor.name!r} cannot go into a file: safetensors has that name for what is no"
                " tensor; publish it by another name (rename=)"
            )
        if name in header:
            raise WeightMismatch(f"version {version}: tensor {name!r} is there twice")
        header[name] = _entry(tensor, size)
        if tensor.dtype not in _NAMES:
            header[METADATA][f"dtype of {name}"] = tensor.dtype
        if tensor.whole:
            header[METADATA][f"whole of {name}"] = json.dumps(tensor.whole)
        if not tensor.nbytes:
            continue
        if stops and tensor.offset == end:
            stops[-1] = tensor.offset + tensor.nbytes
        else:
            starts.append(tensor.offset)
            stops.append(tensor.offset + tensor.nbytes)
            places.append(size)
        last, end = tensor, tensor.offset + tensor.nbytes
        size += tensor.nbytes
    if tied:
        header[METADATA]["tied"] = json.dumps(tied)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    front = struct.pack("<Q", len(text)) + text
    held = tuple(name for name in header if name != METADATA)
    return ChunkFile(file, front, tuple(starts), tuple(stops), tuple(len(front) + p for p in places), held, tied)


def _key(tensor: TensorInfo) -> str:
    """A piece of a tensor says where it begins: another one of the same may lie in the same file."""
    return f"{tensor.name}@{','.join(map(str, tensor.start))}" if tensor.whole else tensor.name


def _place(tensor: TensorInfo) -> tuple[int, int]:
    return tensor.offset, tensor.nbytes


def _entry(tensor: TensorInfo, size: int) -> dict[str, Any]:
    """A dtype that safetensors has no name for goes as bytes, in one more dimension."""
    known = _NAMES.get(tensor.dtype)
    shape = tensor.shape if known else (*tensor.shape, carrier(tensor.dtype).itemsize)
    return {"dtype": known or "U8", "shape": shape, "data_offsets": (size, size + tensor.nbytes)}
