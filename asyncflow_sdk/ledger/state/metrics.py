"""Records for people: ages of trained rows, lengths of responses, and dead letters."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...types import events as ev
from ...types.reports import FailedGroup, StepAges, length_bins
from ...types.spans import steps_of
from ..commands import Ids
from .context import Context
from .rows import NONE, Rows
from .tasks import LEASED, Tasks
from .versions import Lineage

MAX_GROUPS = 1000
MAX_REASONS = 16
REASON_LENGTH = 5000


class RowMetrics:
    """``ages``: of the step leased last. ``lengths_known``: True once a length was reported."""

    def __init__(self, context: Context, rows: Rows, tasks: Tasks) -> None:
        self._context, self._rows, self._tasks = context, rows, tasks
        self._arrays = rows.arrays("metrics")
        self.ages: StepAges | None = None
        self.lengths_known = False
        self._tokens = 0
        self._seconds = 0.0

    def note_ages(self, at: Ids, step: int, lineage: Lineage) -> None:
        """Note the ages of rows leased for ``step``."""
        completed = self._rows.current[at]
        known = (completed != NONE) & (self._rows.version[at] != NONE)
        begun = steps_of(self._rows.version[at][known], lineage.offsets)
        done = np.clip(steps_of(completed[known], lineage.offsets), begun, np.maximum(begun, step))
        if len(done):
            spans = {"in_flight": done - begun, "in_queue": step - done}
            ages: dict[str, Any] = {f"{name}_mean": float(each.mean()) for name, each in spans.items()}
            ages |= {f"{name}_max": int(each.max()) for name, each in spans.items()}
            self.ages = StepAges(step=step, **ages)

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
        tokens, squares = int(whole.sum()), int((whole * whole).sum())
        event = replace(event, lengths=length_bins(whole), tokens=tokens, squares=squares)
        begun = self._begun(at)
        tokens, squares = int(begun.sum()), int((begun * begun).sum())
        return replace(event, unfinished=length_bins(begun), unfinished_tokens=tokens, unfinished_squares=squares)

    def _begun(self, at: Ids) -> Ids:
        """Estimate the tokens so far of rows being generated from the rate of finished ones."""
        task, parts = self._tasks.admitting, [np.empty(0, np.int64)]
        if self._tokens and self._seconds and task is not None and task.counts[LEASED]:
            leased = task.token[at][task.state[at] == LEASED]
            for token, count in zip(*np.unique(leased, return_counts=True), strict=True):
                if (grant := task.leases.get(int(token))) is not None:
                    so_far = int((self._context.now - grant.since) * self._tokens / self._seconds)
                    parts.append(np.full(int(count), so_far, np.int64))
        return np.concatenate(parts)


class DeadLetters:
    """``groups``: the newest ``MAX_GROUPS`` failed groups, each with its last ``MAX_REASONS`` reasons."""

    def __init__(self) -> None:
        self.groups: deque[FailedGroup] = deque(maxlen=MAX_GROUPS)
        self._reasons: dict[int, deque[str]] = {}  # first row of a live group → reasons
        self._lost: deque[tuple[str, int]] = deque(maxlen=MAX_GROUPS)  # lost workers, each with a group held

    def blame(self, firsts: Ids, reason: str) -> None:
        """Note why groups, by their first rows, lost a lease."""
        for first in np.unique(firsts).tolist():
            self._reasons.setdefault(first, deque(maxlen=MAX_REASONS)).append(reason[:REASON_LENGTH])

    def note_lost(self, worker: str, firsts: Ids) -> None:
        """Note the groups held by a lost worker."""
        self._lost.extend((worker, first) for first in np.unique(firsts).tolist())

    def explain(self, worker: str, reason: str) -> int:
        """Note the cause of a worker's end for the groups held by it, failed ones too. Return their number."""
        firsts, text = {first for name, first in self._lost if name == worker}, f"{worker}: {reason}"[:REASON_LENGTH]
        self._lost = deque((each for each in self._lost if each[0] != worker), MAX_GROUPS)
        self.blame(np.array([first for first in firsts if first in self._reasons], np.int64), text)
        for at, group in enumerate([*self.groups]):
            if group.first in firsts:
                self.groups[at] = replace(group, reasons=(*group.reasons, text)[-MAX_REASONS:])
        return len(firsts)

    def failed(self, first: int, rows: int, task: str, partition: str, put: tuple[str, int], now: float) -> None:
        """Keep a failed group. ``put``: key of its put, and its number there."""
        self.groups.append(FailedGroup(first, rows, task, partition, *put, tuple(self._reasons.get(first, ())), now))

    def lost(self, key: str, rows: Ids, groups: Ids, where: Ids, names: list[str], reason: str, now: float) -> None:
        """Keep rows of one put with lost payload, adjacent ones together. ``where``: each row's partition."""
        breaks = (np.diff(rows) != 1) | (np.diff(groups) > 1) | (np.diff(where) != 0)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        for start, end in [*pairwise(bounds)][-MAX_GROUPS:]:
            first, place, why = int(rows[start]), int(groups[start]), (reason[:REASON_LENGTH],)
            self.groups.append(FailedGroup(first, end - start, "", names[where[start]], key, place, why, now))

    @property
    def blamed(self) -> bool:
        """True if any live group lost a lease."""
        return bool(self._reasons)

    def forget(self, firsts: Ids) -> None:
        """Forget the reasons of ended groups."""
        for first in np.unique(firsts).tolist():
            self._reasons.pop(first, None)
