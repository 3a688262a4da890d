"""Partitions of the rows, and the ones that get no more rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..commands import Ids
from .rows import NONE, Rows


@dataclass
class Pin:
    """One version for all rows of a partition: the first one current from number ``first`` on. ``version``: NONE
    until it is current. ``last``: that of the partition's rows before. ``keep``: a version kept meanwhile."""

    first: int
    version: int = NONE
    last: int = NONE
    keep: int = NONE


class Partitions:
    """``numbers``: by name; "" is 0. ``ended``: no row can be put anywhere; ``ended_names``: in these.
    ``end_requested``: True if a client ended the stream, False if the last step did. ``group_sizes``: of the last put
    in each. ``pins``: by number, of partitions whose rows one version generates."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.numbers: dict[str, int] = {"": 0}
        self.group_sizes: dict[str, int] = {}
        self.ended = False
        self.end_requested = False
        self.ended_names: set[str] = set()
        self.pins: dict[int, Pin] = {}

    def number(self, name: str) -> int:
        """Return the number of a partition; NONE if no row was put in it and no task names it."""
        return self.numbers.get(name, NONE)

    def add(self, name: str) -> int:
        """Return the number of a partition, a new one if needed."""
        return self.numbers.setdefault(name, len(self.numbers))

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
