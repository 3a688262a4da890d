"""Rows: one array per property, indexed by id minus the oldest kept id; partitions, columns, room. No row loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...errors import SchemaError
from ...types import ColumnSpec, check_column_name
from ...types.defaults import KEEP_VERSIONS, MAX_STALENESS
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
    """Arrays by row, written by their owners alone. Ids are never reused; ended rows at the front are forgotten.

    The arrays of ``_FIELDS`` are attributes, and replaced when the table grows."""

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.count = 0
        self.ranked = False  # True once any row had a priority
        self._capacity = capacity
        self._arrays: dict[str, Arrays] = {}
        self._fills: dict[str, dict[str, float]] = {}
        for owner, fields in _FIELDS.items():
            vars(self).update(self.arrays(owner, fields))
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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> npt.NDArray[Any]: ...

    def at(self, ids: Ids) -> Ids:
        """Return the array indices of rows."""
        return ids - self.base

    def spot(self, ids: Ids) -> Ids | int:
        """Return the array indices to write rows to: a single one as int, written ten times as fast by numpy."""
        at = ids - self.base
        return int(at[0]) if at.size == 1 else at

    def having(self, values: npt.NDArray[Any], value: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of live rows with this value in an array."""
        if ids.size == 1:  # the usual case, without costly array operations
            place = int(ids[0]) - self.base
            return np.array([place >= 0 and self.state[place] == LIVE and values[place] == value])
        at = ids - self.base
        kept = at >= 0  # a forgotten row had ended; its index is reused
        at = np.maximum(at, 0)
        found: npt.NDArray[np.bool_] = kept & (self.state[at] == LIVE) & (values[at] == value)
        return found

    def live(self, ids: Ids) -> Ids:
        """Return the live ones of some rows."""
        return ids[self.having(self.state, LIVE, ids)]

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
        self.ended[state] += ids.size
        self.over += ids.size

    def _reserve(self, n: int) -> None:
        """Make room for n rows: forget ended rows at the front, or double. Amortised O(1) a row."""
        if self.count + n <= self._capacity:
            return
        live = np.flatnonzero(self.state[: self.count] == LIVE)
        gone = int(self.first[live[0]] - self.base) if live.size else self.count  # whole groups only
        kept = self.count - gone
        capacity = self._capacity
        while kept + n > capacity // 2:  # leave half free, or every put would move rows
            capacity *= 2
        for owner, arrays in self._arrays.items():
            for name, old in arrays.items():
                arrays[name] = new = np.full(capacity, self._fills[owner][name], old.dtype)
                new[:kept] = old[gone : self.count]
            if owner in _FIELDS:
                vars(self).update(arrays)
        self.base += gone
        self.count = kept
        self._capacity = capacity


@dataclass(frozen=True)
class Pin:
    """One version for all rows of a partition: the first one current from number ``first`` on. ``version``: NONE
    until it is current. ``last``: the version of the partition's rows before. ``keep``: a version kept meanwhile."""

    first: int
    version: int = NONE
    last: int = NONE
    keep: int = NONE


class Partitions:
    """``numbers``: by name; "" is 0. ``names``: the names by number. ``ended``: no row can be put anywhere;
    ``ended_names``: in these. ``group_sizes``: of the last put in each. ``pins``: of partitions of one version."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.numbers: dict[str, int] = {"": 0}
        self.names = [""]
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
        if name not in self.numbers:
            self.numbers[name] = len(self.names)
            self.names.append(name)
        return self.numbers[name]

    def end(self, *names: str) -> None:
        """Take no more rows in partitions; without names, anywhere. Ends are final."""
        self.ended |= not names
        self.ended_names.update(names)

    def split(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Split rows by partition number, in order; empty for no rows."""
        if len(self.names) == 1 or not ids.size:
            return [(0, ids)] if ids.size else []
        where = self._rows.partition[self._rows.at(ids)]
        if (where == where[0]).all():
            return [(int(where[0]), ids)]
        return [(int(partition), ids[where == partition]) for partition in np.unique(where)]

    def closed(self, name: str) -> bool:
        """True if no row can be put in a partition; none beside the pinned ones."""
        return self.ended or self.number(name) in self.pins or name in self.ended_names


MAX_COLUMNS = 64


