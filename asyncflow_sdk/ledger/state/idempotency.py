"""Idempotency keys of puts: a repeated put adds only groups lost since. A key is kept while rows of its put live, and
among the last ``MAX_KEYS`` keyed puts."""

from __future__ import annotations

import re
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ...errors import SchemaError
from .. import commands as cmd
from ..commands import Ids
from .rows import LIVE, Rows

MAX_KEYS = 100_000
DIGEST_BYTES = 16
"""Bytes of a column's digest."""
_NO_GROUPS: Ids = np.empty(0, np.int64)


class KeyedPut(NamedTuple):
    """A put with a key: rows ``first`` to ``first + size - 1``. ``digest``: see ``AddRows``."""

    first: int
    size: int
    group_size: int
    partition: str
    columns: tuple[str, ...]
    digest: bytes

    def differences(self, put: cmd.AddRows) -> list[str]:
        """Describe the differences to another put with the same key; empty if none."""
        compared = (
            ("group_size={} instead of {}", put.group_size, self.group_size),
            ("{} entries instead of {}", put.groups, self.size // self.group_size),
            ("partition {!r} instead of {!r}", put.partition, self.partition),
            ("columns {} instead of {}", ", ".join(sorted(put.columns)), ", ".join(sorted(self.columns))),
        )
        found = [text.format(new, old) for text, new, old in compared if new != old]
        if not found and put.digest and self.digest:
            digests = _by_column(self.columns, self.digest)
            values = _by_column(tuple(put.columns), put.digest).items()
            found = [f"other values in column {name!r}" for name, digest in values if digest != digests[name]]
        return found


class IdempotencyKeys:
    """Keyed puts in row order, and their lost groups. ``limit``: number of keys kept of ended rows."""

    def __init__(self, limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._puts: dict[str, KeyedPut] = {}
        self._order: list[tuple[int, str]] = []  # first row and key, by row; forgotten ones are deleted in bulk
        self._forgotten = 0
        self._lost: dict[str, Ids] = {}  # numbers of groups with lost payload, by key
        self._again: dict[str, list[tuple[int, Ids]]] = {}  # first row and group numbers of repeated puts

    def get(self, key: str) -> KeyedPut | None:
        """Return the put with this key."""
        return self._puts.get(key)

    def lacking(self, known: KeyedPut, put: cmd.AddRows) -> Ids:
        """Return the numbers of groups lost since the first put. Raises SchemaError if that was of other rows."""
        if differences := known.differences(put):
            text = f"of rows {known.first} to {known.first + known.size - 1}: this one has {'; '.join(differences)}"
            raise SchemaError(f"key {put.key!r} names another put, {text}. Nothing was put; give it another key")
        return self._lost.get(put.key, _NO_GROUPS)

    def rows_in(self, put: cmd.AddRows) -> int:
        """Return the number of rows added by a put, if it is not refused."""
        groups = self._lost.get(put.key, _NO_GROUPS) if put.key in self._puts else range(put.groups)
        return len(groups) * put.group_size

    def add(self, put: cmd.AddRows, first: int, rows: Rows) -> None:
        """Keep a new key for rows from ``first`` on. Forget the oldest keys of ended rows."""
        size, columns = put.groups * put.group_size, tuple(put.columns)
        self._puts[put.key] = KeyedPut(first, size, put.group_size, put.partition, columns, put.digest)
        self._order.append((first, put.key))
        while len(self._puts) > self._limit:
            oldest, key = self._order[self._forgotten]
            if key in self._puts and self._puts[key].first == oldest:
                ids = self.rows_of(key)
                if (rows.state[rows.at(ids[ids >= rows.base])] == LIVE).any():
                    break
                for known in (self._puts, self._lost, self._again):
                    known.pop(key, None)
            self._forgotten += 1
        if self._forgotten > self._limit:
            del self._order[: self._forgotten]
            self._forgotten = 0

    def add_again(self, key: str, first: int, groups: Ids) -> None:
        """Note lost groups of a put as added again, as rows from ``first`` on."""
        del self._lost[key]
        self._again.setdefault(key, []).append((first, groups))
        self._order.append((first, key))

    def lose(self, ids: Ids) -> None:
        """Let a repeated put add the groups of lost rows."""
        for key, _, groups in self.by_put(ids):
            if key:
                self._lost[key] = np.union1d(self._lost.get(key, _NO_GROUPS), groups)

    def lost(self, prefix: str) -> dict[str, int]:
        """Return a feeder's keys of puts with lost groups, and the number of groups of each put."""
        keys = [key for key in self._lost if _is_of(key, prefix)]
        return {key: self._puts[key].size // self._puts[key].group_size for key in keys}

    def newest(self, prefix: str) -> cmd.LastPut:
        """Return the newest put of a feeder."""
        for first, key in reversed(self._order):
            if _is_of(key, prefix) and key in self._puts and self._puts[key].first == first:
                return cmd.LastPut(key=key, first=first, count=self._puts[key].size)
        return cmd.LastPut()

    def rows_of(self, key: str) -> Ids:
        """Return all rows put with a key. Raises KeyError."""
        put = self._puts[key]
        parts = [(first, len(groups) * put.group_size) for first, groups in self._again.get(key, ())]
        return np.concatenate([np.arange(first, first + count) for first, count in [(put.first, put.size), *parts]])

    def by_put(self, ids: Ids) -> list[tuple[str, Ids, Ids]]:
        """Split sorted rows by put: key, rows, and their group numbers; "" and -1 without a key."""
        found: list[tuple[str, Ids, Ids]] = []
        while len(ids):
            after = bisect_right(self._order, int(ids[0]), self._forgotten, key=lambda put: put[0])
            end = np.searchsorted(ids, self._order[after][0]) if after < len(self._order) else len(ids)
            part, ids = ids[:end], ids[end:]
            first, key = self._order[after - 1] if after > self._forgotten else (0, "")
            groups = self._groups(first, key, part)
            if len(groups):
                found.append((key, part[: len(groups)], groups))
            if len(part) > len(groups):
                found.append(("", part[len(groups) :], np.full(len(part) - len(groups), -1)))
        return found

    def _groups(self, first: int, key: str, ids: Ids) -> Ids:
        """Return the group numbers of those sorted rows that a put made from ``first`` on."""
        put = self._puts.get(key)
        if put is None:
            return _NO_GROUPS
        if put.first == first:
            return (ids[ids < first + put.size] - first) // put.group_size
        groups = next((groups for begins, groups in self._again.get(key, ()) if begins == first), _NO_GROUPS)
        return groups[(ids[ids < first + len(groups) * put.group_size] - first) // put.group_size]


def _is_of(key: str, prefix: str) -> bool:
    """True if a key is this prefix with a number, written as a feeder writes it."""
    return key.startswith(prefix) and re.fullmatch("0|[1-9][0-9]{0,17}", key[len(prefix) :]) is not None


def _by_column(columns: tuple[str, ...], digest: bytes) -> dict[str, bytes]:
    return {name: digest[DIGEST_BYTES * at : DIGEST_BYTES * (at + 1)] for at, name in enumerate(columns)}
