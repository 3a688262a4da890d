"""Rows becoming ready, and the step task: ready groups are selected into steps under the staleness rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .commands import Ids
from .policing import Policing
from .ready import ReadyQueue
from .records import Task
from .rows import APART, DONE, LIVE, NONE, READY, SELECTED, WAITING


class Stepping(Policing):
    """Makes rows ready and fills steps."""

    def _make_ready_alike(self, tasks: Iterable[Task], ids: Ids, have: int, before: int) -> None:
        """Rows that all have the columns ``have`` and had ``before`` are handed to those of ``tasks`` that were not
        ready to take them then. The tasks take their partition."""
        for task in self._step_last(tasks):
            need = int(task.need)
            if have & need == need and (before & need != need if need else not before):
                self._ready(task, ids)

    def _make_ready(self, ids: Ids, before: Any, only: Task | None = None) -> None:
        """Columns were written: hand rows to the tasks whose needs they now meet."""
        at = self.rows.at(ids)
        have = self.rows.columns[at]
        for task in [only] if only is not None else self._step_last(self.tasks.values()):
            need = task.need
            fresh = (have & need) == need
            if len(self.partitions) > 1 or not task.spec.takes(""):
                fresh &= self.rows.task(task.spec.name, "state")[at] != APART
            if only is None and need:
                fresh &= (before & need) != need
            elif only is None:
                fresh &= before == 0
            if fresh.any():
                self._ready(task, ids[fresh])

    def _step_last(self, tasks: Iterable[Task]) -> list[Task]:
        """What fills the last step ends the rows that are too many: no other task must hear of them after that."""
        return sorted(tasks, key=lambda task: self.steps is not None and task is self.steps.task)

    def _ready(self, task: Task, ids: Ids) -> None:
        name = task.spec.name
        if task.spec.grouped or task.sampling.whole_groups:
            ids = self.rows.arrive(name, ids)
            at = self.rows.at(ids)  # not those that were skipped, or have ended
            ids = ids[(self.rows.task(name, "state")[at] == WAITING) & (self.rows.state[at] == LIVE)]
            if not len(ids):
                return
        self.rows.task(name, "state")[self.rows.spot(self.rows.at(ids))] = READY
        task.move(len(ids), WAITING, READY)
        task.came += len(ids)
        if self.steps is not None and task is self.steps.task:
            self._ready_for_step(ids)
            self._select()
        else:
            self._count_waiting(task, ids)
            self._count_fit(task, ids, 1)
            for partition, part in self._by_partition(ids):
                self._queue(task, partition).push(part)
            self._dirty.add(f"task {name}")

    def _ready_for_step(self, ids: Ids) -> None:
        assert self.steps is not None
        deadlines = self.rows.deadline[self.rows.at(ids)]
        for task in self.tasks.values():
            if task.spec.admits:
                self._skip(task, ids[deadlines == NONE])
        for deadline in np.unique(deadlines).tolist():
            key = None if deadline == NONE else deadline
            if key not in self.steps.ready:
                self.steps.ready[key] = ReadyQueue(self.rows, self.steps.task.spec.name)
            self.steps.ready[key].push(ids[deadlines == deadline])

    def _skip(self, task: Task, ids: Ids) -> None:
        """Rows that the step can take as they came need no generating."""
        state = self.rows.task(task.spec.name, "state")
        ids = ids[state[self.rows.at(ids)] != APART]
        at = self.rows.at(ids)
        for before, count in enumerate(np.bincount(state[at]).tolist()):
            task.move(count, before, DONE)
        state[at] = DONE
        self.rows.todo[at] -= 1
        self._through(task, ids)

    def _select(self) -> None:
        """Fill the step with ready groups, earliest deadline first, as far as the policy allows."""
        steps, rows = self.steps, self.rows
        assert steps is not None
        window, name = steps.window, steps.task.spec.name
        moved = True
        while moved and not window.finished:
            moved = False
            for deadline in sorted(steps.ready, key=lambda d: (d is None, d)):
                if not steps.ready[deadline]:
                    continue
                room = self._selectable(deadline)
                ids = steps.ready[deadline].take_groups(room, room)
                if not len(ids):
                    continue
                at = rows.at(ids)
                rows.task(name, "state")[at] = SELECTED
                steps.task.move(len(ids), READY, SELECTED)
                rows.step[at] = window.step
                window.select(len(ids), deadline)
                self.unselected -= len(ids)
                steps.filling.append(ids)
                moved = True
                if not window.free:
                    self._close_step()
                    break

    def _close_step(self) -> None:
        steps = self.steps
        assert steps is not None
        steps.closed.append((steps.window.step, np.concatenate(steps.filling)))
        if self.checkpoints:
            steps.whole[steps.window.step] = steps.closed[-1][1]
        steps.filling = []
        steps.window.close()
        steps.ready = {
            d: queue
            for d, queue in steps.ready.items()
            if d is None or d >= steps.window.step or (not self.rule.bounded and steps.window.has(d))
        }
        self._stepped = True
        self._dirty.update((f"task {steps.task.spec.name}", "put", "wanted"))
        if steps.window.finished:
            self.ended = True
            self._cancel_unselected("more than the steps needed")
            self._wake_all()

    def _excuse(self) -> None:
        """Rows that ended before they were ready no longer keep the rest of their groups waiting."""
        while self._excused:
            name, ids = self._excused.pop()
            self._ready(self.tasks[name], ids[self.rows.at(ids) >= 0])

    def _refill(self) -> None:
        self._excuse()
        while self.steps is not None and (self._stepped or self._reselect):
            if self._stepped:
                self._evict()
            if self._reselect:
                self._reselect = False
                self._select()
        self._cancel_what_cannot_fill()
