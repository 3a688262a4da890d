"""Row completion: leased rows are completed or returned."""

from __future__ import annotations

from collections import deque

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
from .terminations import CONSUMED, FAILED, FILTERED

NO_GRADIENT = "no gradient, as in a group with equal rewards"

TOGETHER = 8
"""Further losses after which rows fail without a lease of their own. Seven quarters leave one row of 16,384."""


class RowCompletion:
    """Ends the work on leased rows. ``terminations``: for later rules."""

    def __init__(self, state: LedgerState, assembly: StepAssembly) -> None:
        self._state, self.terminations, self._assembly = state, assembly.terminations, assembly
        self._rows, self._tasks, self._leases, self._steps = state.rows, state.tasks, state.leases, state.steps

    def complete(self, grant: Grant, part: Ids, command: cmd.Complete) -> cmd.Completed:
        """Write and acknowledge rows, all or nothing. Positions in the command are in ``part``."""
        state = self._state
        task, rows, columns, effects = state.tasks[grant.task], state.rows, state.columns, state.context.effects
        ids = part if command.index is None else part[positions(command.index, part.size)]
        count = ids.size
        held = None if grant.left == len(grant.ids) else state.leases.having(grant, ids)  # None: no row was lost
        filtered = self._check(grant, task, count, part.size, command)
        mine, pick = (ids, slice(None)) if held is None else (ids[held], held)
        at = mine - rows.base
        before = rows.columns[at]  # a copy
        self._check_unwritten(mine, before, command)
        written = 0
        if command.columns and mine.size:
            written = columns.write(mine, command.columns)
            if command.measures:
                columns.measure(mine, command.measures, pick)
            if command.lengths:
                state.metrics.note_lengths(mine, command.lengths, pick, grant.since)
            state.budget.charge(at, command.nbytes * mine.size // count)
            if command.block is not None:
                effects.placed.append(Placed(mine, command.block, np.arange(count)[pick]))
        if grant.step != NONE:
            effects.trained.append(Trained(grant.step, mine, rows.first[at], rows.current[at]))
        task.done(mine)
        if task.spec.admits:
            state.versions.completed(mine, grant.newest)
            state.tasks.wake_replica(grant.session)  # it has room for others
        state.leases.release(grant, mine.size)
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
                state.steps.finish(grant.step)
                state.context.wake("wanted")
        return cmd.Completed(revoked=b"" if held is None else pack_ids(ids[~held]))

    def consume(self, ids: Ids, at: Ids) -> None:
        """End rows completed by all tasks, at indices ``at``, if one gives no columns; hold uncovered ones."""
        rows, partitions = self._rows, self._state.partitions
        over = rows.todo[at] == 0
        if not over.nonzero()[0].size:
            return
        over &= rows.state[at] == LIVE
        if self._state.limits.checkpoints:
            held = over & (rows.step[at] >= self._steps.covered)
            if held.any():
                self._state.budget.hold(int(np.count_nonzero(held)))
                over &= ~held
                self._state.context.wake("put")
        for partition, done in partitions.split(ids[over]):
            if any(not task.spec.gives for task in self._tasks.takers(partitions.names[partition])):
                self.terminations.finish(done, CONSUMED, through=partition)

    def skip(self, ids: Ids, reason: str) -> None:
        """Make rows done in all their tasks."""
        at = self._rows.at(ids)
        for task in self._tasks:
            open_ids = ids[task.state[at] < DONE]
            self.terminations.withdraw(task, open_ids, task.skip(open_ids))
        self.terminations.note_skipped(ids.size, reason)
        self.consume(ids, at)

    def give_back(self, grant: Grant, ids: Ids, reason: str, *, blame: bool, lost: int = 0) -> None:
        """Return rows to their task; a step returns whole. With ``blame`` they are leased with fewer others next.
        A row, or group of a task with whole groups, fails with its group if it lost too many leases, the last one
        by itself. ``lost``: how many a lost session held, at least."""
        task, rows = self._tasks[grant.task], self._rows
        if task.spec.batch_rows is not None:
            self.terminations.give_back_step(grant, reason)
            return
        if not ids.size:
            return
        self.terminations.note_return(grant, ids, reason)
        task.give_back(ids, blame=blame)
        self._leases.release(grant, ids.size)
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
        ids = self._leases.outstanding(grant)
        self.give_back(grant, ids, reason, blame=blame, lost=lost)
        self._leases.remove(grant)
        if blame and self._tasks[grant.task].spec.batch_rows is None:
            firsts = self._rows.first[self._rows.at(ids)]
            self._state.dead_letters.note_lost(self._state.sessions.name(grant.session), firsts)

    def check_delivered(self, grant: Grant) -> None:
        """Raise SchemaError unless all parts of a step in parts are delivered."""
        if not self._steps.delivered_whole(grant):
            text = f"lease {grant.token} has {len(grant.ids)} rows in {grant.parts} parts; get the others first"
            raise SchemaError(f"step {grant.step} is not delivered whole: {text}")

    def _check(
        self, grant: Grant, task: Task, count: int, of: int, command: cmd.Complete
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
        """Raise SchemaError for a step in parts not acknowledged whole, and for wrong or missing columns. Return the
        mask of rows to drop. ``of``: number of rows of which ``count`` are completed."""
        if grant.parts != NONE:
            if command.columns:
                raise SchemaError("a step in parts is acknowledged without columns; write them before")
            self.check_delivered(grant)
            if count != of:
                raise SchemaError(f"{count} of {of} rows of step {grant.step} are acknowledged; it needs all of them")
        if grant.step != NONE and self._state.limits.checkpoints and command.columns:
            raise SchemaError("a step that may be trained again is acknowledged without columns; write them before")
        if command.block is not None and command.block.rows != count:
            raise SchemaError(f"{count} rows are completed with {command.block.rows} values")
        missing = [name for name in task.spec.gives if name not in command.columns]
        filtered = None
        if command.filtered is not None:
            filtered = np.zeros(count, bool)
            filtered[positions(command.filtered, count)] = True
        if missing and count and (filtered is None or not filtered.all()):
            raise SchemaError(f"task {grant.task!r} gives {', '.join(map(repr, missing))}, missing in this command")
        self._state.columns.check(command.columns)
        return filtered

    def _check_unwritten(self, ids: Ids, have: Ids, command: cmd.Complete) -> None:
        """Raise WriteOnceError if ``have``, the columns of rows, include one of the command."""
        columns = self._state.columns
        written = have & np.uint64(columns.mask(command.columns))
        if written.nonzero()[0].size:
            name = next(name for name in command.columns if (written & columns.bit(name)).any())
            twice = (have & columns.bit(name)) != 0
            raise WriteOnceError(f"column {name!r} of row {ids[twice][0]} is already written")

    def _filter(self, grant: Grant, task: Task, dropped: Ids) -> None:
        """End rows dropped by a task; rows of an uncovered step end when a checkpoint covers it."""
        if not task.makes_steps:
            self.terminations.end_groups(dropped, FILTERED, f"filtered by task {grant.task!r}")
        elif not self._state.limits.checkpoints or grant.step < self._steps.covered:
            self.terminations.finish(dropped, FILTERED, NO_GRADIENT)
        else:
            self._steps.end_later(dropped, FILTERED)

    def _fail_spent(self, task: Task, ids: Ids, reason: str, most: int) -> Ids:
        """Fail rows that lost ``most`` leases, with their groups. Return those still ready."""
        rows, name = self._rows, task.spec.name
        spent = task.spent(ids, most)
        if not spent.size:
            return ids
        why = f"failed {most} times in task {name!r}; last: {reason}"
        self._add_dead_letters(spent, name)
        self.terminations.end_groups(spent, FAILED, why)
        skipped = rows.live(spent)
        if skipped.size:  # in a full step already: only this task skips it
            task.skip(skipped)
            self.terminations.note_skipped(skipped.size, why)
            self.consume(skipped, rows.at(skipped))
        return ids[rows.having(task.state, READY, ids)]

    def _add_dead_letters(self, ids: Ids, task: str) -> None:
        """Keep dead letters of failing groups, except groups in a full step."""
        rows, steps, partitions = self._rows, self._steps, self._state.partitions
        if steps.declared:
            ids = ids[steps.not_closed(rows.at(ids))]
        for key, firsts, places in self._state.keys.by_put(np.unique(rows.first[rows.at(ids)])):
            for first, place in zip(firsts.tolist(), places.tolist(), strict=True):
                size, where = int(rows.size[first - rows.base]), partitions.names[rows.partition[first - rows.base]]
                self._state.dead_letters.failed(first, size, task, where, (key, place), self._state.context.now)

    def _return_admitted(self, task: Task, ids: Ids) -> None:
        """Withdraw the admission of untouched groups; of others, queue missing rows again."""
        rows, steps, versions = self._rows, self._steps, self._state.versions
        trained = steps.takes(rows.at(ids))
        versions.withdraw(rows.at(ids[~trained]))
        task.return_to_queue(ids[~trained])
        ids = ids[trained]
        firsts = rows.first[rows.at(ids)]
        for first in np.unique(firsts)[::-1]:
            back = ids[firsts == first]
            group = rows.members(back)
            at = rows.at(group)
            partition = int(rows.partition[at[0]])
            if ((task.state[at] != READY) | (steps.task.state[at] != WAITING)).any():
                task.redo.setdefault(partition, deque()).appendleft(back)
            else:
                steps.withdraw(group)
                versions.withdraw(at)
                task.queue(partition).push(group, front=True)
