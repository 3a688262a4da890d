"""What the ledger remembers of rows that are gone: keys of puts with what was lost of them, and groups that failed with the reasons.

Both are bounded: a key is remembered while rows of its put live, and of the last ``KEYS`` keyed puts; of failed
groups the last ``LETTERS``, of one group the last ``REASONS`` reasons, ``LETTER`` letters of each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from ..errors import SchemaError
from . import commands as cmd
from .commands import Ids
from .rows import LIVE, Rows

KEYS = 100_000
LETTERS = 1000
REASONS = 16
LETTER = 5000
DIGEST = 16
"""Bytes of a column's digest."""
_NO_GROUPS: Ids = np.empty(0, np.int64)


class KeyedPut(NamedTuple):
    """A put with a key: rows ``first`` to ``first + size - 1``. ``digest``: ``DIGEST`` bytes for each of ``columns``, or
    none where the client sent none."""

    first: int
    size: int
    group_size: int
    partition: str
    columns: tuple[str, ...]
    digest: bytes

    def differences(self, put: cmd.Put) -> list[str]:
        """What another put with the same key has that this one had not, in words. Empty if they are the same."""
        found = []
        groups = self.size // self.group_size
        if put.group_size != self.group_size:
            found.append(f"group_size={put.group_size} instead of {self.group_size}")
        if put.groups != groups:
            found.append(f"{put.groups} entries instead of {groups}")
        if put.partition != self.partition:
            found.append(f"partition {put.partition!r} instead of {self.partition!r}")
        if set(put.columns) != set(self.columns):
            found.append(f"columns {', '.join(sorted(put.columns))} instead of {', '.join(sorted(self.columns))}")
        elif not found and put.digest and self.digest:
            digests = _by_column(self.columns, self.digest)
            other = [
                name for name, digest in _by_column(tuple(put.columns), put.digest).items() if digest != digests[name]
            ]
            found += [f"other values in column {name!r}" for name in other]
        return found


