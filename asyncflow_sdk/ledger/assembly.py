"""Step assembly: rows become ready for tasks; the staleness rule selects groups into steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .commands import Ids
from .staleness import StalenessControl
from .state import LedgerState
from .state.rows import APART, LIVE, NONE, READY, SELECTED, WAITING
from .state.tasks import Task
from .terminations import CANCELLED, EXPIRED, Terminations


class StepAssembly:
    """Makes rows ready and fills steps."""

    def __init__(self, state: LedgerState, staleness: StalenessControl, terminations: Terminations) -> None:
        self._state, self._staleness, self._terminations = state, staleness, terminations

    def make_ready_alike(self, tasks: Iterable[Task], ids: Ids, have: int, before: int) -> None:
        """Like ``make_ready`` for rows with equal columns, of a partition that ``tasks`` take."""
        for task in self._step_last(tasks):
            need = int(task.need)
            if have & need == need and (before & need != need if need else not before):
                self._ready(task, ids)

    def make_ready(self, ids: Ids, before: Any, only: Task | None = None) -> None:
        """Hand rows (with columns ``before`` until now) to each task whose needs are now met, or to
        ``only``, a new task."""
        at = self._state.rows.at(ids)
        have = self._state.rows.columns[at]
        for task in [only] if only is not None else self._step_last(self._state.tasks):
            need = task.need
            fresh = (have & need) == need
            if len(self._state.partitions.numbers) > 1 or not task.spec.takes(""):
                fresh &= self._state.rows.task(task.spec.name, "state")[at] != APART
            if only is None and need:
                fresh &= (before & need) != need
            elif only is None:
                fresh &= before == 0
            if fresh.any():
                self._ready(task, ids[fresh])

    def refill(self) -> None:
        """Update the open step: evict late rows and select ready ones."""
        excused = self._terminations.excused
        while excused:  # groups no longer wait for rows that ended before they became ready
            name, ids = excused.pop()
            self._ready(self._state.tasks[name], ids[self._state.rows.at(ids) >= 0])
        steps = self._state.steps
        while steps.declared and (steps.just_closed or steps.reselect):
            if steps.just_closed:
                steps.just_closed = False
                self._evict()
            if steps.reselect:
                steps.reselect = False
                self._select()
        self._cancel_remainder()

    def supply_ended(self) -> bool:
        """True if no more rows for steps can be put."""
        if self._state.partitions.ended:
            return True
        return self._state.steps.declared and self._state.partitions.ended_names.issuperset(
            self._state.steps.task.spec.partitions
        )

    def _step_last(self, tasks: Iterable[Task]) -> list[Task]:
        """Sort tasks, the step task last: filling the last step ends rows others must not see."""
        return sorted(tasks, key=self._state.steps.makes)

    def _ready(self, task: Task, ids: Ids) -> None:
        rows, name = self._state.rows, task.spec.name
        if task.whole_groups:
            ids = rows.arrive(name, ids)
            at = rows.at(ids)  # some were skipped or have ended
            ids = ids[(rows.task(name, "state")[at] == WAITING) & (rows.state[at] == LIVE)]
            if not len(ids):
                return
        rows.task(name, "state")[rows.write_index(rows.at(ids))] = READY
        task.move(len(ids), WAITING, READY)
        task.became_ready += len(ids)
        if self._state.steps.makes(task):
            if (rollout := self._state.tasks.admitting) is not None:
                self._state.tasks.skip(rollout, ids[rows.deadline[rows.at(ids)] == NONE])
            self._state.steps.push(ids)
            self._select()
            return
        self._state.tasks.count_waiting(task, ids)
        self._state.tasks.count_fit(task, ids, 1)
        for partition, part in self._state.partitions.split(ids):
            self._state.tasks.queue(task, partition).push(part)
        self._state.context.wake(task.place)

    def _select(self) -> None:
        """Fill the step with ready groups, earliest deadline first, as far as the policy allows."""
        steps, rows, window = self._state.steps, self._state.rows, self._state.steps.window
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
                steps.open_rows.append(ids)
                moved = True
                if not window.free:
                    self._close_step()
                    break
                if any(request.command.parts for request in self._state.parked.at(steps.task.place)):
                    self._state.context.wake(steps.task.place)

    def _close_step(self) -> None:
        steps, window = self._state.steps, self._state.steps.window
        if self._state.limits.checkpoints:
            steps.uncovered[window.step] = np.concatenate(steps.open_rows)
        steps.close()
        window.close()
        bounded = self._staleness.rule.bounded
        steps.ready = {
            deadline: queue
            for deadline, queue in steps.ready.items()
            if deadline is None or deadline >= window.step or (not bounded and window.has(deadline))
        }
        steps.just_closed = True
        self._state.context.wake(steps.task.place, "put", "wanted")
        if window.finished:
            if self._state.partitions.pins:  # an evaluation of the last version may follow
                self._state.partitions.ended_names.update(steps.task.spec.partitions)
            else:
                self._state.partitions.ended = True
            live = self._state.rows.live_ids()
            unselected = live[steps.unselected_at(self._state.rows.at(live))]
            self._terminations.end_groups(unselected, CANCELLED, "more than the steps needed")
            self._state.parked.wake_all()

    def _evict(self) -> None:
        """Expire rows too late for the open step, also while they are generated."""
        steps, rows, rule = self._state.steps, self._state.rows, self._staleness.rule
        if steps.window.finished or not steps.window.under_way or not (late := self._staleness.late()):
            return
        live = rows.live_ids()
        at = rows.at(live)
        admitted = (rows.step[at] == NONE) & (rows.deadline[at] != NONE)
        gone = live[admitted & np.isin(rows.deadline[at], late)]
        if max(late) < steps.window.step:
            reason = f"older than max_staleness {self._state.limits.max_staleness} (policy {rule.spec.name!r})"
        else:
            reason = f"given up by staleness policy {rule.spec.name!r}"
        self._terminations.end_groups(gone, EXPIRED, reason)

    def _cancel_remainder(self) -> None:
        """After the end of the stream, cancel rows too few to fill the open step, the last one."""
        steps, rows = self._state.steps, self._state.rows
        if not steps.open or not self.supply_ended() or not steps.lacks_rows:
            return
        live = rows.live_ids()
        at = rows.at(live)
        remainder = steps.unselected_at(at) | (rows.step[at] == steps.window.step)
        self._terminations.end_groups(live[remainder], CANCELLED, "too few to fill a step")
        steps.window.stop()
