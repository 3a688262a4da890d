"""Payload beside a message, for clients that do not share memory with the server: columns as frames, whole, not by row.

A column is its packed values and, unless it is fixed, rows + 1 int64 offsets. Pieces below JOIN_BYTES lie one after
another in the first frame, each at a multiple of 16 bytes; every larger one is a frame of its own, sent from where it
lies and received where it stays.
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
    return payload, [np.concatenate(small), *frames] if small else frames


def from_frames(payload: Payload, specs: Mapping[str, ColumnSpec], frames: Sequence[Any]) -> dict[str, Column]:
    """Columns over the memory of frames, read-only. Raises SchemaError unless they are what was said of them."""
    if len(payload.nbytes) != len(specs) or payload.rows < 0 or min(payload.nbytes, default=0) < 0:
        raise SchemaError("the payload is not that of the columns named")
    wanted = sum(n < JOIN_BYTES for n in _sizes(payload, specs)) > 0
    parts = [np.frombuffer(frame, np.uint8) if len(frame) else _PADDING[:0] for frame in frames]
    joined, large, at = (parts[0], iter(parts[1:]), 0) if wanted and parts else (_PADDING[:0], iter(parts), 0)
    pieces: list[Bytes] = []
    for size in _sizes(payload, specs):
        if size < JOIN_BYTES:
            piece, at = joined[at : at + size], at + -(-size // ALIGN) * ALIGN
        else:
            piece = next(large, _PADDING[:0])
        if piece.nbytes != size:
            raise SchemaError(f"{piece.nbytes} bytes of payload came where {size} were announced")
        pieces.append(piece)
    if next(large, None) is not None or at != joined.nbytes:
        raise SchemaError("more payload came than was announced")
    rest = iter(pieces)
    return {name: _column(name, spec, payload.rows, rest) for name, spec in specs.items()}


_PADDING = np.zeros(ALIGN, np.uint8)


def _sizes(payload: Payload, specs: Mapping[str, ColumnSpec]) -> list[int]:
    """Bytes of each piece, in order."""
    sizes: list[int] = []
    for nbytes, spec in zip(payload.nbytes, specs.values(), strict=True):
        sizes += (nbytes,) if spec.kind == "fixed" else (nbytes, 8 * (payload.rows + 1))
    return sizes


def _column(name: str, spec: ColumnSpec, rows: int, pieces: Any) -> Column:
    flat: Bytes = next(pieces)
    dtype, offsets, count = carrier(spec.dtype), None, rows
    if spec.kind != "fixed":
        offsets = _aligned(next(pieces), np.dtype(np.int64))
        if offsets[0] != 0 or (offsets[1:] < offsets[:-1]).any():
            raise SchemaError(f"column {name!r} has offsets that do not rise from 0")
        count = int(offsets[-1])
    if min(spec.shape, default=0) < 0 or flat.nbytes != dtype.itemsize * math.prod(spec.shape) * count:
        raise SchemaError(f"column {name!r} has {flat.nbytes} bytes, which are not {count} of {spec}")
    values = _aligned(flat, dtype).reshape(count, *spec.shape)
    return Column(spec, values, offsets)


def _aligned(flat: Bytes, dtype: np.dtype[Any]) -> Array:
    """Elements over the memory of bytes; over a copy where they do not lie as the type wants them."""
    array: Array = (flat if not flat.nbytes or flat.ctypes.data % dtype.alignment == 0 else flat.copy()).view(dtype)
    array.flags.writeable = False
    return array
