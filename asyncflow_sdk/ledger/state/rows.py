"""Rows: one array per property, indexed by id minus the oldest kept id. No loop over rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...types.reports import TERMINAL
from ..commands import Ids

LIVE = 0  # state; terminal states are 1 + their place in TERMINAL
WAITING, READY, SELECTED, LEASED, DONE, APART = range(6)  # of a row in a task; APART: it never sees the row
TASK_STATES = ("waiting", "ready", "selected", "leased", "done")
NONE = -1
ANY = 2**31 - 1

_FIELDS: dict[str, tuple[Any, int]] = {
    "state": (np.uint8, LIVE),
    "first": (np.int64, NONE),  # id of the first row of the group
    "size": (np.int32, 0),  # rows of the group
    "partition": (np.int32, 0),
    "priority": (np.int32, 0),
    "columns": (np.uint64, 0),  # bit set of columns written
    "version": (np.int64, NONE),  # loaded by the replica when the group was admitted
    "newest": (np.int64, NONE),  # loaded by the replica when it completed the row
    "current": (np.int64, NONE),  # current when its response was completed, or when it was put
    "length": (np.int32, NONE),  # tokens of its response, where it is whole
    "deadline": (np.int64, NONE),  # NONE: not admitted
    "step": (np.int64, NONE),  # NONE: not selected
    "todo": (np.int32, 0),  # tasks that have not completed the row
    "fate": (np.uint8, LIVE),  # future terminal state in an uncovered step, if not consumed
    "nbytes": (np.int64, 0),  # of payload written
    "charged": (np.int64, 0),  # counted against capacity_bytes: written or reserved
    "put_columns": (np.uint64, 0),  # bit set of columns that came with the put
    "put_bytes": (np.int64, 0),  # of their payload
    "lost": (np.uint64, 0),  # bit set of columns with lost payload
    "parent": (np.int64, NONE),  # the row that this one replaces
}
_TASK_FIELDS: dict[str, tuple[Any, int]] = {
    "state": (np.uint8, WAITING),
    "token": (np.int64, NONE),  # of the lease that holds the row
    "attempts": (np.int32, 0),  # leases lost
    "together": (np.int32, ANY),  # most units (rows, or whole groups) that one worker may hold with it
}


class Rows:
    """A struct of arrays. Ids are never reused; ended rows at the front are forgotten."""

    def __init__(self, capacity: int = 1024) -> None:
        self.base = 0
        self.count = 0
        self.ranked = False  # True once any row had a priority
        self._capacity = capacity
        self._fields = {n: np.full(capacity, fill, dtype) for n, (dtype, fill) in _FIELDS.items()}
        self._tasks: dict[str, dict[str, npt.NDArray[Any]]] = {}
        self._arrivals: dict[str, npt.NDArray[np.int32]] = {}
        self.measures: dict[str, npt.NDArray[np.float64]] = {}  # by column; NaN: not known
        self.ended = np.zeros(1 + len(TERMINAL), np.int64)
        self.over = 0  # their sum

    def add(self, groups: int, group_size: int) -> Ids:
        """Add live rows in whole groups. Return their ids."""
        n = groups * group_size
        self._reserve(n)
        new = slice(self.count, self.count + n)
        ids = np.arange(self.base + self.count, self.base + self.count + n, dtype=np.int64)
        self.count += n
        self._fields["first"][new] = ids if group_size == 1 else ids - (np.arange(n) % group_size)
        self._fields["size"][new] = group_size
        return ids

    def add_task(self, name: str) -> None:
        """Add arrays for a task."""
        self._tasks[name] = {n: np.full(self._capacity, f, t) for n, (t, f) in _TASK_FIELDS.items()}
        self._arrivals[name] = np.zeros(self._capacity, np.int32)

    def add_measure(self, column: str) -> None:
        """Add an array for a measured column."""
        self.measures[column] = np.full(self._capacity, np.nan)

    if TYPE_CHECKING:  # the fields are properties, made below

        def __getattr__(self, name: str) -> npt.NDArray[Any]: ...

    def task(self, name: str, field: str) -> npt.NDArray[Any]:
        """Return an array of a task."""
        return self._tasks[name][field]

    def at(self, ids: Ids) -> Ids:
        """Return the array indices of rows."""
        return ids - self.base

    def write_index(self, at: Ids) -> Ids | int:
        """Return indices to write to: a single one as int, which numpy writes ten times as fast."""
        return int(at[0]) if len(at) == 1 else at

    def having(self, task: str, field: str, value: int, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of live rows with this value in a task."""
        values = self._tasks[task][field]
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

    def arrive(self, task: str, ids: Ids) -> Ids:
        """Note ready rows of a task with whole groups. Return the rows of groups now complete."""
        arrivals = self._arrivals[task]
        firsts = self.at(self.first[self.at(ids)])
        np.add.at(arrivals, firsts, 1)
        whole = firsts[arrivals[firsts] == self.size[firsts]]
        return self.members(np.unique(whole) + self.base) if len(whole) else whole

    def excuse(self, task: str, live: Ids) -> None:
        """Count ended rows as arrived, for a new task with whole groups."""
        firsts, there = np.unique(self.first[self.at(live)], return_counts=True)
        self._arrivals[task][self.at(firsts)] = self.size[self.at(firsts)] - there

    def finish(self, ids: Ids, state: int) -> None:
        """Set the terminal state of rows; it must be their first."""
        at = self.write_index(self.at(ids))
        assert not np.count_nonzero(self.state[at]), "a row ends once"
        self.state[at] = state
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

        self._fields = {name: moved(self._fields[name], fill) for name, (_, fill) in _FIELDS.items()}
        for name, fields in self._tasks.items():
            self._tasks[name] = {f: moved(fields[f], fill) for f, (_, fill) in _TASK_FIELDS.items()}
            self._arrivals[name] = moved(self._arrivals[name], 0)
        self.measures = {column: moved(values, np.nan) for column, values in self.measures.items()}
        self.base += gone
        self.count = kept
        self._capacity = capacity


def _field(name: str) -> property:
    def values(rows: Rows) -> npt.NDArray[Any]:
        return rows._fields[name]

    return property(values)


for _name in _FIELDS:
    setattr(Rows, _name, _field(_name))
