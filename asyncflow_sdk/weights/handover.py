"""Handover: an update's bytes for other processes of this host, such as those in which an engine computes.

    handover = Handover()                            # in the worker, beside the engine
    with handover.give(update) as told:              # JSON: names, dtypes, shapes, and where the bytes lie
        engine.load(told)                            # by whatever way the engine has to its processes
    for name, array in handed_over(told):            # there: views, nothing is copied

Tensors that lie in a file of shared memory are read from there. Others are copied once, into memory that is used again for
the next version.
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

from ..errors import WeightError, WeightMismatch
from ..interfaces.weights import FilePlace, WeightUpdate
from ..types import carrier, dtype_name
from .transports.version_memory import HEAD_BYTES, VersionMemory
from .writer import padded

Array = np.ndarray[Any, Any]


class HandedTensor(msgspec.Struct, frozen=True, array_like=True):
    """``offset`` bytes from the start of file number ``file`` it lies, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int


class Handed(msgspec.Struct, frozen=True):
    """What is told of an update. ``root``: one digest of everything."""

    version: int
    root: str
    files: tuple[str, ...]
    tensors: tuple[HandedTensor, ...]


class Handover:
    """The giving end. Blocking; one update at a time."""

    def __init__(self) -> None:
        self._staging: VersionMemory | None = None

    @property
    def nbytes(self) -> int:
        """Memory held for tensors that did not lie where others can read them."""
        return 0 if self._staging is None else self._staging.nbytes

    @contextlib.contextmanager
    def give(self, update: WeightUpdate) -> Iterator[str]:
        """What to tell the others, who must have read it when this is left. Raises MemoryFull, WeightMismatch for tensors that
        are not what the update announced, and what the update raises."""
        places = {name: place for name in update.tensors if (place := _there(update, name)) is not None}
        missing = update.tensors.keys() - places.keys()
        try:
            if missing:
                places |= self._copied(update, missing)
            files = {
                path: number for number, path in enumerate(dict.fromkeys(place.path for place in places.values()))
            }
            tensors = tuple(
                HandedTensor(name, dtype, shape, files[places[name].path], places[name].offset)
                for name, (dtype, shape) in update.tensors.items()
            )
            yield msgspec.json.encode(Handed(update.version, update.root, tuple(files), tensors)).decode()
        finally:
            if self._staging is not None:
                self._staging.abandon()
                self._staging.keep(())

    def close(self) -> None:
        """Free the memory. Idempotent."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    def _copied(self, update: WeightUpdate, names: set[str]) -> dict[str, FilePlace]:
        """Where those tensors lie once they are copied."""
        offsets, size = {}, 0
        for name in update.tensors:
            if name in names:
                offsets[name], size = size, size + padded(_nbytes(update, name))
        if self._staging is None:
            self._staging = VersionMemory.private("handover")
        room = self._staging.room(max(size, 1))
        left = set(names)
        for name, array in update.arrays():
            if name in left:
                _check(update, name, array)
                raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                room.memory[offsets[name] : offsets[name] + raw.nbytes] = raw
                left.remove(name)
        if left:
            raise WeightMismatch(
                f"version {update.version} announced {', '.join(sorted(left)[:10])}, and did not bring it"
            )
        (place,) = self._staging.seal(update.version)
        path = str(self._staging.directory / place.segment)
        return {name: FilePlace(path, place.start + HEAD_BYTES + offset) for name, offset in offsets.items()}


def handed_over(told: str) -> Iterator[tuple[str, Array]]:
    """(name, array) of every tensor, in the order of the update: views that are valid until the giving end goes on, writable
    without harm to anyone else; bfloat16 and the like by ml_dtypes. Raises WeightError for what cannot be read."""
    handed = read_handed(told)
    maps = [_mapped(handed, path) for path in handed.files]
    for tensor in handed.tensors:
        dtype, count = carrier(tensor.dtype), math.prod(tensor.shape)
        whole = maps[tensor.file]
        stop = tensor.offset + count * dtype.itemsize
        if not 0 <= tensor.offset <= stop <= len(whole) or tensor.offset % dtype.itemsize:
            raise WeightError(
                f"version {handed.version}: tensor {tensor.name!r} does not lie in {handed.files[tensor.file]}"
            )
        yield tensor.name, whole[tensor.offset : stop].view(dtype).reshape(tensor.shape)


def read_handed(told: str) -> Handed:
    """What was told. Raises WeightError for what is no such thing."""
    try:
        handed = msgspec.json.decode(told, type=Handed)
    except msgspec.DecodeError as error:
        raise WeightError(f"what was said of a version's place cannot be read: {error}") from None
    odd = [t.name for t in handed.tensors if not 0 <= t.file < len(handed.files) or any(n < 0 for n in t.shape)]
    if odd:
        raise WeightError(f"version {handed.version}: what was said of {odd[0]!r} makes no sense")
    return handed


def _mapped(handed: Handed, path: str) -> Array:
    """A file, as memory. A mapping of its own each time: in one that is used again, pages that an engine wrote into would be
    those of the version before."""
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


def _there(update: WeightUpdate, name: str) -> FilePlace | None:
    """Where a tensor lies, if its file has a name still: that of a publisher that is gone may have none."""
    place = update.place(name)
    return place if place is not None and os.path.exists(place.path) else None


def _nbytes(update: WeightUpdate, name: str) -> int:
    dtype, shape = update.tensors[name]
    return math.prod(shape) * carrier(dtype).itemsize


def _check(update: WeightUpdate, name: str, array: Array) -> None:
    wanted, given = update.tensors[name], (dtype_name(array.dtype), array.shape)
    if given != tuple(wanted):
        raise WeightMismatch(
            f"version {update.version}: {name} came as {given[0]}{list(given[1])}, and was announced as"
            f" {wanted.dtype}{list(wanted.shape)}"
        )
