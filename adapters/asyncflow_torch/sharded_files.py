"""Sharded files: safetensors files that several ranks write together, each its own pieces, and read what they need of.

    with_pieces = [("model.norm.weight", local, 0)]                    # name, this rank's elements, where they begin
    write_together(path, {"model.norm.weight": ("F32", (64,))}, with_pieces, ranks, bucket_bytes=64 << 20)
    with Reader(path) as file: file.read("model.norm.weight", local, 0)

A piece is a run of a tensor's elements in row-major order, as the shards of FSDP are: it lies in the file in one place. So no rank
ever holds more than its own shards and a bucket, and the file is the same for any number of ranks. All ranks must see one
directory. Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.types.safetensors import plan, read_header

from .ranks import Ranks

Kind = tuple[Any, tuple[int, ...]]
"""A tensor's dtype and shape, whole."""


def nbytes_of(kind: Kind) -> int:
    dtype, shape = kind
    return int(np.prod(shape, dtype=np.int64)) * int(dtype.itemsize)


def write_together(
    path: Path, tensors: Mapping[str, Kind], pieces: Iterable[tuple[str, Any, int]], ranks: Ranks, *, bucket_bytes: int
) -> None:  # fmt: skip
    """Write the file ``path`` of ``tensors``, the same on all ranks; each rank gives its ``pieces``, of which all ranks' make the
    whole: name, tensor, number of the element at which it begins. A collective; what fails on one rank is raised on all."""
    ordered = {name: (_name(dtype), shape) for name, (dtype, shape) in sorted(tensors.items())}
    layout = plan(ordered)

    def begin() -> None:
        if ranks.first:
            with open(path, "wb") as file:
                file.write(layout.header)
                file.truncate(layout.nbytes)

    def fill() -> None:
        with open(path, "r+b", buffering=0) as file:
            for name, tensor, start in pieces:
                dtype, _ = tensors[name]
                at = layout.offsets[name] + start * dtype.itemsize
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
            found = read_header(self._file).tensors
        except ValueError as error:
            self._file.close()
            raise ConfigError(f"{path} is no safetensors file, or not whole: {error}") from error
        self.kinds: dict[str, Kind] = {
            name: (getattr(torch, tensor.dtype, None), tensor.shape) for name, tensor in found.items()
        }
        self._places = {name: tensor.start for name, tensor in found.items()}

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


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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
