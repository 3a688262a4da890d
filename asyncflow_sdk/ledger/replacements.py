"""Replacements: a group that lost columns made by tasks is made again, from its put columns.

Each row of the ended group (the parent) has a child: a new row with the same put columns, key,
partition and priority, and with no version and no deadline, so the staleness rule admits it anew.
A child takes its parent's room, so a replacement never waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .assembly import StepAssembly
from .commands import Ids
from .state import LedgerState
from .state.context import Replacement
from .state.tasks import APART

COPIED = ("put_columns", "put_bytes", "partition", "priority", "charged")
"""Fields that a child takes from its parent."""


class GroupReplacements:
    """Adds children."""

    def __init__(self, state: LedgerState, assembly: StepAssembly) -> None:
        self._state, self._assembly = state, assembly

    def replace(self, parents: Ids) -> None:
        """Add a child for each of these sorted rows: whole groups, which have just ended."""
        rows = self._state.rows
        at = rows.at(parents)
        sizes = rows.size[at]
        copies = {name: getattr(rows, name)[at] for name in COPIED}  # before added rows move the arrays
        measures = {column: values[at] for column, values in rows.measures.items()}
        children = []
        for size in np.unique(sizes):
            these = sizes == size
            children.append(rows.add(int(np.count_nonzero(these)) // int(size), int(size)))
            self._fill(
                parents[these],
                children[-1],
                {name: values[these] for name, values in copies.items()},
                {column: values[these] for column, values in measures.items()},
            )
        ids = np.concatenate(children)
        self._assembly.make_ready(ids, np.zeros(len(ids), np.uint64))

    def _fill(self, parents: Ids, children: Ids, copies: dict[str, Any], measures: dict[str, Any]) -> None:
        rows, steps, columns = self._state.rows, self._state.steps, self._state.columns
        at = rows.at(children)
        put = copies["put_columns"]
        rows.parent[at] = parents
        rows.columns[at] = rows.put_columns[at] = put
        rows.partition[at], rows.priority[at] = copies["partition"], copies["priority"]
        rows.current[at] = self._state.versions.current
        for column, values in measures.items():
            rows.measures[column][at] = np.where(put & columns.bit(column), values, np.nan)
        self._state.budget.charge_children(at, copies["put_bytes"], copies["charged"])
        for partition, part in self._state.partitions.split(children):
            takers = [task for task in self._state.tasks if task.takes(partition)]
            self._state.tasks.enter(rows.at(part), len(part), partition, takers)
        if steps.declared:
            steps.offer(int(np.count_nonzero(steps.task.state[at] != APART)))
        columns.count(at, 1)
        self._state.keys.replace(parents, children)
        for mask in np.unique(put).tolist():
            these = put == mask
            remade = Replacement(parents[these], children[these], columns.names(mask))
            self._state.context.effects.remade.append(remade)
