"""Handover: an update's bytes for other processes of this host, for example an engine's workers.

    handover = Handover()                            # in the worker, beside the engine
    with handover.give(update) as message:           # JSON: names, dtypes, shapes, and places of the bytes
        engine.load(message)                         # by the engine's own way to its processes
    for name, array in map_handover(message):         # in the other process: views, nothing is copied

Tensors in a file of shared memory are read there. Others are copied once, into memory that is
reused for the next version.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from asyncflow_http.model_folder import announced_arrays
from asyncflow_sdk.errors import WeightError
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types import carrier
from asyncflow_sdk.weights.transports import VersionMemory
from asyncflow_sdk.weights.transports.shm import HEADER_BYTES

ALIGN = 64
Array = np.ndarray[Any, Any]


class HandoverTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, ``offset`` bytes from the start of file number ``file``, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int


class HandoverMessage(msgspec.Struct, frozen=True):
    """An update in files. ``root``: one digest of all bytes."""

    version: int
    root: str
    files: tuple[str, ...]
    tensors: tuple[HandoverTensor, ...]


class Handover:
    """The giving end. Blocking; one update at a time."""

    def __init__(self) -> None:
        self._memory: VersionMemory | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes held for tensors that were copied."""
        return 0 if self._memory is None else self._memory.nbytes

    @contextlib.contextmanager
    def give(self, update: WeightUpdate) -> Iterator[str]:
        """Yield the message for the other processes. They must have read the bytes when the block
        ends. Raises MemoryFull, WeightMismatch for tensors that differ from the update's
        description, and the errors of the update."""
        places = {name: place for name in update.tensors if (place := _named_place(update, name)) is not None}
        missing = update.tensors.keys() - places.keys()
        try:
            if missing:
                places |= self._copy(update, missing)
            files = {
                path: number for number, path in enumerate(dict.fromkeys(place.path for place in places.values()))
            }
            tensors = tuple(
                HandoverTensor(name, dtype, shape, files[places[name].path], places[name].offset)
                for name, (dtype, shape) in update.tensors.items()
            )
            yield msgspec.json.encode(HandoverMessage(update.version, update.root, tuple(files), tensors)).decode()
        finally:
            if self._memory is not None:
                self._memory.abandon()
                self._memory.keep(())

    def close(self) -> None:
        """Free the memory. Idempotent."""
        staging, self._memory = self._memory, None
        if staging is not None:
            staging.close()

    def _copy(self, update: WeightUpdate, names: set[str]) -> dict[str, FilePlace]:
        """Copy these tensors, and return their places."""
        offsets, size = {}, 0
        for name in update.tensors:
            if name in names:
                offsets[name], size = size, size + -(-_nbytes(update, name) // ALIGN) * ALIGN
        if self._memory is None:
            self._memory = VersionMemory.private("handover")
        memory = self._memory.room(max(size, 1)).memory
        for name, array in announced_arrays(update, names):
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            memory[offsets[name] : offsets[name] + raw.nbytes] = raw
        (place,) = self._memory.seal(update.version)
        path = str(self._memory.directory / place.segment)
        return {name: FilePlace(path, place.start + HEADER_BYTES + offset) for name, offset in offsets.items()}


def map_handover(message: str) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of every tensor, in the update's order. The views are valid until the
    giving end leaves its block, and may be written to: no other process sees it. bfloat16 and the
    like use ml_dtypes. Raises WeightError for files that cannot be read."""
    handed = decode_handover(message)
    maps = [_map_file(handed, path) for path in handed.files]
    for tensor in handed.tensors:
        dtype, count = carrier(tensor.dtype), math.prod(tensor.shape)
        whole = maps[tensor.file]
        stop = tensor.offset + count * dtype.itemsize
        if not 0 <= tensor.offset <= stop <= len(whole) or tensor.offset % dtype.itemsize:
            raise WeightError(
                f"version {handed.version}: tensor {tensor.name!r} does not lie in {handed.files[tensor.file]}"
            )
        yield tensor.name, whole[tensor.offset : stop].view(dtype).reshape(tensor.shape)


def decode_handover(message: str) -> HandoverMessage:
    """Decode a message. Raises WeightError for an invalid one."""
    try:
        handed = msgspec.json.decode(message, type=HandoverMessage)
    except msgspec.DecodeError as error:
        raise WeightError(f"the message of a handed version cannot be read: {error}") from None
    odd = [t.name for t in handed.tensors if not 0 <= t.file < len(handed.files) or any(n < 0 for n in t.shape)]
    if odd:
        raise WeightError(f"version {handed.version}: the place of {odd[0]!r} is invalid")
    return handed


def _map_file(handed: HandoverMessage, path: str) -> Array:
    """Map a file privately. Each call makes a new mapping: a reused one would show pages that an
    engine wrote to, instead of the new version."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError("it is no regular file")
            memory = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise WeightError(f"version {handed.version}: {path}, where it lies, cannot be read here: {error}") from None
    return np.frombuffer(memory, np.uint8)


def _named_place(update: WeightUpdate, name: str) -> FilePlace | None:
    """Return the place of a tensor; None if its file has no name, as that of a dead publisher."""
    place = update.place(name)
    return place if place is not None and os.path.exists(place.path) else None


def _nbytes(update: WeightUpdate, name: str) -> int:
    dtype, shape = update.tensors[name]
    return math.prod(shape) * carrier(dtype).itemsize