class Columns:
    """``specs``: of written columns. ``kinds``: live rows by partition and bit set of columns."""

    def __init__(self, context: Context, rows: Rows, partitions: Partitions) -> None:
        self._context, self._rows, self._partitions = context, rows, partitions
        self._arrays, self._measures = rows.arrays("columns"), rows.measures
        self.specs: dict[str, ColumnSpec] = {}
        self.kinds: dict[tuple[int, int], int] = {}
        self._bits: dict[str, int] = {}  # of each column, a power of 2

    def bit(self, column: str) -> np.uint64:
        """Return the bit of a column, a new one if needed; call ``check_names`` first."""
        return np.uint64(self._bits.setdefault(column, 1 << len(self._bits)))

    def mask(self, columns: Iterable[str]) -> int:
        """Return the bits of the columns written so far."""
        mask = 0
        for name in columns:
            if name in self.specs:
                mask |= self._bits[name]
        return mask

    def contains(self, mask: int, column: str) -> bool:
        """True if a bit set has this column."""
        return bool(mask & self._bits[column])

    def having(self, column: str) -> Ids:
        """Return live rows with a column."""
        live, bit = self._rows.live_ids(), np.uint64(self._bits.get(column, 0))
        has: Ids = live[(self._rows.columns[self._rows.at(live)] & bit) != 0]
        return has

    def check_names(self, columns: Iterable[str]) -> None:
        """Raise SchemaError for an invalid name or for too many columns."""
        new = sorted(set(columns) - self._bits.keys())
        for name in new:
            check_column_name(name)
        if new and len(self._bits) + len(new) > MAX_COLUMNS:
            raise SchemaError(f"a queue holds at most {MAX_COLUMNS} columns; {new[-1]!r} is one too many")

    def check(self, columns: cmd.Columns) -> None:
        """Raise SchemaError for columns in conflict with written ones."""
        known = True
        for name, spec in columns.items():
            if name not in self.specs:
                known = False
            elif self.specs[name] != spec:
                raise SchemaError(f"column {name!r} is {self.specs[name]}; it cannot take {spec}")
            if name in self._measures and not spec.measurable:
                raise SchemaError(f"column {name!r} is measured by a sampler; {spec} has no number a row")
        if not known:
            self.check_names(columns)

    def add(self, columns: cmd.Columns) -> int:
        """Note written columns and return their bits."""
        mask = 0
        for name, spec in columns.items():
            if name not in self.specs:
                self.specs[name] = spec
                self.bit(name)
                self._context.wake_puts()  # a conflicting parked put can be refused now
            mask |= self._bits[name]
        return mask

    def put(self, new: slice, count: int, partition: int, columns: cmd.Columns) -> int:
        """Note the columns of ``count`` new rows of a partition, and return their bits."""
        self._arrays["columns"][new] = bits = self.add(columns)
        self._count_kind(partition, bits, count)
        return bits

    def write(self, ids: Ids, columns: cmd.Columns) -> int:
        """Note columns written to rows. Return their bits."""
        bits = self.add(columns)
        self.count(ids, bits)
        self._arrays["columns"][ids - self._rows.base] |= np.uint64(bits)
        return bits

    def count(self, ids: Ids, written: int | None = None) -> None:
        """Count live rows as ended or, before ``written`` is added to their bits, as of another kind."""
        for partition, part in self._partitions.split(ids):
            columns = self._rows.columns[part - self._rows.base]
            alike = not (columns != columns[0]).nonzero()[0].size  # the usual case
            kinds = [(columns[0], part.size)] if alike else zip(*np.unique(columns, return_counts=True), strict=True)
            for kind, rows in kinds:
                self._count_kind(partition, int(kind), -int(rows))
                if written is not None:
                    self._count_kind(partition, int(kind) | written, int(rows))

    def _count_kind(self, partition: int, kind: int, change: int) -> None:
        if left := self.kinds.pop((partition, kind), 0) + change:
            self.kinds[partition, kind] = left

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


MAX_NUMBER = 1 << 61
"""The largest version or limit: the sum of two fits int64."""


@dataclass
class QueueLimits:
    """See ``Configure``. None: no last step, no homes expected. ``max_swapping``, ``quorum`` 0: off."""

    capacity_rows: int = 1 << 40
    capacity_bytes: int = MAX_NUMBER
    row_bytes: int = 0
    max_staleness: int = MAX_STALENESS
    steps: int | None = None
    first_step: int = 0
    checkpoints: bool = False
    keep_versions: int = KEEP_VERSIONS
    max_swapping: int = 0
    quorum: int = 0
    home_silence_s: float | None = None


LEAST = {
    "capacity_rows": 1, "max_staleness": 0, "steps": 1, "capacity_bytes": 1, "row_bytes": 0, "keep_versions": 1,
    "max_swapping": 0, "quorum": 0, "first_step": 0, "home_silence_s": 0,
}  # fmt: skip
"""The least value of each numeric limit."""


class Budget:
    """``put``: rows ever put. ``charged``: bytes of live rows, taken or reserved. ``largest_row``:
    bytes of the largest ended row. ``held``: complete rows of uncovered steps."""

    def __init__(self, rows: Rows, limits: QueueLimits) -> None:
        self._rows, self._limits, self._arrays = rows, limits, rows.arrays("budget")
        self.put = 0
        self.charged = 0
        self.largest_row = 0
        self.held = 0

    @property
    def occupied(self) -> int:
        """Rows counted against ``capacity_rows``."""
        return self.put - self._rows.over - self.held

    @property
    def reserve(self) -> int:
        """Bytes reserved for a new row."""
        return self._limits.row_bytes or self.largest_row

    def charge(self, at: Ids, nbytes: int) -> None:
        """Charge ``nbytes`` of payload to rows, by array index, in equal shares."""
        if not nbytes:
            return
        sizes, charges = self._arrays["nbytes"], self._arrays["charged"]
        sizes[at] += -(-nbytes // at.size)
        before = charges[at]
        after = np.maximum(sizes[at], before)
        charges[at] = after
        self.charged += int((after - before).sum())

    def charge_new(self, new: slice, count: int, nbytes: int) -> None:
        """Count new rows, and charge them with their share of ``nbytes``, or with the reserve if that is more."""
        self.put += count
        share = -(-nbytes // count)
        self._arrays["nbytes"][new] = share
        self._arrays["charged"][new] = charged = max(share, self.reserve)
        self.charged += count * charged

    def hold(self, count: int) -> None:
        """Count complete rows kept for a checkpoint, or, if negative, released."""
        self.held += count

    def release(self, at: Ids) -> None:
        """Release the charges of ended rows, by array index."""
        self.charged -= int(self._rows.charged[at].sum())
        self.largest_row = max(self.largest_row, int(self._rows.nbytes[at].max(initial=0)))
