"""Payload beside a message, for clients that do not share memory with the server: columns as frames, whole, not by row.

A column is its packed values and, unless it is fixed, rows + 1 int64 offsets. Pieces below JOIN_BYTES lie one after
another in the first frame, which may be empty, each at a multiple of 16 bytes; every larger one is a frame of its own,
sent from where it lies and received where it stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import SchemaError
from ..types import Column, ColumnSpec, carrier
from ..types.ragged import Array

JOIN_BYTES = 64 << 10
ALIGN = 16
Bytes = npt.NDArray[np.uint8]


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """What the frames beside a message hold: ``rows`` entries of each column that the message names, in its order.
    ``nbytes``: of the values of each."""

    rows: int
    nbytes: tuple[int, ...]


def to_frames(columns: Mapping[str, Column], *, copy: bool = False) -> tuple[Payload, list[Bytes]]:
    """Columns as frames. Large ones refer to the columns' memory, unless ``copy``."""
    small: list[Bytes] = []
    frames: list[Bytes] = []
    for column in columns.values():
        for array in (column.values, column.offsets):
            if array is None:
                continue
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if flat.nbytes < JOIN_BYTES:
                small += (flat, _PADDING[: -flat.nbytes % ALIGN])
            else:
                frames.append(flat.copy() if copy else flat)
    rows = len(next(iter(columns.values())))
    payload = Payload(rows, tuple(column.values.nbytes for column in columns.values()))
    return payload, [np.concatenate(small) if small else _PADDING[:0], *frames]


def from_frames(payload: Payload, specs: Mapping[str, ColumnSpec], frames: Sequence[Any]) -> dict[str, Column]:
    """Columns over the memory of frames, read-only. Raises SchemaError unless they are what was said of them."""
    rows = payload.rows
    if len(payload.nbytes) != len(specs) or not 0 <= rows < _MOST or min(payload.nbytes, default=0) < 0:
        raise SchemaError("the payload is not that of the columns named")
    pieces = _Pieces(frames)
    rising: list[Array] = []
    columns: dict[str, Column] = {}
    for (name, spec), nbytes in zip(specs.items(), payload.nbytes, strict=True):
        dtype, offsets, count = carrier(spec.dtype), None, rows
        place = pieces.next(nbytes)
        if spec.kind != "fixed":
            offsets = _array((rows + 1,), _INT64, *pieces.next(8 * (rows + 1)))
            count = int(offsets[-1])
            rising.append(offsets)
        width = dtype.itemsize * math.prod(spec.shape)
        if not 0 <= count < _MOST or min(spec.shape, default=0) < 0 or nbytes != width * count:
            raise SchemaError(f"column {name!r} has {nbytes} bytes, which are not {count} of {spec}")
        columns[name] = Column(spec, _array((count, *spec.shape), dtype, *place), offsets)
    pieces.end()
    if rising:
        table = np.array(rising)
        if table[:, 0].any() or (table[:, 1:] < table[:, :-1]).any():
            raise SchemaError("a column has offsets that do not rise from 0")
    return columns


class _Pieces:
    """Where the pieces lie in frames, one after another."""

    def __init__(self, frames: Sequence[Any]) -> None:
        if not frames:
            raise SchemaError("no payload came with the message")
        self._frames = [memoryview(frame).toreadonly() for frame in frames]
        self._joined, self._at, self._large = self._frames[0], 0, 0

    def next(self, size: int) -> tuple[memoryview, int]:
        """The buffer and the place in it of the next piece."""
        if size < JOIN_BYTES:
            at, self._at = self._at, self._at + -(-size // ALIGN) * ALIGN
            if self._at > self._joined.nbytes:
                raise SchemaError(f"{self._joined.nbytes} bytes of payload came where more were announced")
            return self._joined, at
        self._large += 1
        if self._large >= len(self._frames) or self._frames[self._large].nbytes != size:
            raise SchemaError(f"payload lacks the {size} bytes that were announced")
        return self._frames[self._large], 0

    def end(self) -> None:
        """Raises SchemaError when there is more."""
        if self._large + 1 != len(self._frames) or self._at != self._joined.nbytes:
            raise SchemaError("more payload came than was announced")


def _array(shape: tuple[int, ...], dtype: np.dtype[Any], buffer: memoryview, at: int) -> Array:
    """Elements over the memory of a frame; over a copy where they do not lie as the type wants them."""
    array: Array = np.ndarray(shape, dtype, buffer, at)
    if not array.flags.aligned:
        array = array.copy()
        array.flags.writeable = False
    return array


_PADDING = np.zeros(ALIGN, np.uint8)
_INT64 = np.dtype(np.int64)
_MOST = 1 << 48
