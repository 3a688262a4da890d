"""Partitions of the rows, and which of them can get no more rows."""

from __future__ import annotations

import numpy as np

from ..commands import Ids
from .rows import NONE, Rows


class Partitions:
    """``numbers``: of each partition by name; "" is 0. ``ended``: nothing more can be put anywhere; ``ended_names``: there.
    ``end_requested``: a client ended the stream; else it ends when the last step is filled. ``group_sizes``: of the last
    put of each."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.numbers: dict[str, int] = {"": 0}
        self.group_sizes: dict[str, int] = {}
        self.ended = False
        self.end_requested = False
        self.ended_names: set[str] = set()

    def number(self, name: str) -> int:
        """The number of a partition; NONE if no row was put there and no task names it."""
        return self.numbers.get(name, NONE)

    def add(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    def name_of(self, row: Ids) -> str:
        """The partition of the first of some rows."""
        if len(self.numbers) == 1:
            return ""
        number = int(self._rows.partition[self._rows.at(row)][0])
        return next(name for name, known in self.numbers.items() if known == number)

    def split(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Rows by the number of their partition, in order; an empty list for no rows."""
        if len(self.numbers) == 1 or not len(ids):
            return [(0, ids)] if len(ids) else []
        where = self._rows.partition[self._rows.at(ids)]
        if (where == where[0]).all():
            return [(int(where[0]), ids)]
        return [(int(partition), ids[where == partition]) for partition in np.unique(where)]

    def closed(self, partition: int) -> bool:
        """True if nothing more can be put in the partition with this number."""
        return self.ended or any(self.numbers.get(name) == partition for name in self.ended_names)
