"""Rows: one array per property, indexed by id minus the oldest kept id; their partitions and columns. No loop over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import SchemaError
from ...types import ColumnSpec, check_column_name
from ...types.reports import TERMINAL
from .. import commands as cmd
from ..commands import Ids
from .context import Context

LIVE = 0  # state; terminal states are 1 + their place in TERMINAL
NONE = -1

Arrays = dict[str, npt.NDArray[Any]]
_FIELDS: dict[str, dict[str, tuple[Any, int]]] = {  # by owner: type and first value
    "rows": {
        "state": (np.uint8, LIVE),
        "first": (np.int64, NONE),  # id of the first row of the group
        "size": (np.int32, 0),  # rows of the group
        "partition": (np.int32, 0),
        "priority": (np.int32, 0),
    },
    "columns": {
        "columns": (np.uint64, 0),  # bit set of columns written
        "lost": (np.uint64, 0),  # bit set of columns with lost payload
    },
    "versions": {
        "version": (np.int64, NONE),  # loaded by the replica when the group was admitted
        "newest": (np.int64, NONE),  # loaded by the replica when it completed the row
        "current": (np.int64, NONE),  # current when its response was completed, or when it was put
        "deadline": (np.int64, NONE),  # NONE: not admitted
    },
    "metrics": {"length": (np.int32, NONE)},  # tokens of its response, where it is whole
    "steps": {
        "step": (np.int64, NONE),  # NONE: not selected
        "fate": (np.uint8, LIVE),  # future terminal state in an uncovered step, if not consumed
    },
    "tasks": {"todo": (np.int32, 0)},  # tasks that have not completed the row
    "budget": {
        "nbytes": (np.int64, 0),  # of payload written
        "charged": (np.int64, 0),  # counted against capacity_bytes: written or reserved
    },
}


class Rows:
    """Arrays by row, written by their owners alone. Ids are never reused; ended rows at the front are forgotten."""

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.count = 0
        self.ranked = False  # True once any row had a priority
        self._capacity = capacity
        self._arrays: dict[str, Arrays] = {}
        self._fills: dict[str, dict[str, float]] = {}
        for owner, fields in _FIELDS.items():
            self.arrays(owner, fields)
        self.measures = self.arrays("measures")  # by column; NaN: not known
        self.ended = np.zeros(1 + len(TERMINAL), np.int64)
        self.over = 0  # their sum

    def add(self, groups: int, group_size: int, partition: int, priority: int) -> Ids:
        """Add live rows in whole groups. Return their ids."""
        n = groups * group_size
        self._reserve(n)
        new = slice(self.count, self.count + n)
        ids = np.arange(self.base + self.count, self.base + self.count + n, dtype=np.int64)
        self.count += n
        arrays = self._arrays["rows"]
        arrays["first"][new] = ids if group_size == 1 else ids - (np.arange(n) % group_size)
        arrays["size"][new], arrays["partition"][new] = group_size, partition
        if priority:
            arrays["priority"][new], self.ranked = priority, True
        return ids

    def arrays(self, owner: str, new: Mapping[str, tuple[Any, float]] | None = None) -> Arrays:
        """Return the arrays of an owner by name, for the owner: others replace them when the table grows. ``new``:
        type and first value of arrays to add."""
        arrays, fills = self._arrays.setdefault(owner, {}), self._fills.setdefault(owner, {})
        for name, (dtype, fill) in (new or {}).items():
            arrays[name], fills[name] = np.full(self._capacity, fill, dtype), fill
        return arrays

    if TYPE_CHECKING:  # the fields are properties, made below

        def __getattr__(self, name: str) -> npt.NDArray[Any]: ...

    def at(self, ids: Ids) -> Ids:
        """Return the array indices of rows."""
        return ids - self.base

    def spot(self, ids: Ids) -> Ids | int:
        """Return the array indices to write rows to: a single one as int, written ten times as fast by numpy."""
        at = ids - self.base
        return int(at[0]) if len(at) == 1 else at

    def having(self, values: npt.NDArray[Any], value: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of live rows with this value in an array."""
        if len(ids) == 1:  # the usual case, without costly array operations
            place = int(ids[0]) - self.base
            return np.array([place >= 0 and self.state[place] == LIVE and values[place] == value])
        at = self.at(ids)
        kept = at >= 0  # a forgotten row had ended; its index is reused
        at = np.where(kept, at, 0)
        found: npt.NDArray[np.bool_] = kept & (self.state[at] == LIVE) & (values[at] == value)
        return found

    def live_ids(self) -> Ids:
        """Return all live rows."""
        return np.flatnonzero(self.state[: self.count] == LIVE) + self.base

    def members(self, ids: Ids) -> Ids:
        """Return all rows of the groups of ``ids``, in order, each once."""
        at = self.at(ids)
        firsts, where = np.unique(self.first[at], return_index=True)
        sizes = self.size[at][where].astype(np.int64)
        starts = np.repeat(firsts - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
        return starts + np.arange(sizes.sum())

    def finish(self, ids: Ids, state: int) -> None:
        """Set the terminal state of rows; it must be their first."""
        at = self.spot(ids)
        states = self._arrays["rows"]["state"]
        assert not np.count_nonzero(states[at]), "a row ends once"
        states[at] = state
        self.ended[state] += len(ids)
        self.over += len(ids)

    def _reserve(self, n: int) -> None:
        """Make room for n rows: forget ended rows at the front, or double. Amortised O(1) a row."""
        if self.count + n <= self._capacity:
            return
        live = np.flatnonzero(self.state[: self.count] == LIVE)
        gone = int(self.first[live[0]] - self.base) if len(live) else self.count  # whole groups only
        kept = self.count - gone
        capacity = self._capacity
        while kept + n > capacity // 2:  # leave half free, or every put would move rows
            capacity *= 2

        def moved(old: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
            new = np.full(capacity, fill, old.dtype)
            new[:kept] = old[gone : self.count]
            return new

        for owner, arrays in self._arrays.items():
            arrays.update({name: moved(values, self._fills[owner][name]) for name, values in arrays.items()})
        self.base += gone
        self.count = kept
        self._capacity = capacity


@dataclass
class Pin:
    """One version for all rows of a partition: the first one current from number ``first`` on. ``version``: NONE
    until it is current. ``last``: that of the partition's rows before. ``keep``: a version kept meanwhile."""

    first: int
    version: int = NONE
    last: int = NONE
    keep: int = NONE

    def bind(self, version: int) -> None:
        """Generate the rows with this version."""
        self.version = version


class Partitions:
    """``numbers``: by name; "" is 0. ``ended``: no row can be put anywhere; ``ended_names``: in these.
    ``group_sizes``: of the last put in each. ``pins``: by number, of partitions whose rows one version generates."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.numbers: dict[str, int] = {"": 0}
        self.group_sizes: dict[str, int] = {}
        self.ended = False
        self.ended_names: set[str] = set()
        self.pins: dict[int, Pin] = {}

    def number(self, name: str) -> int:
        """Return the number of a partition; NONE if no row was put in it and no task names it."""
        return self.numbers.get(name, NONE)

    def add(self, name: str, group_size: int = 0) -> int:
        """Return the number of a partition, a new one if needed. ``group_size``: of a put in it."""
        if group_size:
            self.group_sizes[name] = group_size
        return self.numbers.setdefault(name, len(self.numbers))

    def end(self, *names: str) -> None:
        """Take no more rows in partitions; without names, anywhere. Ends are final."""
        self.ended |= not names
        self.ended_names.update(names)

    def name_of(self, row: Ids) -> str:
        """Return the partition of the first row."""
        if len(self.numbers) == 1:
            return ""
        number = int(self._rows.partition[self._rows.at(row)][0])
        return next(name for name, known in self.numbers.items() if known == number)

    def split(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Split rows by partition number, in order; empty for no rows."""
        if len(self.numbers) == 1 or not len(ids):
            return [(0, ids)] if len(ids) else []
        where = self._rows.partition[self._rows.at(ids)]
        if (where == where[0]).all():
            return [(int(where[0]), ids)]
        return [(int(partition), ids[where == partition]) for partition in np.unique(where)]

    def closed(self, partition: int) -> bool:
        """True if no row can be put in the partition with this number; none beside the pinned ones."""
        return (
            self.ended
            or partition in self.pins
            or any(self.numbers.get(name) == partition for name in self.ended_names)
        )


MAX_COLUMNS = 64


class Columns:
    """``specs``: of written columns. ``kinds``: live rows by partition and bit set of columns."""

    def __init__(self, context: Context, rows: Rows, partitions: Partitions) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self._arrays, self._measures = rows.arrays("columns"), rows.measures
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
            if name in self._measures and not spec.measurable:
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

    def put(self, new: slice, count: int, partition: int, columns: cmd.Columns) -> None:
        """Note the columns of ``count`` new rows of a partition."""
        self._arrays["columns"][new] = bits = self.add(columns)
        self.count_kind(partition, bits, count)

    def write(self, at: Ids, before: Any, columns: cmd.Columns) -> None:
        """Note columns written to rows, by array index, with columns ``before``."""
        self.count(at, -1)
        self._arrays["columns"][at] = before | np.uint64(self.add(columns))
        self.count(at, 1)

    def lose(self, ids: Ids, columns: Iterable[str] | None = None) -> None:
        """Note columns of rows with lost payload, None for all of them."""
        at = self._rows.at(ids)
        self._arrays["lost"][at] |= self._rows.columns[at] if columns is None else np.uint64(self.mask(columns))

    def declare_measure(self, column: str) -> bool:
        """Make room for a measured column. Return False if there is."""
        if new := column not in self._measures:
            self._rows.arrays("measures", {column: (np.float64, np.nan)})
        return new

    def measure(self, ids: Ids, measures: dict[str, bytes], pick: Any) -> None:
        """Store values measured for samplers; ``pick`` selects the rows' entries."""
        for column, values in measures.items():
            if column in self._measures:
                self._measures[column][self._rows.at(ids)] = np.frombuffer(values, "<f8")[pick]

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


def _field(owner: str, name: str) -> property:
    def values(rows: Rows) -> npt.NDArray[Any]:
        return rows._arrays[owner][name]

    return property(values)


for _owner, _names in _FIELDS.items():
    for _name in _names:
        setattr(Rows, _name, _field(_owner, _name))
