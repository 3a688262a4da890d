"""Columns of the queue: a bit and a specification each, and counts of live rows by columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ...errors import SchemaError
from ...types import ColumnSpec, check_column_name
from .. import commands as cmd
from ..commands import Ids
from .context import Context
from .partitions import Partitions
from .rows import Rows

MAX_COLUMNS = 64


class Columns:
    """``specs``: of written columns. ``kinds``: live rows by partition and bit set of columns."""

    def __init__(self, context: Context, rows: Rows, partitions: Partitions) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self.specs: dict[str, ColumnSpec] = {}
        self.kinds: dict[tuple[int, int], int] = {}
        self._bits: dict[str, int] = {}  # position of each column's bit

    def bit(self, column: str) -> np.uint64:
        """Return the bit of a column, a new one if needed; call ``check_names`` first."""
        return np.uint64(1 << self._bits.setdefault(column, len(self._bits)))

    def mask(self, columns: Iterable[str]) -> int:
        """Return the bits of the columns written so far."""
        mask = 0
        for name in columns:
            if name in self.specs:
                mask |= 1 << self._bits[name]
        return mask

    def names(self, mask: int) -> tuple[str, ...]:
        """Return the columns of a bit set."""
        return tuple(name for name, at in self._bits.items() if mask >> at & 1)

    def contains(self, mask: int, column: str) -> bool:
        """True if a bit set has this column."""
        return bool(mask >> self._bits[column] & 1)

    def having(self, column: str) -> Ids:
        """Return live rows with a column."""
        live = self._rows.live_ids()
        if column not in self._bits:
            return live[:0]
        has: Ids = live[(self._rows.columns[self._rows.at(live)] & self.bit(column)) != 0]
        return has

    def check_names(self, columns: Iterable[str]) -> None:
        """Raise SchemaError for an invalid name or for too many columns."""
        if self._bits.keys() >= set(columns):
            return
        new = sorted(set(columns) - self._bits.keys())
        for name in new:
            check_column_name(name)
        if len(self._bits) + len(new) > MAX_COLUMNS:
            raise SchemaError(f"a queue holds at most {MAX_COLUMNS} columns; {new[-1]!r} is one too many")

    def check(self, columns: cmd.Columns) -> None:
        """Raise SchemaError for columns in conflict with written ones."""
        for name, spec in columns.items():
            known = self.specs.get(name)
            if known is not None and known is not spec and known != spec:
                raise SchemaError(f"column {name!r} is {known}; it cannot take {spec}")
            if name in self._rows.measures and not spec.measurable:
                raise SchemaError(f"column {name!r} is measured by a sampler; {spec} has no number a row")
        self.check_names(columns)

    def add(self, columns: cmd.Columns) -> int:
        """Note written columns and return their bits."""
        for name, spec in columns.items():
            if name not in self.specs:
                self.specs[name] = spec
                self._bits.setdefault(name, len(self._bits))
                self._context.wake_puts()  # a conflicting parked put can be refused now
        return self.mask(columns)

    def measure(self, ids: Ids, measures: dict[str, bytes], pick: Any) -> None:
        """Store values measured for samplers; ``pick`` selects the rows' entries."""
        for column, values in measures.items():
            if column in self._rows.measures:
                self._rows.measures[column][self._rows.at(ids)] = np.frombuffer(values, "<f8")[pick]

    def count(self, at: Ids, change: int) -> None:
        """Add (``change`` 1) or remove (-1) live rows, by array index, in ``kinds``."""
        rows = self._rows
        if len(self._partitions.numbers) == 1:
            split = [(0, at)]
        else:
            split = [(partition, rows.at(ids)) for partition, ids in self._partitions.split(at + rows.base)]
        for partition, places in split:
            columns = rows.columns[places]
            if not len(columns):
                continue
            if len(columns) == 1 or (columns == columns[0]).all():  # the usual case
                self.count_kind(partition, int(columns[0]), change * len(columns))
                continue
            for kind, count in zip(*np.unique(columns, return_counts=True), strict=True):
                self.count_kind(partition, int(kind), change * int(count))

    def count_kind(self, partition: int, kind: int, change: int) -> None:
        """Add ``change`` live rows of one kind."""
        left = self.kinds.get((partition, kind), 0) + change
        if left:
            self.kinds[partition, kind] = left
        else:
            self.kinds.pop((partition, kind), None)
