"""Completion: leased rows are completed or given back."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import SchemaError, WriteOnceError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids
from .state import LedgerState
from .state.grants import Grant
from .state.leases import positions
from .state.rows import DONE, LEASED, LIVE, NONE, READY, SELECTED, WAITING
from .state.tasks import Task
from .terminations import CONSUMED, FAILED, FILTERED, Terminations, returned
from .training import Training

NO_GRADIENT = "no gradient in the step"


class Completion:
    """Ends the work on leased rows."""

    def __init__(
        self, state: LedgerState, training: Training, terminations: Terminations, assembly: StepAssembly
    ) -> None:
        self._context, self._rows, self._columns, self._partitions = (
            state.context,
            state.rows,
            state.columns,
            state.partitions,
        )
        self._limits, self._budget, self._sessions, self._tasks = (
            state.limits,
            state.budget,
            state.sessions,
            state.tasks,
        )
        self._steps, self._versions, self._training, self._leases = (
            state.steps,
            state.versions,
            training,
            state.leases,
        )
        self._metrics, self._letters, self._keys = state.metrics, state.letters, state.keys
        self._terminations, self._assembly = terminations, assembly

    def complete(self, grant: Grant, part: Ids, command: cmd.Complete) -> cmd.Completed:
        """Write columns of rows and acknowledge them. Positions in the command are those in ``part`` of the lease. All or nothing."""
        task, rows, columns = self._tasks[grant.task], self._rows, self._columns
        ids = part if command.index is None else part[positions(command.index, len(part))]
        whole = grant.left == len(grant.ids)  # then it holds all its rows
        held = None if whole else self._leases.having(grant, ids)
        filtered = self._check(grant, task, ids, command)
        mine = ids if held is None else ids[held]
        pick = slice(None) if held is None else held
        at = rows.at(mine)
        spot, before = rows.spot(at), rows.columns[at]  # a copy
        self._check_unwritten(mine, before, command)
        if len(mine) and command.columns:
            columns.count(at, -1)
            rows.columns[at] = before | np.uint64(columns.add(command.columns))
            columns.measure(mine, command.measures, pick)
            columns.count(at, 1)
            if command.lengths:
                self._metrics.note_lengths(mine, command.lengths, pick, grant.since)
            self._budget.charge(mine, command.nbytes * len(mine) // len(ids))
        task.move(len(mine), LEASED, DONE)
        task.passed += len(mine)
        rows.task(grant.task, "state")[spot] = DONE
        rows.task(grant.task, "token")[spot] = NONE
        if task.spec.admits:
            rows.newest[spot] = grant.newest
            rows.current[spot] = self._versions.current
        rows.todo[spot] -= 1
        self._tasks.leave(task, mine)
        self._leases.release(grant, len(mine))
        if filtered is not None and len(dropped := mine[filtered[pick]]):
            self._filter(grant, task, dropped)
            alive = rows.state[at] == LIVE
            mine, before, at = mine[alive], before[alive], at[alive]
        if command.columns:
            self._assembly.make_ready(mine, before)
        self.consume(mine, at)
        if grant.step != NONE:
            self._training.acknowledge(grant)
        return cmd.Completed(revoked=b"" if held is None else pack_ids(ids[~held]))

    def consume(self, ids: Ids, at: Ids) -> None:
        """End those of ``ids``, at places ``at``, that every task has completed, if one of these tasks gives no columns. Rows of a step that
        no checkpoint covers are held instead."""
        rows = self._rows
        over = rows.todo[at] == 0
        if not np.count_nonzero(over):
            return
        if self._limits.checkpoints:
            held = over & (rows.step[at] >= self._steps.covered) & (rows.state[at] == LIVE)
            if held.any():
                self._budget.held += int(np.count_nonzero(held))
                over &= ~held
                self._context.wake("put")
        for partition, done in self._partitions.split(ids[over & (rows.state[at] == LIVE)]):
            if any(not task.spec.gives and self._tasks.takes(task, partition) for task in self._tasks):
                self._terminations.finish(done, CONSUMED, through=partition)

    def give_back(self, grant: Grant, ids: Ids, reason: str, *, blame: bool) -> None:
        """Return rows to their task. With ``blame``, rows that lost too many leases fail with their group. A step goes back whole."""
        task, rows, name = self._tasks[grant.task], self._rows, grant.task
        makes_steps = task.spec.batch_rows is not None
        if makes_steps:
            ids = self._leases.outstanding(grant)
        if not len(ids):
            return
        returned(self._context, self._sessions.name(grant.session), name, len(ids), reason)
        at = rows.at(ids)
        rows.task(name, "token")[at] = NONE
        self._leases.release(grant, len(ids))
        task.move(len(ids), LEASED, SELECTED if makes_steps else READY)
        rows.task(name, "state")[at] = SELECTED if makes_steps else READY
        if makes_steps:
            self._steps.take_back(grant.step, ids)
        else:
            self._tasks.count_fit(task, ids, 1)
            rows.task(name, "attempts")[at] += blame
            if blame:
                self._letters.blame(rows.first[at], f"{name}: {reason}")
            ids = self._fail_spent(task, ids, reason)
            if task.spec.admits:
                self._return_admitted(task, ids)
            else:
                self._tasks.return_to_queue(task, ids)
        self._context.wake(task.place)

    def void(self, grant: Grant, reason: str, *, blame: bool) -> None:
        """Return all rows of a lease, and end it."""
        self.give_back(grant, self._leases.outstanding(grant), reason, blame=blame)
        self._leases.remove(grant)

    def _check(
        self, grant: Grant, task: Task, ids: Ids, command: cmd.Complete
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Raise SchemaError for columns that are wrong or missing. Return True for each row to drop; None for none."""
        if grant.step != NONE and self._limits.checkpoints and command.columns:
            raise SchemaError(
                "a step that may be trained again is acknowledged without columns; write them before it"
            )
        missing = [name for name in task.spec.gives if name not in command.columns]
        filtered = None
        if command.filtered is not None:
            filtered = np.zeros(len(ids), bool)
            filtered[positions(command.filtered, len(ids))] = True
        if missing and len(ids) and (filtered is None or not filtered.all()):
            raise SchemaError(f"task {grant.task!r} gives {', '.join(map(repr, missing))}, which this lacks")
        self._columns.check(command.columns)
        return filtered

    def _check_unwritten(self, ids: Ids, have: Ids, command: cmd.Complete) -> None:
        """Raise WriteOnceError if rows that have the columns ``have`` already have one of the command's."""
        mask = np.uint64(self._columns.mask(command.columns))
        if not mask or not np.count_nonzero(written := have & mask):
            return
        name = next(name for name in command.columns if (written & self._columns.bit(name)).any())
        twice = (have & self._columns.bit(name)) != 0
        raise WriteOnceError(f"column {name!r} of row {ids[twice][0]} is already written")

    def _filter(self, grant: Grant, task: Task, dropped: Ids) -> None:
        """End rows that a task drops; of a step that no checkpoint covers, when one does."""
        if task.spec.batch_rows is None:
            self._terminations.end_groups(dropped, FILTERED, f"filtered by task {grant.task!r}")
        elif not self._limits.checkpoints or grant.step < self._steps.covered:
            self._terminations.finish(dropped, FILTERED, NO_GRADIENT)
        else:
            self._rows.fate[self._rows.at(dropped)] = FILTERED

    def _fail_spent(self, task: Task, ids: Ids, reason: str) -> Ids:
        """Fail rows that have lost too many leases, with their groups. Return the others that are still ready."""
        rows, name, most = self._rows, task.spec.name, task.spec.max_attempts
        spent = ids[rows.task(name, "attempts")[rows.at(ids)] >= most]
        if len(spent):
            why = f"failed {most} times in task {name!r}; last: {reason}"
            self._bury(spent, name)
            self._terminations.end_groups(spent, FAILED, why)
            skipped = spent[rows.state[rows.at(spent)] == LIVE]
            if len(skipped):  # a full step has the row already: only this task goes without it
                rows.task(name, "state")[rows.at(skipped)] = DONE
                task.move(len(skipped), READY, DONE)
                self._tasks.count_fit(task, skipped, -1)
                rows.todo[rows.at(skipped)] -= 1
                self._tasks.leave(task, skipped)
                terminations = self._terminations
                terminations.reasons[f"skipped: {terminations.shortened('skipped', why)}"] += len(skipped)
                self.consume(skipped, rows.at(skipped))
            ready = rows.task(name, "state")[rows.at(ids)] == READY
            ids = ids[(rows.state[rows.at(ids)] == LIVE) & ready]
        return ids

    def _bury(self, ids: Ids, task: str) -> None:
        """Keep dead letters of groups that now fail. Groups in a full step do not."""
        rows = self._rows
        if self._steps.declared:
            ids = ids[self._steps.not_closed(rows.at(ids))]
        firsts, where = np.unique(rows.first[rows.at(ids)], return_index=True)
        for first, size in zip(firsts.tolist(), rows.size[rows.at(ids[where])].tolist(), strict=True):
            key, place = self._keys.find(first)
            self._letters.failed(
                first=first, rows=size, task=task, partition=self._partitions.name_of(firsts[firsts == first]), key=key,
                place=place, time_s=self._context.now,
            )  # fmt: skip

    def _return_admitted(self, task: Task, ids: Ids) -> None:
        """Groups that nobody has begun lose their admission; of others, the missing rows are generated again."""
        rows, name, steps = self._rows, task.spec.name, self._steps
        trained = steps.takes(rows.at(ids))
        rows.version[rows.at(ids[~trained])] = NONE
        self._tasks.return_to_queue(task, ids[~trained])
        ids = ids[trained]
        for first in np.unique(rows.first[rows.at(ids)])[::-1]:
            back = ids[rows.first[rows.at(ids)] == first]
            group = rows.members(back)
            at = rows.at(group)
            partition = int(rows.partition[at[0]])
            begun = (rows.task(name, "state")[at] != READY) | (rows.task(steps.name, "state")[at] != WAITING)
            if begun.any():
                task.redo.setdefault(partition, deque()).appendleft(back)
            else:
                steps.withdraw(group)
                rows.version[at] = rows.newest[at] = rows.deadline[at] = NONE
                self._tasks.queue(task, partition).push_front(group)
