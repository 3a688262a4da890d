"""Terminations: move rows to their terminal state and update every counter."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..types.reports import TERMINAL
from .commands import Ids
from .state import LedgerState
from .state.grants import Grant
from .state.rows import DONE, LEASED, LIVE, NONE, READY, TASK_STATES, WAITING
from .state.tasks import Task
from .step_leases import StepLeases

CONSUMED, FILTERED, EXPIRED, FAILED, CANCELLED = range(1, 1 + len(TERMINAL))
MAX_REASONS, REASON_LENGTH = 200, 300
"""Number of reasons counted separately, and of characters of their first lines."""
MAX_NAMED_ROWS = 8


class Terminations:
    """``reasons``: rows by terminal state and reason. ``excused``: by task with whole groups, rows
    that ended before they became ready; their groups need not wait for them."""

    def __init__(self, state: LedgerState, step_leases: StepLeases) -> None:
        self._state, self._step_leases = state, step_leases
        self.reasons: Counter[str] = Counter()
        self.excused: list[tuple[str, Ids]] = []

    def end_groups(self, ids: Ids, state: int, reason: str) -> int:
        """End rows outside full steps, with their groups. Return the number of ended rows."""
        rows, steps = self._state.rows, self._state.steps
        ids = rows.members(ids) if len(ids) else ids
        at = rows.at(ids)
        live = rows.state[at] == LIVE
        ids = ids[live & steps.not_closed(at)] if steps.declared else ids[live]
        if not len(ids):
            return 0
        if steps.declared:
            steps.withdraw(ids)
            steps.remove_from_open(ids)
        self.finish(ids, state, reason)
        return len(ids)

    def finish(self, ids: Ids, state: int, reason: str = "", *, through: int | None = None) -> None:
        """End rows. ``through``: their partition, if all tasks that take it have completed them."""
        rows, context, partitions = self._state.rows, self._state.context, self._state.partitions
        at, ended = rows.at(ids), TERMINAL[state - 1]
        given, reason = reason, self.shortened(ended, reason)
        ended_event, name_of = self._state.metrics.ended_event, partitions.name_of
        events = [ended_event(part, name_of(part), ended, reason) for _, part in partitions.split(ids)]
        broken: list[tuple[Grant, Ids]] = []
        for name, task in self._state.tasks.by_name.items():
            if through is not None:
                task.counts[DONE] -= len(ids) * self._state.tasks.takes(task, through)
                continue
            states = rows.task(name, "state")[at]
            counts = np.bincount(states, minlength=1 + len(TASK_STATES)).tolist()
            task.counts = [now - gone for now, gone in zip(task.counts, counts, strict=False)]
            self._state.tasks.leave(task, ids[states < DONE])
            broken += self.withdraw(task, ids, states)
        self._state.columns.count(at, -1)
        if self._state.steps.declared:
            self._state.steps.unselected -= int(self._state.steps.unselected_at(at).sum())
        rows.finish(ids, state)
        self._state.budget.release(at)
        if self._state.dead_letters.blamed:
            self._state.dead_letters.forget(rows.first[at])
        context.effects.retired.append(ids)
        if reason:
            self.reasons[f"{ended}: {reason}"] += len(ids)
        context.effects.events += events
        context.wake("put", "wanted")
        for grant, gone in broken:  # what was computed from a step in parts includes them
            self._step_leases.give_back(grant, f"{_named(gone)} of its step ended ({ended}): {given}")

    def withdraw(self, task: Task, ids: Ids, states: Ids) -> list[tuple[Grant, Ids]]:
        """Remove rows from the queues and leases of a task. Return broken leases of steps in parts with their rows."""
        self._state.context.wake(task.place)  # the rows left may be the last ones, and others may be admitted
        self._state.tasks.count_fit(task, ids[states == READY], -1)
        waiting = ids[states == WAITING]
        self._state.tasks.count_waiting(task, waiting)
        if task.sampling.whole_groups and len(waiting):
            self.excused.append((task.spec.name, waiting))
        tokens = self._state.rows.task(task.spec.name, "token")[self._state.rows.at(ids)]
        return self._state.leases.lose_rows(ids, np.where(states == LEASED, tokens, NONE))

    def note_skipped(self, count: int, reason: str) -> None:
        """Count rows that a task skips."""
        self.reasons[f"skipped: {self.shortened('skipped', reason)}"] += count

    def shortened(self, state: str, reason: str) -> str:
        """Return the first line of a reason, or "other reasons" once there are too many."""
        line = reason.partition("\n")[0][:REASON_LENGTH]
        known = not line or f"{state}: {line}" in self.reasons
        return line if known or len(self.reasons) < MAX_REASONS else "other reasons"

    def cancel_live(self, partition: str | None, reason: str) -> int:
        """Cancel live rows outside full steps, in one partition or all. Return their number."""
        live = self._state.rows.live_ids()
        if partition is not None:
            partitions = self._state.partitions
            live = dict(partitions.split(live)).get(partitions.number(partition), live[:0])
        return self.end_groups(live, CANCELLED, reason)


def _named(ids: Ids) -> str:
    """Name the first rows, and count the others."""
    more = f" and {len(ids) - MAX_NAMED_ROWS} more" if len(ids) > MAX_NAMED_ROWS else ""
    return f"row{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:MAX_NAMED_ROWS].tolist()))}{more}"
