"""Ragged: n arrays of different lengths as one buffer and n + 1 offsets, without padding.

lengths = Ragged.of([[1, 2, 3], [4]]).lengths        # array([3, 1])
flash_attn_varlen(q, k, v, ragged.cu_seqlens, ...)   # the packed form of attention kernels"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SchemaError

Array = np.ndarray[Any, Any]


class Ragged:
    """n rows of shape (length_i, *trailing), packed. ``values``: (sum of lengths, *trailing). ``offsets``: int64, (n
    + 1,), from 0, never falling. Row i is ``values[offsets[i]:offsets[i + 1]]``, a view. Immutable by convention;
    safe to share."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: Array, offsets: npt.NDArray[np.int64]) -> None:
        offsets = np.ascontiguousarray(offsets, dtype=np.int64)
        if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != len(values):
            raise SchemaError(f"offsets must run from 0 to {len(values)}, the number of values")
        if len(offsets) > 2 and (offsets[1:] < offsets[:-1]).any():
            raise SchemaError("offsets must not fall: a row would have a negative length")
        self.values = values
        self.offsets = offsets

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: npt.DTypeLike | None = None) -> Ragged:
        """Pack arrays or lists. Raises SchemaError unless dtypes and trailing shapes agree."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        if not arrays:
            return cls(np.empty(0, dtype or np.int64), np.zeros(1, np.int64))
        typed = [a for a, row in zip(arrays, rows, strict=True) if a is row]
        model = next((a for a in arrays if a.size), (typed or arrays)[0])  # an empty list has no dtype
        trailing = model.shape[1:]
        for i, array in enumerate(arrays):
            if array.ndim == 0 or (len(array) and array.shape[1:] != trailing):
                raise SchemaError(f"row {i} has shape {array.shape}; expected (length, {trailing})")
        full = [a for a in arrays if len(a)]
        found = {a.dtype for a in full}
        if len(found) > 1:
            raise SchemaError(f"rows have different dtypes: {sorted(map(str, found))}")
        values = np.concatenate(full) if full else np.empty((0, *trailing), model.dtype)
        return cls(values, cls._offsets(np.array([len(a) for a in arrays], np.int64)))

    @classmethod
    def from_lengths(cls, values: Array, lengths: npt.NDArray[np.int64]) -> Ragged:
        """Make rows of the given lengths over packed ``values``."""
        return cls(values, cls._offsets(lengths))

    @staticmethod
    def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return offsets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of the rows: int64, (n,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """The offsets as int32, (n + 1,), in the form of variable-length attention kernels."""
        return self.offsets.astype(np.int32)

    def padded(self, fill: Any = 0, *, length: int | None = None, side: str = "right") -> Array:
        """Return a copy of shape (n, ``length`` or the longest row, *trailing), filled on ``side``
        with ``fill``. Raises SchemaError for a row longer than ``length``."""
        lengths = self.lengths
        width = int(lengths.max(initial=0)) if length is None else length
        if len(lengths) and int(lengths.max()) > width:
            raise SchemaError(f"a row of length {int(lengths.max())} does not fit into length={width}")
        out = np.full((len(lengths), width, *self.values.shape[1:]), fill, self.values.dtype)
        places = np.arange(width)
        if side == "left":
            places = places[::-1]
        elif side != "right":
            raise ValueError(f"side must be 'left' or 'right', not {side!r}")
        out[places[None, :] < lengths[:, None]] = self.values
        return out

    def take(self, index: npt.NDArray[np.int64]) -> Ragged:
        """Return a copy of the rows at ``index``; repeats are allowed."""
        lengths = self.lengths[index]
        offsets = self._offsets(lengths)
        source = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[source], offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows start to stop as a view."""
        low, high = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[low:high], self.offsets[start : stop + 1] - low)

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of ``parts``; copies."""
        values = np.concatenate([p.values for p in parts])
        return cls(values, cls._offsets(np.concatenate([p.lengths for p in parts])))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"row {i} of {n}")
        i %= n
        row: Array = self.values[self.offsets[i] : self.offsets[i + 1]]
        return row

    def __iter__(self) -> Iterator[Array]:
        return (self.values[start:end] for start, end in itertools.pairwise(self.offsets.tolist()))

    def tolist(self) -> list[list[Any]]:
        """Return a list of Python numbers for each row, nested for trailing dimensions."""
        values = self.values.tolist()
        return [values[start:end] for start, end in itertools.pairwise(self.offsets.tolist())]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"
