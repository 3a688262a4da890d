"""Payload loss: rows with lost payload fail with their groups. The same put again adds them.

A row is lost once an unfinished task needs a lost column of it.

A full step with missing rows cannot be trained. It is opened again with every step after it, if none of them was
acknowledged, and the remaining rows are selected anew. Invariant H of the staleness rule still holds: rows selected
into step m have deadline m or later, and a step has at most B rows. So at most (j - k + 1)·B rows with deadlines up
to j return, the slots granted by H at the start of step k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..types import events as ev
from .commands import Ids
from .completion import RowCompletion
from .state import LedgerState
from .state.context import HomeLoss, LostColumns
from .state.rows import LIVE, NONE
from .state.tasks import APART, DONE, Task
from .terminations import FAILED, Terminations

LOST_REASON = "payload lost"
"""The reason of rows with lost payload, or its beginning."""


class PayloadLoss:
    """Ends unreadable rows. A repeated put adds failed ones again, except rows of an acknowledged
    step: these must not be trained twice."""

    def __init__(
        self,
        state: LedgerState,
        terminations: Terminations,
        completion: RowCompletion,
    ) -> None:
        self._state, self._terminations, self._completion = state, terminations, completion

    def lose(self, ids: Ids, reason: str) -> None:
        """Lose all columns of rows."""
        ids = self._live(ids)
        self._state.columns.lose(ids)
        self._end(ids, reason)

    def lose_homes(self, losses: Sequence[tuple[HomeLoss, Sequence[LostColumns]]]) -> None:
        """Lose the columns in lost homes."""
        for loss, lost in losses:
            for ids, names in lost:
                self._state.columns.lose(self._live(ids), names)
            needing = np.concatenate([np.empty(0, np.int64), *(self._needing(each) for each in lost)])
            failed = self._end(np.unique(needing), f"{LOST_REASON}: home {loss.name} was lost, {loss.reason}")
            self._state.homes.count_lost(loss.home, failed)
            self._state.context.publish(
                ev.HomeLost(
                    time_s=self._state.context.now, home=loss.home, epoch=loss.epoch, name=loss.name,
                    reason=loss.reason, rows_failed=failed,
                )
            )  # fmt: skip

    def end_holes(self) -> None:
        """End rows of acknowledged steps that lost their payload and are to be trained again."""
        if len(holes := self._state.steps.take_holes()):
            self._end(holes, LOST_REASON)

    def end_unreadable(self, task: Task) -> None:
        """End rows with lost columns that a new task needs."""
        live = self._state.rows.live_ids()
        at = self._state.rows.at(live)
        needs = task.state[at] != APART
        ids = live[needs & ((self._state.rows.lost[at] & task.need) != 0)]
        if len(ids):
            self._end(ids, LOST_REASON)

    def _needing(self, lost: LostColumns) -> Ids:
        """Return live rows with a lost column that a task still needs, or a step trained again."""
        rows, steps = self._state.rows, self._state.steps
        ids = self._live(lost.ids)
        at = rows.at(ids)
        need = self._unfinished_needs(at)
        if steps.declared:
            need[self._uncovered(at)] |= steps.task.need
        needing: Ids = ids[(np.uint64(self._state.columns.mask(lost.columns)) & need) != 0]
        return needing

    def _unfinished_needs(self, at: Ids) -> npt.NDArray[np.uint64]:
        """Return bit sets of columns that tasks of rows still need."""
        need = np.zeros(len(at), np.uint64)
        for task in self._state.tasks:
            need[task.state[at] < DONE] |= task.need
        return need

    def _uncovered(self, at: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of trained rows, by array index, that may be trained again."""
        rows, steps = self._state.rows, self._state.steps
        done = (steps.task.state[at] == DONE) & (rows.step[at] >= steps.covered)
        uncovered: npt.NDArray[np.bool_] = done & self._state.limits.checkpoints
        return uncovered

    def _end(self, ids: Ids, reason: str) -> int:
        """Fail rows with their groups; trained rows fail alone. Return the number of failed rows."""
        rows, steps = self._state.rows, self._state.steps
        ids = self._live(ids)
        overtaken: Ids = ids[:0]
        if steps.declared:
            ids = self._keep_uncovered(ids, reason)
            overtaken = self._remove_from_steps(ids)
        groups = self._live(rows.members(ids)) if len(ids) else ids
        if steps.declared:
            groups = groups[steps.not_closed(rows.at(groups))]
        gone = np.union1d(groups, overtaken)
        if steps.declared and steps.task.closed and (count := int(steps.takes(rows.at(gone)).sum())):
            text = f"{count} rows for steps were lost, and no more come: training ends with fewer steps"
            self._state.context.publish(ev.Note(time_s=self._state.context.now, text=text, level="warning"))
        self._state.keys.lose(self._untrained(gone))
        self._terminations.end_groups(groups, FAILED, reason)
        if len(overtaken):
            self._terminations.finish(overtaken, FAILED, f"{reason} in a step that a later one overtook")
        if len(trained := self._live(ids)):
            self._terminations.finish(trained, FAILED, reason)
        failed = np.union1d(gone, trained)
        self._add_dead_letters(failed, reason)
        return len(failed)

    def _untrained(self, ids: Ids) -> Ids:
        """Return the rows in groups without a trained row."""
        rows, steps = self._state.rows, self._state.steps
        if not steps.declared or not len(ids):
            return ids
        members = rows.at(rows.members(ids))
        trained = rows.first[members[steps.task.state[members] == DONE]]
        return ids[~np.isin(rows.first[rows.at(ids)], trained)]

    def _keep_uncovered(self, ids: Ids, reason: str) -> Ids:
        """Keep trained rows that no checkpoint covers, done in all tasks: they need their payload only
        to be trained again. Return the other rows."""
        rows, steps = self._state.rows, self._state.steps
        at = rows.at(ids)
        kept = self._uncovered(at)
        holes = kept & ((rows.lost[at] & steps.task.need) != 0)
        steps.add_holes(ids[holes])
        skipped = kept & ((rows.lost[at] & self._unfinished_needs(at)) != 0)
        if skipped.any():
            self._completion.skip(ids[skipped], reason)
        return ids[~kept]

    def _add_dead_letters(self, ids: Ids, reason: str) -> None:
        names = {number: name for name, number in self._state.partitions.numbers.items()}
        for key, part, groups in self._state.keys.by_put(ids):
            at = self._state.rows.at(part)
            partition = self._state.rows.partition[at]
            self._state.dead_letters.lost(key, part, groups, partition, names, reason, self._state.context.now)

    def _live(self, ids: Ids) -> Ids:
        ids = ids[ids >= self._state.rows.base]
        live: Ids = ids[self._state.rows.state[self._state.rows.at(ids)] == LIVE]
        return live

    def _remove_from_steps(self, ids: Ids) -> Ids:
        """Reopen full steps with missing rows. Return the rows of overtaken steps, which end whole."""
        steps = self._state.steps
        leases = self._state.leases
        held = {grant.step: leases.outstanding(grant) for grant in leases.of_step(0) if grant.parts == NONE}
        full = dict(steps.closed) | held | steps.held
        since = steps.window.step
        while since - 1 in full:  # no step from here on is acknowledged
            since -= 1
        overtaken = [ids[:0]]
        for step in sorted(set(self._state.rows.step[self._state.rows.at(ids)].tolist()) & full.keys()):
            if step >= since:
                self._open_again(step)
                break
            for grant in leases.of_step(step):
                if grant.step == step:
                    self._terminations.give_back_step(grant, f"payload of step {step} is lost")
            steps.drop(step)
            overtaken.append(self._live(full[step]))
        return np.concatenate(overtaken)

    def _open_again(self, first: int) -> None:
        """Unselect the rows of this step and later ones, and end their leases."""
        steps = self._state.steps
        for grant in self._state.leases.of_step(first):
            self._terminations.give_back_step(grant, f"payload of step {grant.step} is lost")
        steps.reopen(first)
        self._state.parked.wake_all()
