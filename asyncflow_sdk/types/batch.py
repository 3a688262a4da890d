"""Batch: n rows, stored column by column, as views of shared memory.

batch["reward"], batch["response_ids"], batch["response"]    # numpy (n,), read-only; Ragged; list of str
batch.torch("logprobs")                                      # (values, cu_seqlens): packed tensors, writable
batch.padded("response_ids")                                 # numpy (n, longest)"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SchemaError
from .columns import Column, ColumnSpec, Kind, Values, pack, unpack
from .dtypes import to_torch
from .ragged import Array, Ragged
from .spans import LOSS_MASK, VERSION_SPANS, TokenAges, token_ages


class Batch(Mapping[str, Values]):
    """An immutable set of rows. Thread-safe for reading. ``ids``: int64 (n,), row numbers. ``groups``: int64 (n,),
    equal for rows of one prompt. ``version_step_offsets``: maps versions to steps; see ``token_steps``.
    ``completed_at``: int64 (n,), the current version at each row's completion, for the rows of a step; else None.
    numpy views are read-only. Writing into torch tensors never changes stored values."""

    def __init__(
        self,
        ids: npt.NDArray[np.int64],
        groups: npt.NDArray[np.int64],
        columns: Mapping[str, Column],
        writable: Callable[[str], Array | None] | None = None,
        *,
        completed_at: npt.NDArray[np.int64] | None = None,
        version_step_offsets: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.ids = ids
        self.groups = groups
        self.columns = dict(columns)
        self.completed_at = completed_at
        self.version_step_offsets = version_step_offsets
        self._writable = writable
        self._unpacked: dict[str, Values] = {}

    @classmethod
    def of(cls, columns: Mapping[str, Any], groups: npt.ArrayLike | None = None) -> Batch:
        """Make a batch from values in memory, for tests and for engines used without a queue."""
        packed = {name: pack(name, value) for name, value in columns.items()}
        sizes = {len(column) for column in packed.values()}
        if len(sizes) > 1:
            raise SchemaError(f"columns have different numbers of rows: {sorted(sizes)}")
        n = sizes.pop() if sizes else 0
        ids = np.arange(n, dtype=np.int64)
        return cls(ids, ids if groups is None else np.asarray(groups, np.int64), packed)

    def __getitem__(self, name: str) -> Values:
        if name not in self._unpacked:
            self._unpacked[name] = unpack(self._column(name))
        return self._unpacked[name]

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def array(self, name: str) -> Array:
        """Return a fixed column: (n, *shape). Raises SchemaError for another kind."""
        fixed: Array = self._checked(name, "fixed")
        return fixed

    def ragged(self, name: str) -> Ragged:
        """Return a ragged column. Raises SchemaError for another kind."""
        ragged: Ragged = self._checked(name, "ragged")
        return ragged

    def texts(self, name: str) -> list[str]:
        """Return a text column. Raises SchemaError for another kind."""
        texts: list[str] = self._checked(name, "text")
        return texts

    def _checked(self, name: str, kind: Kind) -> Any:
        if self.spec(name).kind != kind:
            raise SchemaError(f"column {name!r} is {self.spec(name)}, not {kind}")
        return self[name]

    def padded(self, name: str, fill: Any = 0, *, length: int | None = None, side: str = "right") -> Array:
        """Return a ragged column as a copy of shape (n, ``length`` or the longest row, ...)."""
        return self.ragged(name).padded(fill, length=length, side=side)

    def torch(self, name: str) -> Any:
        """Return a fixed column as a tensor (n, *shape), a ragged one as (values, cu_seqlens int32 (n + 1,)). Rows in
        one segment are not copied. Writing changes no stored value or numpy view. Raises SchemaError for others."""
        column = self._column(name)
        if column.spec.kind not in ("fixed", "ragged"):
            raise SchemaError(f"column {name!r} is {column.spec.kind}; torch has no such tensors")
        values = self._writable(name) if self._writable is not None else None
        tensor = to_torch(column.values.copy() if values is None else values)
        if column.offsets is None:
            return tensor
        return tensor, to_torch(self.ragged(name).cu_seqlens)

    def to_torch(self) -> dict[str, Any]:
        """Return every column as ``torch(name)`` does; text, bytes and records as lists."""
        tensors = {"fixed", "ragged"}
        return {n: self.torch(n) if c.spec.kind in tensors else self[n] for n, c in self.columns.items()}

    def ages(self, step: int) -> TokenAges:
        """Return the ages of the trained tokens. Raises SchemaError without version spans."""
        return token_ages(
            self.ragged(VERSION_SPANS), step, self.completed_at, self.version_step_offsets, loss_mask(self)
        )

    def take(self, index: npt.ArrayLike) -> Batch:
        """Return a copy of the rows at positions ``index``, numbers or a bool mask."""
        rows = np.asarray(index)
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows.astype(np.int64)
        return Batch(self.ids[rows], self.groups[rows], {n: take(c, rows) for n, c in self.columns.items()})

    def spec(self, name: str) -> ColumnSpec:
        """Return the type of a column."""
        return self._column(name).spec

    def _column(self, name: str) -> Column:
        try:
            return self.columns[name]
        except KeyError:
            known = ", ".join(sorted(self.columns))
            raise SchemaError(f"no column {name!r} in this batch; it has: {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        """Return the number of columns, as in any Mapping; ``rows`` is the number of rows."""
        return len(self.columns)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.ids)

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {column.spec}" for name, column in self.columns.items())
        return f"{type(self).__name__}({self.rows} rows; {columns})"


def loss_mask(batch: Batch) -> Ragged | None:
    """Return a bool for each response token, True if it is trained; None if all are."""
    return batch.ragged(LOSS_MASK) if LOSS_MASK in batch.columns else None


def take(column: Column, index: npt.NDArray[np.int64]) -> Column:
    """Return a copy of the rows of a column at positions ``index``."""
    if column.offsets is None:
        return Column(column.spec, column.values[index], None)
    picked = Ragged(column.values, column.offsets).take(index)
    return Column(column.spec, picked.values, picked.offsets)


def concat(parts: list[Column]) -> Column:
    """Concatenate columns of one spec; copies, unless there is only one."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].offsets is None:
        return Column(parts[0].spec, np.concatenate([p.values for p in parts]), None)
    joined = Ragged.concat([Ragged(p.values, p.offsets) for p in parts if p.offsets is not None])
    return Column(parts[0].spec, joined.values, joined.offsets)
