"""Row metrics that no decision depends on: ages of trained rows, and lengths of responses."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from ...types import events as ev
from ...types.reports import StepAges, length_bins
from ...types.spans import steps_of
from ..commands import Ids, pack_ids
from .context import Context
from .rows import NONE, Rows
from .tasks import LEASED, Tasks
from .versions import Lineage


class RowMetrics:
    """``ages``: of the step leased last. ``lengths_known``: True once a length was reported."""

    def __init__(self, context: Context, rows: Rows, tasks: Tasks) -> None:
        self._context, self._rows, self._tasks = context, rows, tasks
        self._arrays = rows.arrays("metrics")
        self.ages: StepAges | None = None
        self.lengths_known = False
        self._tokens = 0
        self._seconds = 0.0

    def note_ages(self, at: Ids, step: int, lineage: Lineage) -> bytes:
        """Note the ages of rows leased for ``step``. Return the versions current at completion."""
        completed = self._rows.current[at]
        known = (completed != NONE) & (self._rows.version[at] != NONE)
        begun = steps_of(self._rows.version[at][known], lineage.offsets)
        done = np.clip(steps_of(completed[known], lineage.offsets), begun, np.maximum(begun, step))
        in_flight, in_queue = done - begun, step - done
        if len(in_flight):
            self.ages = StepAges(
                step=step, in_flight_mean=float(in_flight.mean()), in_queue_mean=float(in_queue.mean()),
                in_flight_max=int(in_flight.max()), in_queue_max=int(in_queue.max()),
            )  # fmt: skip
        return pack_ids(completed)

    def note_lengths(self, ids: Ids, lengths: bytes, pick: Any, since: float | None = None) -> None:
        """Store response lengths (int32, tokens) since ``since``, if there is one for each row."""
        if len(lengths) % 4:
            return
        values = np.frombuffer(lengths, "<i4")
        try:
            values = values[pick]
        except IndexError:
            return
        if len(values) != len(ids) or (len(values) and int(values.min()) < 0):
            return
        self._arrays["length"][self._rows.at(ids)] = values
        self.lengths_known = True
        if since is not None:
            self._tokens += int(values.sum())
            self._seconds += len(ids) * (self._context.now - since)

    def ended_event(self, ids: Ids, partition: str, state: str, reason: str) -> ev.RowsEnded:
        """Return the event of ending rows of a partition. Their leases must still hold them."""
        event = ev.RowsEnded(state, len(ids), reason, partition, time_s=self._context.now)
        if not self.lengths_known:
            return event
        at = self._rows.at(ids)
        whole = self._rows.length[at].astype(np.int64)
        whole = whole[whole != NONE]
        begun = self._begun(at)
        return msgspec.structs.replace(
            event, lengths=length_bins(whole), tokens=int(whole.sum()), squares=int((whole * whole).sum()),
            unfinished=length_bins(begun), unfinished_tokens=int(begun.sum()), unfinished_squares=int((begun * begun).sum()),
        )  # fmt: skip

    def _begun(self, at: Ids) -> Ids:
        """Estimate the tokens so far of rows being generated from the rate of finished ones."""
        parts: list[Ids] = [np.empty(0, np.int64)]
        if not self._tokens or not self._seconds:
            return parts[0]
        for task in self._tasks:
            if not task.spec.admits or not task.counts[LEASED]:
                continue
            leased = task.token[at][task.state[at] == LEASED]
            for token, count in zip(*np.unique(leased, return_counts=True), strict=True):
                if (grant := task.leases.get(int(token))) is not None:
                    so_far = int((self._context.now - grant.since) * self._tokens / self._seconds)
                    parts.append(np.full(int(count), so_far, np.int64))
        return np.concatenate(parts)
