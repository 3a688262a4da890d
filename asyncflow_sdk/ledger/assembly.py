"""Step assembly: rows become ready for tasks; the staleness rule selects groups into steps."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import numpy as np

from ..types.tasks import TaskSpec
from .commands import Ids
from .staleness import StalenessControl
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import Grant
from .state.tasks import APART, Task
from .terminations import CANCELLED, EXPIRED, Terminations


class StepAssembly:
    """Makes rows ready and fills steps. ``staleness``, ``terminations``: its rules, for later ones."""

    def __init__(self, state: LedgerState, staleness: StalenessControl, terminations: Terminations) -> None:
        self._state, self.staleness, self.terminations = state, staleness, terminations
        self._rows, self._tasks, self._steps, self._versions = state.rows, state.tasks, state.steps, state.versions

    def make_ready(self, ids: Ids, before: Any, written: int) -> None:
        """Hand rows with columns ``before``, and now ``written``, too, to each task whose needs are now met."""
        for task in sorted(self._tasks, key=attrgetter("makes_steps")):
            need = int(task.need)
            if need & written:
                others = np.uint64(need & ~written)
                fresh = ((before & others) == others) & (task.state[ids - self._rows.base] != APART)
                if (where := fresh.nonzero()[0]).size:
                    self.ready(task, ids[where])

    def make_ready_in(self, task: Task, ids: Ids) -> None:
        """Hand rows to a new task, if its needs are met."""
        at = self._rows.at(ids)
        fresh = ((self._rows.columns[at] & task.need) == task.need) & (task.state[at] != APART)
        if fresh.any():
            self.ready(task, ids[fresh])

    def cancel_broken_groups(self, spec: TaskSpec) -> None:
        """Cancel groups with ended rows before a task is declared: they never become whole in it."""
        rows, partitions = self._rows, self._state.partitions
        for number, ids in partitions.split(rows.live_ids()):
            if spec.takes(partitions.names[number]):
                _, group, present = np.unique(rows.first[rows.at(ids)], return_inverse=True, return_counts=True)
                broken = ids[present[group] < rows.size[rows.at(ids)]]
                reason = f"other rows of their group had ended before task {spec.name!r} was declared"
                self.terminations.end_groups(broken, CANCELLED, reason)

    def refill(self) -> None:
        """Update the open step: evict late rows and select ready ones."""
        excused, steps = self.terminations.excused, self._steps
        while excused:  # groups no longer wait for rows that ended before they became ready
            name, ids = excused.pop()
            self.ready(self._tasks[name], ids[self._rows.at(ids) >= 0])
        if not steps.declared:
            return
        while steps.due:
            if "evict" in steps.due:
                steps.due.remove("evict")
                self._evict()
            if "select" in steps.due:
                steps.due.remove("select")
                self._select()
        if not steps.window.finished:
            if steps.task.closed and steps.lacks_rows:
                self._cancel_remainder()
        elif not steps.task.closed and not (self._state.parked.feeders and self.can_lose()):
            pinned = self._state.partitions.pins  # an evaluation of the last version may follow
            self._state.partitions.end(*(steps.task.spec.partitions if pinned else ()))
            self._state.parked.wake_all()

    def supply_ended(self) -> bool:
        """True if no more rows for steps can be put."""
        return self._state.partitions.ended or (self._steps.declared and self._steps.task.closed)

    def can_lose(self) -> bool:
        """True if rows of steps may be lost with a home: then their feeder puts them again."""
        if not (self._steps.declared and self._state.homes.expected):
            return False
        window, task = self._steps.window, self._steps.task
        last = self._steps.unselected + window.batch_rows - window.free  # outside full steps
        return last >= window.batch_rows or task.left() > last

    def ready(self, task: Task, ids: Ids) -> None:
        """Hand rows with the needed columns to a task."""
        ids = task.ready(ids)
        if not task.makes_steps or not ids.size:
            return
        if (rollout := self._tasks.admitting) is not None:
            rollout.skip(ids[self._rows.deadline[self._rows.at(ids)] == NONE])
        self._steps.push(ids)
        self._select()

    def _select(self) -> None:
        steps, window = self._steps, self._steps.window
        moved = True
        while moved and not window.finished:
            moved = False
            for deadline in sorted(steps.ready, key=lambda d: (d is None, d)):
                if not steps.ready[deadline]:
                    continue
                room = self.staleness.selectable(deadline)
                ids = steps.ready[deadline].take(room, room)
                if not ids.size:
                    continue
                steps.select(ids, deadline)
                moved = True
                if not window.free:
                    self._close_step()
                    break
                if any(request.command.parts for request in self._state.parked.at(steps.task.place)):
                    self._state.context.wake(steps.task.place)

    def _close_step(self) -> None:
        steps = self._steps
        steps.close(checkpoints=self._state.limits.checkpoints, bounded=self.staleness.rule.bounded)
        self._state.context.wake(steps.task.place, "put", "wanted")
        if steps.window.finished:
            live = self._rows.live_ids()
            unselected = live[steps.unselected_at(self._rows.at(live))]
            self.terminations.end_groups(unselected, CANCELLED, "more than the steps needed")
            self._state.parked.wake_all()

    def _evict(self) -> None:
        """Expire rows too late for the open step, also while they are generated."""
        steps, rows, rule = self._steps, self._rows, self.staleness.rule
        if steps.window.finished or not steps.window.under_way or not (late := self.staleness.late()):
            return
        live = rows.live_ids()
        at = rows.at(live)
        admitted = (rows.step[at] == NONE) & (rows.deadline[at] != NONE)
        reason = f"given up by staleness policy {rule.spec.name!r}"
        if max(late) < steps.window.step:
            reason = f"older than max_staleness {self._state.limits.max_staleness} (policy {rule.spec.name!r})"
        self.terminations.end_groups(live[admitted & np.isin(rows.deadline[at], late)], EXPIRED, reason)

    def _cancel_remainder(self) -> None:
        steps, rows = self._steps, self._rows
        live = rows.live_ids()
        at = rows.at(live)
        remainder = steps.unselected_at(at) | (rows.step[at] == steps.window.step)
        self.terminations.end_groups(live[remainder], CANCELLED, "too few to fill a step")
        steps.window.stop()

    # ---- versions of steps: they diverge after rollbacks, and when steps are trained again

    def version_of(self, step: int) -> int:
        """Return the version trained by a step. It is no lower than the version announced to its holder, nor than
        implied by versions announced to holders of earlier steps, when the offset may have been larger."""
        told = (grant.newest + step - grant.step for grant in self._steps.task.leases.values() if grant.step <= step)
        return max([self._versions.lineage.version(step), *told])

    def in_training(self) -> int:
        """Return the first step with an unpublished update."""
        steps, versions = self._steps, self._versions
        step, waiting = steps.next_to_train(), {step for step, _ in steps.closed}
        last = steps.window.step
        while versions.current > versions.lineage.version(step) and step + 1 < last and step + 1 not in waiting:
            step += 1  # published but not acknowledged, while the next one is trained
        return step

    def lease(self, step: int) -> None:
        """Note the lease of a step. If its update is current, it trains the next version."""
        versions = self._versions
        if versions.current > versions.lineage.version(step):
            versions.lineage.add(versions.current + 1, versions.current, step + 1, resumed=step)

    def place(self, version: int) -> None:
        """Note a version becoming current. It is trained by the step after the one in training,
        or by an earlier one; the first version by the first step."""
        if not self._steps.declared:
            return
        versions, step = self._versions, self.in_training()
        most = step if versions.current == NONE else min(versions.lineage.step(version), step + 1)
        if versions.lineage.step(version) != most:
            versions.lineage.add(version, version - 1, most)

    def acknowledge(self, grant: Grant) -> None:
        """Note the acknowledgement of a step. If its update was never published (the step was leased
        before a rollback, or trained again), the next step trains the current version."""
        versions = self._versions
        lineage, last = versions.lineage, versions.lineage.last
        if versions.current != last.first:
            return
        before = grant.offsets < len(lineage.changes)
        if last.resumed != NONE:  # later steps may have been acknowledged before it
            lost = grant.step == last.resumed
        elif last.rolled_back:
            lost = before or grant.step < lineage.step(lineage.origin(last.parent))
        else:
            lost = before and grant.newest < versions.current
        if lost:
            last.lower(versions.current - self._steps.next_to_train())
            self._tasks.wake_replicas()
