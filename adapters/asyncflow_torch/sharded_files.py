"""Sharded files: safetensors files that several ranks write together and read in part.

    parts = FileParts({"model.norm.weight": (torch.float32, (64,))}, [("model.norm.weight", local, 0)])
    write_together(path, parts, ranks)
    with Reader(path) as file: file.read("model.norm.weight", local, 0)

A piece is a run of a tensor's elements in row-major order, and one range of the file. A rank holds
at most its own shards and a bucket, and the file is the same for any number of ranks. All ranks
must see the directory. Nothing is pickled.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.safetensors import plan, read_header

from .ranks import Ranks

RANK_BUCKET_BYTES = 64 << 20
Kind = tuple[Any, tuple[int, ...]]
"""dtype and shape of a whole tensor."""
Piece = tuple[str, Any, int]
"""Tensor name, elements of this rank, index of the first of them."""


@dataclass(frozen=True)
class FileParts:
    """``kinds``: all tensors of a file, the same on all ranks. ``pieces``: the part of this
    rank; the pieces of all ranks cover the file."""

    kinds: Mapping[str, Kind]
    pieces: Iterable[Piece]

    @classmethod
    def whole(cls, tensors: Mapping[str, Any]) -> FileParts:
        """Return the parts of one rank without others."""
        return cls(
            {name: kind_of(tensor) for name, tensor in tensors.items()},
            [(name, tensor, 0) for name, tensor in tensors.items()],
        )


def kind_of(tensor: Any, dtype: Any = None) -> Kind:
    """Return dtype and shape of a tensor. ``dtype``: to be written in, default its own."""
    return dtype or tensor.dtype, tuple(tensor.shape)


def nbytes_of(kind: Kind) -> int:
    """Return the size of a whole tensor in bytes."""
    dtype, shape = kind
    return math.prod(shape) * int(dtype.itemsize)


def write_together(path: Path, parts: FileParts, ranks: Ranks, *, bucket_bytes: int = RANK_BUCKET_BYTES) -> None:
    """Write the file ``path``. A collective; an error of one rank is raised on all."""
    layout = plan({name: (_name(dtype), shape) for name, (dtype, shape) in sorted(parts.kinds.items())})

    def begin() -> None:
        if ranks.first:
            with open(path, "wb") as file:
                file.write(layout.header)
                file.truncate(layout.nbytes)

    def fill() -> None:
        with open(path, "r+b", buffering=0) as file:
            for name, tensor, start in parts.pieces:
                dtype, _ = parts.kinds[name]
                offset = layout.offsets[name] + start * dtype.itemsize
                for part in buckets(tensor.reshape(-1), dtype, bucket_bytes):
                    raw = memoryview(part.cpu().view(torch.uint8).numpy())
                    _write_all(file.fileno(), raw, offset)
                    offset += len(raw)
            os.fsync(file.fileno())

    ranks.together(begin)
    ranks.together(fill)


def buckets(flat: Any, dtype: Any, bucket_bytes: int) -> Iterator[Any]:
    """Yield the elements of ``flat`` in ``dtype``, at most ``bucket_bytes`` at a time."""
    for part in flat.split(max(1, bucket_bytes // dtype.itemsize)):
        yield part.to(dtype)


class Reader:
    """An open safetensors file. Raises ConfigError if it is unreadable, not safetensors, or
    truncated. ``kinds``: its tensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        try:
            found = read_header(self._file).tensors
        except ValueError as error:
            self._file.close()
            raise ConfigError(f"{path} is no safetensors file, or not whole: {error}") from error
        self.kinds: dict[str, Kind] = {
            name: (getattr(torch, tensor.dtype, None), tensor.shape) for name, tensor in found.items()
        }
        self._offsets = {name: tensor.start for name, tensor in found.items()}

    def read(self, name: str, into: Any, start: int = 0, *, bucket_bytes: int = RANK_BUCKET_BYTES) -> None:
        """Fill a contiguous tensor with elements of tensor ``name`` from index ``start`` on. The
        dtypes must be equal."""
        dtype, _ = self.kinds[name]
        offset = self._offsets[name] + start * dtype.itemsize
        for part in into.view(-1).split(max(1, bucket_bytes // dtype.itemsize)):
            raw = bytearray(part.numel() * dtype.itemsize)
            _read_all(self._file.fileno(), memoryview(raw), offset, self.path)
            if raw:
                part.copy_(torch.frombuffer(raw, dtype=dtype))
            offset += len(raw)

    def whole(self, name: str) -> Any:
        """Return a copy of tensor ``name`` on the CPU."""
        dtype, shape = self.kinds[name]
        tensor = torch.empty(shape, dtype=dtype)
        self.read(name, tensor)
        return tensor

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _write_all(fd: int, raw: memoryview, offset: int) -> None:
    while raw:
        done = os.pwrite(fd, raw, offset)
        raw, offset = raw[done:], offset + done


def _read_all(fd: int, raw: memoryview, offset: int, path: Path) -> None:
    while raw:
        done = os.preadv(fd, [raw], offset)
        if not done:
            raise ConfigError(f"{path} ends at byte {offset}, where more should be")
        raw, offset = raw[done:], offset + done