class KeyedPuts:
    """Puts by their keys, in order of their rows, and what of them was lost and may be put again. ``limit``: of keys whose
    rows have ended."""

    TRANSIENT = frozenset({"_limit"})

    def __init__(self, limit: int = KEYS) -> None:
        self._limit = limit
        self._puts: dict[str, KeyedPut] = {}
        self._order: list[tuple[int, str]] = []  # first row and key, by row; a forgotten front is cut off in bulk
        self._forgotten = 0
        self._lost: dict[str, Ids] = {}  # groups, by number in their put, that failed because payload was lost
        self._again: dict[str, list[tuple[int, Ids]]] = {}  # first row and groups of what was put again

    def get(self, key: str) -> KeyedPut | None:
        """The put with this key."""
        return self._puts.get(key)

    def lacking(self, put: cmd.Put) -> Ids | None:
        """Groups that a put adds, by number: those lost since its key was put first. None: all, the key is new.
        Raises SchemaError if the key was put with something else."""
        known = self._puts.get(put.key) if put.key else None
        if known is None:
            return None
        if differences := known.differences(put):
            raise SchemaError(
                f"key {put.key!r} names another put, of rows {known.first} to {known.first + known.size - 1}: this one has"
                f" {'; '.join(differences)}. Nothing was put; give other rows another key"
            )
        return self._lost.get(put.key, _NO_GROUPS)

    def rows_in(self, put: cmd.Put) -> int:
        """How many rows a put adds that is not refused."""
        groups = self._lost.get(put.key, _NO_GROUPS) if put.key in self._puts else range(put.groups)
        return len(groups) * put.group_size

    def add(self, put: cmd.Put, first: int, rows: Rows) -> None:
        """A put with a new key made rows from ``first`` on."""
        columns = tuple(put.columns)
        count = put.groups * put.group_size
        self._puts[put.key] = KeyedPut(first, count, put.group_size, put.partition, columns, put.digest)
        self._order.append((first, put.key))
        while len(self._puts) > self._limit:
            oldest, key = self._order[self._forgotten]
            if key in self._puts and self._puts[key].first == oldest:
                if not self._is_over(key, rows):
                    break
                for known in (self._puts, self._lost, self._again):
                    known.pop(key, None)
            self._forgotten += 1
        if self._forgotten > self._limit:
            del self._order[: self._forgotten]
            self._forgotten = 0

    def add_again(self, key: str, first: int, groups: Ids) -> None:
        """Lost groups of a put were put again, as rows from ``first`` on."""
        del self._lost[key]
        self._again.setdefault(key, []).append((first, groups))
        self._order.append((first, key))

    def lose(self, ids: Ids) -> None:
        """Rows failed because payload was lost; their groups may be put again."""
        for key, _, groups in self.by_put(ids):
            if key:
                self._lost[key] = np.union1d(self._lost.get(key, _NO_GROUPS), groups)

    def newest(self, prefix: str) -> cmd.LastPut:
        """The newest put whose key begins so."""
        for first, key in reversed(self._order):
            if key.startswith(prefix) and key in self._puts and self._puts[key].first == first:
                return cmd.LastPut(key=key, first=first, count=self._puts[key].size)
        return cmd.LastPut()

    def rows_of(self, key: str) -> Ids:
        """Every row that was put with a key. Raises KeyError."""
        put = self._puts[key]
        parts = [(first, len(groups) * put.group_size) for first, groups in self._again.get(key, ())]
        return np.concatenate([np.arange(first, first + count) for first, count in [(put.first, put.size), *parts]])

    def find(self, row: int) -> tuple[str, int]:
        """The key of the put that made a row, and which of its groups the row is in."""
        at = bisect_right(self._order, row, key=lambda put: put[0]) - 1
        if at >= self._forgotten:
            first, key = self._order[at]
            groups = self._groups(first, key, np.array([row]))
            if len(groups):
                return key, int(groups[0])
        return "", -1

    def by_put(self, ids: Ids) -> list[tuple[str, Ids, Ids]]:
        """Rows, sorted, by the puts that made them: key, rows, and of which group of the put each is; "" and -1 where
        there is no key."""
        order = self._order[self._forgotten :]
        where = np.searchsorted(np.array([first for first, _ in order], np.int64), ids, side="right") - 1
        found: list[tuple[str, Ids, Ids]] = []
        for part in np.split(ids, np.flatnonzero(np.diff(where)) + 1) if len(ids) else ():
            at = bisect_right(order, int(part[0]), key=lambda put: put[0]) - 1
            groups = self._groups(*order[at], part) if at >= 0 else _NO_GROUPS
            if len(groups):
                found.append((order[at][1], part[: len(groups)], groups))
            if len(part) > len(groups):
                rest = part[len(groups) :]
                found.append(("", rest, np.full(len(rest), -1)))
        return found

    def _groups(self, first: int, key: str, ids: Ids) -> Ids:
        """Of rows from ``first`` on, sorted, those in front that a put with ``key`` made there: their groups."""
        put = self._puts.get(key)
        if put is None:
            return _NO_GROUPS
        if put.first == first:
            return (ids[ids < first + put.size] - first) // put.group_size
        groups = next((groups for begins, groups in self._again.get(key, ()) if begins == first), _NO_GROUPS)
        found: Ids = groups[(ids[ids < first + len(groups) * put.group_size] - first) // put.group_size]
        return found

    def _is_over(self, key: str, rows: Rows) -> bool:
        ids = self.rows_of(key)
        return not (rows.state[rows.at(ids[ids >= rows.base])] == LIVE).any()


def _by_column(columns: tuple[str, ...], digest: bytes) -> dict[str, bytes]:
    return {name: digest[DIGEST * at : DIGEST * (at + 1)] for at, name in enumerate(columns)}


class Letters:
    """Why rows lost their leases, and the groups that did so too often."""

    def __init__(self) -> None:
        self.groups: deque[cmd.FailedGroup] = deque(maxlen=LETTERS)
        self.total = 0
        self._reasons: dict[int, deque[str]] = {}  # first row of a live group → reasons

    def blame(self, firsts: Ids, reason: str) -> None:
        """Groups (by their first rows) lost a lease."""
        for first in np.unique(firsts).tolist():
            self._reasons.setdefault(first, deque(maxlen=REASONS)).append(reason[:LETTER])

    def failed(self, **group: Any) -> None:
        """A group failed for good."""
        self._keep(cmd.FailedGroup(reasons=tuple(self._reasons.get(group["first"], ())), **group))

    def _keep(self, letter: cmd.FailedGroup) -> None:
        self.total += 1
        self.groups.append(letter)

    def lost(
        self, key: str, rows: Ids, groups: Ids, partition: Ids, names: dict[int, str], reason: str, now: float
    ) -> None:
        """Rows of one put failed because their payload was lost: a letter for those that lie together. ``partition``: of
        each row, by number; ``names``: of the partitions."""
        breaks = (np.diff(rows) != 1) | (np.diff(groups) > 1) | (np.diff(partition) != 0)
        starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
        ends = np.concatenate([starts[1:], [len(rows)]])
        self.total += len(starts) - min(len(starts), LETTERS)
        for start, end in zip(starts[-LETTERS:].tolist(), ends[-LETTERS:].tolist(), strict=True):
            self._keep(
                cmd.FailedGroup(
                    first=int(rows[start]), rows=end - start, task="", partition=names[int(partition[start])], key=key,
                    place=int(groups[start]), reasons=(reason[:LETTER],), time_s=now,
                )
            )  # fmt: skip

    @property
    def blamed(self) -> bool:
        """Whether any live group lost a lease."""
        return bool(self._reasons)

    def forget(self, firsts: Ids) -> None:
        """Groups ended."""
        for first in np.unique(firsts).tolist():
            self._reasons.pop(first, None)
