"""Row traces: the states of sampled groups as events. No decision depends on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...types import events as ev
from ...types.row_spans import is_traced, traced_mask
from ...types.spans import steps_of
from ..commands import Ids
from .context import Context
from .rows import NONE, Rows
from .versions import Versions


class RowTraces:
    """``share``: of groups to trace, 0 to 1."""

    KEPT = ()

    def __init__(self, context: Context, rows: Rows, versions: Versions) -> None:
        self._context, self._rows, self._versions = context, rows, versions
        self.share = 0.0

    def note(self, ids: Ids, state: str, task: str = "", **more: Any) -> None:
        """Publish the new state of rows, group by group. ``more``: further fields of ``RowsTraced``."""
        if not self.share or not len(ids):
            return
        if len(ids) == 1 and not is_traced(int(self._rows.first[ids[0] - self._rows.base]), self.share):
            return  # the usual case, without costly array operations
        firsts = self._rows.first[self._rows.at(ids)]
        traced = traced_mask(firsts, self.share)
        if not np.count_nonzero(traced):
            return
        for group in np.unique(firsts[traced]).tolist():
            rows = ids[firsts == group]
            if (step := more.get("step", NONE)) != NONE:
                more["staleness"] = self._staleness(rows, step)
            self._context.publish(
                ev.RowsTraced(
                    time_s=self._context.now, group=group, rows=rows.tolist(), state=state, task=task, **more
                )
            )

    def _staleness(self, ids: Ids, step: int) -> int:
        """Return the staleness of the oldest row in a step; NONE if no version generated them."""
        begun = self._rows.version[self._rows.at(ids)]
        begun = begun[begun != NONE]
        return step - int(steps_of(begun, self._versions.lineage.offsets).min()) if len(begun) else NONE
