"""Terminations: move rows to their terminal state and update every counter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..types import events as ev
from ..types.reports import TERMINAL
from .commands import Ids
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import Grant
from .state.tasks import Task

CONSUMED, FILTERED, EXPIRED, FAILED, CANCELLED = range(1, 1 + len(TERMINAL))
MAX_REASONS, REASON_LENGTH = 200, 300
"""Number of reasons counted separately, and of characters of their first lines."""
MAX_NAMED, MAX_NAMED_ROWS = 5, 8
"""Number of sessions or others, and of rows, named in a sentence."""


class Terminations:
    """``reasons``: rows by terminal state and reason. ``excused``: by task with whole groups, rows
    that ended before they became ready; their groups need not wait for them."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._rows, self._tasks, self._leases, self._steps = state.rows, state.tasks, state.leases, state.steps
        self.reasons: Counter[str] = Counter()
        self.excused: list[tuple[str, Ids]] = []

    def end_groups(self, ids: Ids, state: int, reason: str) -> int:
        """End rows outside full steps, with their groups. Return the number of ended rows."""
        ids = self._rows.live(self._rows.members(ids) if ids.size else ids)
        if self._steps.declared:
            ids = ids[self._steps.not_closed(self._rows.at(ids))]
        if ids.size:
            if self._steps.declared:
                self._steps.remove(ids)
            self.finish(ids, state, reason)
        return ids.size

    def finish(self, ids: Ids, state: int, reason: str = "", *, through: int | None = None) -> None:
        """End rows. ``through``: their partition, if all tasks that take it have completed them."""
        context, partitions = self._state.context, self._state.partitions
        at, ended = self._rows.at(ids), TERMINAL[state - 1]
        given, reason = reason, self.shortened(ended, reason)
        for number, part in partitions.split(ids):
            context.publish(self._state.metrics.ended_event(part, partitions.names[number], ended, reason))
        broken: list[tuple[Grant, Ids]] = []
        if through is None:
            for task in self._tasks:
                broken += self.withdraw(task, ids, task.leave(ids))
        else:
            for task in self._tasks.takers(partitions.names[through]):
                task.forget(through, ids.size)
        self._state.columns.count(ids)
        if self._steps.declared:
            self._steps.leave(at)
        self._rows.finish(ids, state)
        self._state.budget.release(at)
        if self._state.dead_letters.blamed:
            self._state.dead_letters.forget(self._rows.first[at])
        context.effects.retired.append(ids)
        if reason:
            self.reasons[f"{ended}: {reason}"] += ids.size
        context.wake("put", "wanted")
        for grant, gone in broken:  # what was computed from a step in parts includes them
            rows = f"row{'s' * (gone.size > 1)} {join_some(gone.tolist(), MAX_NAMED_ROWS)}"
            self.give_back_step(grant, f"{rows} of its step ended ({ended}): {given}")

    def withdraw(self, task: Task, ids: Ids, left: tuple[Ids, Ids]) -> list[tuple[Grant, Ids]]:
        """Remove rows from leases, after ``Task.leave``. Return broken leases of steps in parts with their rows."""
        self._state.context.wake(task.place)  # the rows left may be the last ones, and others may be admitted
        waited, tokens = left
        if task.sampling.whole_groups and waited.size:
            self.excused.append((task.spec.name, waited))
        return self._leases.lose_rows(ids, tokens)

    def give_back_step(self, grant: Grant, reason: str) -> None:
        """Return the rows of a step to it, and end its lease. Its parts stay as they are, for the next lease."""
        steps, task = self._steps, self._tasks[grant.task]
        ids = self._leases.outstanding(grant)
        if ids.size:
            self.note_return(grant, ids, reason)
            task.give_back(ids)
            self._leases.release(grant, ids.size)
            if grant.parts == NONE and ids.size < len(grant.ids):
                steps.parts.pop(grant.step, None)  # a part of it was acknowledged under a whole lease
            steps.take_back(grant.step, ids)
        if grant.parts != NONE:
            self._leases.note_void(grant.token, reason)
        self._state.context.wake(task.place)

    def note_return(self, grant: Grant, ids: Ids, reason: str) -> None:
        """Publish the event of rows returned from a lease."""
        now, worker = self._state.context.now, self._state.sessions.name(grant.session)
        event = ev.LeaseReturned(time_s=now, worker=worker, task=grant.task, count=ids.size, reason=reason)
        self._state.context.publish(event)

    def note_skipped(self, count: int, reason: str) -> None:
        """Count rows skipped by a task."""
        self.reasons[f"skipped: {self.shortened('skipped', reason)}"] += count

    def shortened(self, state: str, reason: str) -> str:
        """Return the first line of a reason, or "other reasons" once there are too many."""
        line = reason.partition("\n")[0][:REASON_LENGTH]
        known = not line or f"{state}: {line}" in self.reasons
        return line if known or len(self.reasons) < MAX_REASONS else "other reasons"

    def end_live(self, partition: int | None, state: int, reason: str) -> int:
        """End live rows outside full steps, of one partition or of all. Return their number."""
        live = self._rows.live_ids()
        if partition is not None:
            live = live[self._rows.partition[self._rows.at(live)] == partition]
        return self.end_groups(live, state, reason)


def join_some(things: Iterable[object], named: int = MAX_NAMED) -> str:
    """Join the first items, ``named`` ones, and count the others."""
    known = list(things)
    more = f" and {len(known) - named} more" if len(known) > named else ""
    return ", ".join(map(str, known[:named])) + more
