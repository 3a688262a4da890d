"""Update: the fetched parts of a version, assembled into whole tensors."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..errors import VersionGone, WeightMismatch
from ..interfaces.weights import Fetched, FilePlace, TensorType, WeightUpdate
from ..types import Chunk, TensorInfo, carrier, from_torch, to_torch
from .tensor_sources import same_bytes

Array = np.ndarray[Any, Any]


class Update(WeightUpdate):
    """``parts``: by rank. ``rename``: from the checkpoint's names to the engine's. A tensor that lies whole in one part
    is a view. One in pieces is assembled when it is read, and takes memory only then. Raises WeightMismatch for pieces
    that leave gaps, overlap or differ in dtype, for tensors outside their chunk, and for one name with other bytes."""

    def __init__(self, version: int, parts: Sequence[Fetched], rename: Callable[[str], str] | None = None) -> None:
        self.version = version
        self._parts: Sequence[Fetched] | None = parts
        self._pieces: dict[str, list[tuple[Fetched, TensorInfo]]] = {}
        given: dict[str, str] = {}
        for part in parts:
            for info in part.manifest.tensors:
                check_place(version, part.manifest.chunks, info)
                name = info.name if rename is None else rename(info.name)
                if given.setdefault(name, info.name) != info.name:
                    raise self._mismatch(name, f"both {given[name]!r} and {info.name!r} are renamed to it")
                self._pieces.setdefault(name, []).append((part, info))
        for name, pieces in self._pieces.items():
            if len(pieces) > 1 or pieces[0][1].whole:
                self._pieces[name] = self._covering(name, pieces)
        self.tensors: Mapping[str, TensorType] = {
            name: TensorType(pieces[0][1].dtype, _whole_shape(pieces[0][1])) for name, pieces in self._pieces.items()
        }
        left = dict.fromkeys(name for part in parts for name in part.manifest.untrained)
        self.untrained = tuple(left if rename is None else map(rename, left))
        roots = [part.manifest.root for part in parts]
        self.root = roots[0] if len(roots) == 1 else xxhash.xxh3_128_hexdigest(" ".join(roots).encode())

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Yield (name, numpy array)."""
        for name in self.tensors:
            value = self._value(name)
            yield name, value if isinstance(value, np.ndarray) else from_torch(value)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name in self.tensors:
            value = self._value(name)
            yield name, to_torch(value) if isinstance(value, np.ndarray) else value

    def place(self, name: str) -> FilePlace | None:
        """Return the place of a whole tensor in a file, or None."""
        pieces = self._pieces[name]
        part, info = pieces[0]
        if len(pieces) > 1 or not info.nbytes or not part.places:
            return None
        path, start = part.places[info.chunk]
        return FilePlace(path, start + info.offset)

    def release(self) -> None:
        """Release all parts. Idempotent."""
        parts, self._parts = self._parts, None
        for part in parts or ():
            part.release()

    def _value(self, name: str) -> Any:
        """Return a whole tensor: numpy, or torch if its bytes are on a device."""
        if self._parts is None:
            raise VersionGone(f"version {self.version} was released")
        pieces = self._pieces[name]
        if not pieces[0][1].whole:
            return _view(*pieces[0])
        values = [_view(part, info) for part, info in pieces]
        if len(values) == 1:
            return values[0]
        shape, first = pieces[0][1].whole, values[0]
        if isinstance(first, np.ndarray):
            whole: Any = np.empty(shape, first.dtype)
        else:
            whole = sys.modules["torch"].empty(shape, dtype=first.dtype, device=first.device)
        for (_, info), value in zip(pieces, values, strict=True):
            whole[_slices(info)] = value
        return whole

    def _covering(self, name: str, pieces: list[tuple[Fetched, TensorInfo]]) -> list[tuple[Fetched, TensorInfo]]:
        """Return the pieces of a whole tensor, without duplicates. Raises WeightMismatch."""
        first = pieces[0][1]
        for _, info in pieces:
            if (info.dtype, _whole_shape(info)) != (first.dtype, _whole_shape(first)):
                this, that = (f"{each.dtype}{_whole_shape(each)}" for each in (info, first))
                raise self._mismatch(name, f"it is {this} in one part and {that} in another")
        places: dict[tuple[Any, ...], tuple[Fetched, TensorInfo]] = {}
        for part, info in pieces:
            place = info.start or (0,) * len(info.shape), info.shape
            if place not in places:
                places[place] = part, info
            elif not same_bytes(_view(*places[place]), _view(part, info)):
                raise self._mismatch(name, "two parts have different bytes of it")
        fitted = [each for each in places.values() if each[1].nbytes] or [pieces[0]]
        for (_, one), (_, other) in itertools.combinations(fitted, 2):
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(_slices(one), _slices(other), strict=True)):
                raise self._mismatch(
                    name, f"pieces {one.shape} at {one.start} and {other.shape} at {other.start} overlap"
                )
        there, whole = sum(math.prod(info.shape) for _, info in fitted), math.prod(_whole_shape(first))
        if there != whole:
            raise self._mismatch(
                name, f"{len(fitted)} pieces have {there} of its {whole} elements: some rank did not send its own"
            )
        return fitted

    def _mismatch(self, name: str, what: str) -> WeightMismatch:
        return WeightMismatch(f"version {self.version}: tensor {name!r}: {what}")


def check_place(version: int, chunks: Sequence[Chunk], info: TensorInfo) -> None:
    """Raise WeightMismatch for a tensor outside its chunk, or a piece outside its whole."""
    width = carrier(info.dtype).itemsize
    if any(size < 0 for size in info.shape) or (
        (chunks or info.nbytes)
        and not (
            0 <= info.chunk < len(chunks)
            and 0 <= info.offset <= info.offset + info.nbytes <= chunks[info.chunk].nbytes
            and (info.offset % width == 0 or not info.nbytes)
        )
    ):
        raise WeightMismatch(f"version {version}: tensor {info.name!r}: it does not lie in chunk {info.chunk}")
    if info.whole and not (
        len(info.start) == len(info.shape) == len(info.whole)
        and all(0 <= a <= a + n <= w for a, n, w in zip(info.start, info.shape, info.whole, strict=True))
    ):
        raise WeightMismatch(
            f"version {version}: tensor {info.name!r}: a piece {info.shape} at {info.start} does not lie in {info.whole}"
        )


def _whole_shape(info: TensorInfo) -> tuple[int, ...]:
    return info.whole or info.shape


def _slices(info: TensorInfo) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(info.start or (0,) * len(info.shape), info.shape, strict=True))


def _view(part: Fetched, info: TensorInfo) -> Any:
    if not info.nbytes:
        return np.empty(info.shape, carrier(info.dtype))
    raw = part.chunks[info.chunk][info.offset : info.offset + info.nbytes]
    if isinstance(raw, np.ndarray):
        return raw.view(carrier(info.dtype)).reshape(info.shape)
    return raw.view(getattr(sys.modules["torch"], info.dtype)).view(info.shape)
