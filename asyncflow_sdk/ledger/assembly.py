"""Step assembly: rows become ready for tasks, and ready groups are selected into steps under the staleness rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .commands import Ids
from .staleness import Staleness
from .state import LedgerState
from .state.rows import APART, LIVE, NONE, READY, SELECTED, WAITING
from .state.tasks import Task
from .terminations import CANCELLED, EXPIRED, Terminations


class StepAssembly:
    """Makes rows ready, and fills steps."""

    def __init__(self, state: LedgerState, staleness: Staleness, terminations: Terminations) -> None:
        self._context, self._rows, self._partitions, self._limits = (
            state.context,
            state.rows,
            state.partitions,
            state.limits,
        )
        self._tasks, self._steps, self._staleness = state.tasks, state.steps, staleness
        self._terminations, self._parked = terminations, state.parked

    def make_ready_alike(self, tasks: Iterable[Task], ids: Ids, have: int, before: int) -> None:
        """Hand rows, which all have the columns ``have`` and had ``before``, to those of ``tasks`` whose needs they now meet. The tasks
        take the rows' partition."""
        for task in self._step_last(tasks):
            need = int(task.need)
            if have & need == need and (before & need != need if need else not before):
                self._ready(task, ids)

    def make_ready(self, ids: Ids, before: Any, only: Task | None = None) -> None:
        """Hand rows, which had the columns ``before``, to the tasks whose needs they now meet; or to one task that is new."""
        at = self._rows.at(ids)
        have = self._rows.columns[at]
        for task in [only] if only is not None else self._step_last(self._tasks):
            need = task.need
            fresh = (have & need) == need
            if len(self._partitions.numbers) > 1 or not task.spec.takes(""):
                fresh &= self._rows.task(task.spec.name, "state")[at] != APART
            if only is None and need:
                fresh &= (before & need) != need
            elif only is None:
                fresh &= before == 0
            if fresh.any():
                self._ready(task, ids[fresh])

    def refill(self) -> None:
        """Bring the open step up to date: evict late rows, and select ready ones."""
        self._excuse()
        steps = self._steps
        while steps.declared and (steps.just_closed or steps.reselect):
            if steps.just_closed:
                steps.just_closed = False
                self._evict()
            if steps.reselect:
                steps.reselect = False
                self._select()
        self._cancel_remainder()

    def supply_ended(self) -> bool:
        """True if nothing more can be put that a step takes."""
        if self._partitions.ended:
            return True
        return self._steps.declared and self._partitions.ended_names.issuperset(self._steps.task.spec.partitions)

    def _step_last(self, tasks: Iterable[Task]) -> list[Task]:
        """The task that makes the steps comes last: filling the last step ends rows, and no other task may see them after that."""
        return sorted(tasks, key=self._steps.makes)

    def _ready(self, task: Task, ids: Ids) -> None:
        rows, name = self._rows, task.spec.name
        if task.whole_groups:
            ids = rows.arrive(name, ids)
            at = rows.at(ids)  # without those that were skipped, or have ended
            ids = ids[(rows.task(name, "state")[at] == WAITING) & (rows.state[at] == LIVE)]
            if not len(ids):
                return
        rows.task(name, "state")[rows.spot(rows.at(ids))] = READY
        task.move(len(ids), WAITING, READY)
        task.came += len(ids)
        if self._steps.makes(task):
            if (rollout := self._tasks.admitting) is not None:
                self._tasks.skip(rollout, ids[rows.deadline[rows.at(ids)] == NONE])
            self._steps.push(ids)
            self._select()
            return
        self._tasks.count_waiting(task, ids)
        self._tasks.count_fit(task, ids, 1)
        for partition, part in self._partitions.split(ids):
            self._tasks.queue(task, partition).push(part)
        self._context.wake(task.place)

    def _select(self) -> None:
        """Fill the step with ready groups, earliest deadline first, as far as the policy allows."""
        steps, rows, window = self._steps, self._rows, self._steps.window
        moved = True
        while moved and not window.finished:
            moved = False
            for deadline in sorted(steps.ready, key=lambda d: (d is None, d)):
                if not steps.ready[deadline]:
                    continue
                room = self._staleness.selectable(deadline)
                ids = steps.ready[deadline].take_groups(room, room)
                if not len(ids):
                    continue
                at = rows.at(ids)
                rows.task(steps.name, "state")[at] = SELECTED
                steps.task.move(len(ids), READY, SELECTED)
                rows.step[at] = window.step
                window.select(len(ids), deadline)
                steps.unselected -= len(ids)
                steps.filling.append(ids)
                moved = True
                if not window.free:
                    self._close_step()
                    break

    def _close_step(self) -> None:
        steps, window = self._steps, self._steps.window
        steps.closed.append((window.step, np.concatenate(steps.filling)))
        if self._limits.checkpoints:
            steps.whole[window.step] = steps.closed[-1][1]
        steps.filling = []
        window.close()
        bounded = self._staleness.rule.bounded
        steps.ready = {
            deadline: queue
            for deadline, queue in steps.ready.items()
            if deadline is None or deadline >= window.step or (not bounded and window.has(deadline))
        }
        steps.just_closed = True
        self._context.wake(steps.task.place, "put", "wanted")
        if window.finished:
            self._partitions.ended = True
            live = self._rows.live_ids()
            unselected = live[steps.unselected_at(self._rows.at(live))]
            self._terminations.end_groups(unselected, CANCELLED, "more than the steps needed")
            self._parked.wake_all()

    def _evict(self) -> None:
        """End rows that are too late for the open step, also those being generated."""
        steps, rows, rule = self._steps, self._rows, self._staleness.rule
        if steps.window.finished or not steps.window.under_way or not (late := self._staleness.late()):
            return
        live = rows.live_ids()
        at = rows.at(live)
        admitted = (rows.step[at] == NONE) & (rows.deadline[at] != NONE)
        gone = live[admitted & np.isin(rows.deadline[at], late)]
        if max(late) < steps.window.step:
            reason = f"older than max_staleness {self._limits.max_staleness} (policy {rule.spec.name!r})"
        else:
            reason = f"given up by staleness policy {rule.spec.name!r}"
        self._terminations.end_groups(gone, EXPIRED, reason)

    def _excuse(self) -> None:
        """Rows that ended before they were ready no longer keep the rest of their groups waiting."""
        excused = self._terminations.excused
        while excused:
            name, ids = excused.pop()
            self._ready(self._tasks[name], ids[self._rows.at(ids) >= 0])

    def _cancel_remainder(self) -> None:
        """After the end, cancel rows that are too few to fill the open step. No step follows it."""
        steps, rows = self._steps, self._rows
        if not steps.open or not self.supply_ended() or not steps.lacks_rows:
            return
        live = rows.live_ids()
        at = rows.at(live)
        remainder = steps.unselected_at(at) | (rows.step[at] == steps.window.step)
        self._terminations.end_groups(live[remainder], CANCELLED, "too few to fill a step")
        steps.window.stop()
