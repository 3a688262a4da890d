"""Row completion: leased rows are completed or returned."""

from __future__ import annotations

import numpy as np

from ..errors import SchemaError, WriteOnceError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids
from .state import LedgerState
from .state.context import Placed, Trained
from .state.rows import LIVE, NONE
from .state.sessions import Grant
from .state.tasks import DONE, READY, WAITING, Task, positions
from .terminations import CONSUMED, FAILED, FILTERED, Terminations

NO_GRADIENT = "no gradient, as in a group with equal rewards"

TOGETHER = 8
"""Further losses after which rows fail without a lease of their own. Seven quarters leave one row of 16,384."""


class RowCompletion:
    """Ends the work on leased rows."""

    def __init__(self, state: LedgerState, terminations: Terminations, assembly: StepAssembly) -> None:
        self._state, self._terminations, self._assembly = state, terminations, assembly

    def complete(self, grant: Grant, part: Ids, command: cmd.Complete) -> cmd.Completed:
        """Write and acknowledge rows, all or nothing. Positions in the command are in ``part``."""
        task, rows, columns = self._state.tasks[grant.task], self._state.rows, self._state.columns
        ids = part if command.index is None else part[positions(command.index, len(part))]
        whole = grant.left == len(grant.ids)  # no row was lost since
        held = None if whole else self._state.leases.having(grant, ids)
        if grant.parts != NONE:
            self._check_whole(grant, ids, part, command)
        filtered = self._check(grant, task, ids, command)
        mine = ids if held is None else ids[held]
        pick = slice(None) if held is None else held
        at = rows.at(mine)
        before = rows.columns[at]  # a copy
        self._check_unwritten(mine, before, command)
        written = 0
        if len(mine) and command.columns:
            written = columns.write(mine, command.columns)
            columns.measure(mine, command.measures, pick)
            if command.lengths:
                self._state.metrics.note_lengths(mine, command.lengths, pick, grant.since)
            self._state.budget.charge(at, command.nbytes * len(mine) // len(ids))
            if command.block is not None:
                placed = Placed(mine, command.block, np.arange(len(ids))[pick])
                self._state.context.effects.placed.append(placed)
        if grant.step != NONE:
            trained = Trained(grant.step, mine, rows.first[at], rows.current[at])
            self._state.context.effects.trained.append(trained)
        task.done(mine)
        if task.spec.admits:
            self._state.versions.completed(mine, grant.newest)
            self._state.tasks.wake_replica(grant.session)  # it has room for others
        self._state.leases.release(grant, len(mine))
        if filtered is not None and len(dropped := mine[filtered[pick]]):
            self._filter(grant, task, dropped)
            alive = rows.state[at] == LIVE
            mine, before, at = mine[alive], before[alive], at[alive]
        if written:
            self._assembly.make_ready(mine, before, written)
        self.consume(mine, at)
        if grant.step != NONE:
            self._assembly.acknowledge(grant)
            if not grant.left:
                self._state.steps.finish(grant.step)
                self._state.context.wake("wanted")
        return cmd.Completed(revoked=b"" if held is None else pack_ids(ids[~held]))

    def consume(self, ids: Ids, at: Ids) -> None:
        """End rows completed by all tasks, if one of these gives no columns. Rows of uncovered
        steps are held. ``at``: the array indices of ``ids``."""
        rows = self._state.rows
        over = rows.todo[at] == 0
        if True not in over:
            return
        if self._state.limits.checkpoints:
            held = over & (rows.step[at] >= self._state.steps.covered) & (rows.state[at] == LIVE)
            if held.any():
                self._state.budget.hold(int(np.count_nonzero(held)))
                over &= ~held
                self._state.context.wake("put")
        for partition, done in self._state.partitions.split(ids[over & (rows.state[at] == LIVE)]):
            takers = self._state.tasks.takers(self._state.partitions.names[partition])
            if any(not task.spec.gives for task in takers):
                self._terminations.finish(done, CONSUMED, through=partition)

    def skip(self, ids: Ids, reason: str) -> None:
        """Make rows done in all their tasks."""
        at = self._state.rows.at(ids)
        for task in self._state.tasks:
            open_ids = ids[task.state[at] < DONE]
            self._terminations.withdraw(task, open_ids, task.skip(open_ids))
        self._terminations.note_skipped(len(ids), reason)
        self.consume(ids, at)

    def give_back(self, grant: Grant, ids: Ids, reason: str, *, blame: bool, lost: int = 0) -> None:
        """Return rows to their task; a step returns whole. With ``blame`` they are leased with fewer others next.
        A row, or group of a task with whole groups, fails with its group if it lost too many leases, the last one
        by itself. ``lost``: how many a lost session held, at least."""
        task, rows = self._state.tasks[grant.task], self._state.rows
        if task.spec.batch_rows is not None:
            self._terminations.give_back_step(grant, reason)
            return
        if not len(ids):
            return
        self._terminations.note_return(grant, ids, reason)
        task.give_back(ids, blame=blame)
        self._state.leases.release(grant, len(ids))
        if blame:
            self._state.dead_letters.blame(rows.first[rows.at(ids)], f"{grant.task}: {reason}")
            units = max(lost, len(np.unique(task.units(ids))))
            task.narrow(ids, units, died=lost > 0)
            ids = self._fail_spent(task, ids, reason, task.spec.max_attempts + (0 if units == 1 else TOGETHER))
        if task.spec.admits:
            self._return_admitted(task, ids)
        else:
            task.return_to_queue(ids)
        self._state.context.wake(task.place)

    def void(self, grant: Grant, reason: str, *, blame: bool, lost: int = 1) -> None:
        """Return all rows of a lease and end it. ``lost``: an argument of ``give_back``."""
        ids = self._state.leases.outstanding(grant)
        self.give_back(grant, ids, reason, blame=blame, lost=lost)
        self._state.leases.remove(grant)
        if blame and self._state.tasks[grant.task].spec.batch_rows is None:
            firsts = self._state.rows.first[self._state.rows.at(ids)]
            self._state.dead_letters.note_lost(self._state.sessions.name(grant.session), firsts)

    def check_delivered(self, grant: Grant) -> None:
        """Raise SchemaError unless all parts of a step in parts are delivered."""
        if not self._state.steps.delivered_whole(grant):
            raise SchemaError(
                f"step {grant.step} is not delivered whole: lease {grant.token} has {len(grant.ids)} rows of it, in"
                f" {grant.parts} parts; get the others before it is acknowledged"
            )

    def _check_whole(self, grant: Grant, ids: Ids, part: Ids, command: cmd.Complete) -> None:
        """Raise SchemaError unless a step in parts is acknowledged whole."""
        if command.columns:
            raise SchemaError("a step in parts is acknowledged without columns; write them before")
        self.check_delivered(grant)
        if len(ids) != len(part):
            raise SchemaError(
                f"{len(ids)} of {len(part)} rows of step {grant.step} are acknowledged; a step in parts is"
                " acknowledged whole"
            )

    def _check(
        self, grant: Grant, task: Task, ids: Ids, command: cmd.Complete
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Raise SchemaError for wrong or missing columns. Return the mask of rows to drop."""
        if grant.step != NONE and self._state.limits.checkpoints and command.columns:
            raise SchemaError("a step that may be trained again is acknowledged without columns; write them before")
        if command.block is not None and command.block.rows != len(ids):
            raise SchemaError(f"{len(ids)} rows are completed with {command.block.rows} values")
        missing = [name for name in task.spec.gives if name not in command.columns]
        filtered = None
        if command.filtered is not None:
            filtered = np.zeros(len(ids), bool)
            filtered[positions(command.filtered, len(ids))] = True
        if missing and len(ids) and (filtered is None or not filtered.all()):
            raise SchemaError(f"task {grant.task!r} gives {', '.join(map(repr, missing))}, missing in this command")
        self._state.columns.check(command.columns)
        return filtered

    def _check_unwritten(self, ids: Ids, have: Ids, command: cmd.Complete) -> None:
        """Raise WriteOnceError if ``have``, the columns of rows, include one of the command."""
        mask = np.uint64(self._state.columns.mask(command.columns))
        written = have & mask
        if True not in (written != 0):
            return
        name = next(name for name in command.columns if (written & self._state.columns.bit(name)).any())
        twice = (have & self._state.columns.bit(name)) != 0
        raise WriteOnceError(f"column {name!r} of row {ids[twice][0]} is already written")

    def _filter(self, grant: Grant, task: Task, dropped: Ids) -> None:
        """End rows dropped by a task; rows of an uncovered step end when a checkpoint covers it."""
        if task.spec.batch_rows is None:
            self._terminations.end_groups(dropped, FILTERED, f"filtered by task {grant.task!r}")
        elif not self._state.limits.checkpoints or grant.step < self._state.steps.covered:
            self._terminations.finish(dropped, FILTERED, NO_GRADIENT)
        else:
            self._state.steps.end_later(dropped, FILTERED)

    def _fail_spent(self, task: Task, ids: Ids, reason: str, most: int) -> Ids:
        """Fail rows that lost ``most`` leases, with their groups. Return those still ready."""
        rows, name = self._state.rows, task.spec.name
        spent = task.spent(ids, most)
        if len(spent):
            why = f"failed {most} times in task {name!r}; last: {reason}"
            self._add_dead_letters(spent, name)
            self._terminations.end_groups(spent, FAILED, why)
            skipped = spent[rows.state[rows.at(spent)] == LIVE]
            if len(skipped):  # in a full step already: only this task skips it
                task.skip(skipped)
                self._terminations.note_skipped(len(skipped), why)
                self.consume(skipped, rows.at(skipped))
            ids = ids[rows.having(task.state, READY, ids)]
        return ids

    def _add_dead_letters(self, ids: Ids, task: str) -> None:
        """Keep dead letters of failing groups, except groups in a full step."""
        rows = self._state.rows
        if self._state.steps.declared:
            ids = ids[self._state.steps.not_closed(rows.at(ids))]
        firsts, where = np.unique(rows.first[rows.at(ids)], return_index=True)
        for first, size in zip(firsts.tolist(), rows.size[rows.at(ids[where])].tolist(), strict=True):
            key, place = self._state.keys.find(first)
            self._state.dead_letters.failed(
                first=first, rows=size, task=task, partition=self._state.partitions.name_of(firsts[firsts == first]), key=key,
                place=place, time_s=self._state.context.now,
            )  # fmt: skip

    def _return_admitted(self, task: Task, ids: Ids) -> None:
        """Withdraw the admission of untouched groups; of others, queue missing rows again."""
        rows, steps = self._state.rows, self._state.steps
        trained = steps.takes(rows.at(ids))
        self._state.versions.withdraw(rows.at(ids[~trained]))
        task.return_to_queue(ids[~trained])
        ids = ids[trained]
        for first in np.unique(rows.first[rows.at(ids)])[::-1]:
            back = ids[rows.first[rows.at(ids)] == first]
            group = rows.members(back)
            at = rows.at(group)
            partition = int(rows.partition[at[0]])
            begun = (task.state[at] != READY) | (steps.task.state[at] != WAITING)
            if begun.any():
                task.return_to_replica(partition, back)
            else:
                steps.withdraw(group)
                self._state.versions.withdraw(at)
                task.queue(partition).push(group, front=True)
