"""Sharded files: safetensors files that several ranks write together, each its own pieces, and read what they need of.

    with_pieces = [("model.norm.weight", local, 0)]                    # name, this rank's elements, where they begin
    write_together(path, {"model.norm.weight": ("F32", (64,))}, with_pieces, ranks, bucket_bytes=64 << 20)
    with Reader(path) as file: file.read("model.norm.weight", local, 0)

A piece is a run of a tensor's elements in row-major order, as the shards of FSDP are: it lies in the file in one place. So no rank
ever holds more than its own shards and a bucket, and the file is the same for any number of ranks. All ranks must see one
directory. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.errors import ConfigError

from .ranks import Ranks

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
Kind = tuple[Any, tuple[int, ...]]
"""A tensor's dtype and shape, whole."""
_ALIGN = 8


def nbytes_of(kind: Kind) -> int:
    dtype, shape = kind
    return int(np.prod(shape, dtype=np.int64)) * int(dtype.itemsize)


def write_together(
    path: Path, tensors: Mapping[str, Kind], pieces: Iterable[tuple[str, Any, int]], ranks: Ranks, *, bucket_bytes: int
) -> None:  # fmt: skip
    """Write the file ``path`` of ``tensors``, the same on all ranks; each rank gives its ``pieces``, of which all ranks' make the
    whole: name, tensor, number of the element at which it begins. A collective; what fails on one rank is raised on all."""
    header, places = _layout(tensors)
    whole = len(header) + sum(map(nbytes_of, tensors.values()))

    def begin() -> None:
        if ranks.first:
            with open(path, "wb") as file:
                file.write(header)
                file.truncate(whole)

    def fill() -> None:
        with open(path, "r+b", buffering=0) as file:
            for name, tensor, start in pieces:
                dtype, _ = tensors[name]
                at = places[name] + start * dtype.itemsize
                for part in buckets(tensor.reshape(-1), dtype, bucket_bytes):
                    raw = memoryview(part.cpu().view(torch.uint8).numpy())
                    _write_all(file.fileno(), raw, at)
                    at += len(raw)
            os.fsync(file.fileno())

    ranks.together(begin)
    ranks.together(fill)


def buckets(flat: Any, dtype: Any, bucket_bytes: int) -> Iterator[Any]:
    """The elements of ``flat`` in ``dtype``, at most ``bucket_bytes`` at a time."""
    for part in flat.split(max(1, bucket_bytes // dtype.itemsize)):
        yield part.to(dtype)


class Reader:
    """One such file, or any safetensors file. Raises ConfigError where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        try:
            (length,) = struct.unpack("<Q", self._file.read(8))
            said = json.loads(self._file.read(length))
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            self._file.close()
            raise ConfigError(f"{path} is no safetensors file: {error}") from error
        said.pop("__metadata__", None)
        names = {name: dtype for dtype, name in DTYPES.items()}
        begin = 8 + length
        self.kinds: dict[str, Kind] = {name: (names.get(t["dtype"]), tuple(t["shape"])) for name, t in said.items()}
        self._places = {name: begin + t["data_offsets"][0] for name, t in said.items()}
        ends = max((begin + t["data_offsets"][1] for t in said.values()), default=begin)
        if os.fstat(self._file.fileno()).st_size < ends:
            self._file.close()
            raise ConfigError(f"{path} is cut short: it should have {ends} bytes")

    def read(self, name: str, into: Any, start: int = 0, *, bucket_bytes: int = 64 << 20) -> None:
        """Fill a tensor of this name's dtype with the elements from number ``start`` on."""
        dtype, _ = self.kinds[name]
        at = self._places[name] + start * dtype.itemsize
        for part in into.view(-1).split(max(1, bucket_bytes // dtype.itemsize)):
            raw = bytearray(part.numel() * dtype.itemsize)
            _read_all(self._file.fileno(), memoryview(raw), at, self.path)
            if raw:
                part.copy_(torch.frombuffer(raw, dtype=dtype))
            at += len(raw)

    def whole(self, name: str) -> Any:
        """A tensor of its own."""
        dtype, shape = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.read(name, tensor)
        return tensor

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _layout(tensors: Mapping[str, Kind]) -> tuple[bytes, dict[str, int]]:
    """The header, and where in the file each tensor begins. Larger elements first, so that each lies at a multiple of its size."""
    said: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for name, kind in sorted(tensors.items(), key=lambda each: (-each[1][0].itemsize, each[0])):
        offsets[name] = offset
        said[name] = {
            "dtype": DTYPES[kind[0]],
            "shape": list(kind[1]),
            "data_offsets": [offset, offset + nbytes_of(kind)],
        }
        offset += nbytes_of(kind)
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


def _write_all(fd: int, raw: memoryview, at: int) -> None:
    while raw:
        done = os.pwrite(fd, raw, at)
        raw, at = raw[done:], at + done


def _read_all(fd: int, raw: memoryview, at: int, path: Path) -> None:
    while raw:
        done = os.preadv(fd, [raw], at)
        if not done:
            raise ConfigError(f"{path} ends at byte {at}, where more should be")
        raw, at = raw[done:], at + done
