"""Payload loss: a row fails with its group once an unfinished task needs a lost column of it.

A full step with missing rows cannot be trained. It is opened again with every step after it, if none of them was
acknowledged, and the remaining rows are selected anew. Invariant H of the staleness rule still holds: rows selected
into step m have deadline m or later, and a step has at most B rows. So at most (j - k + 1)·B rows with deadlines up
to j return, the slots granted by H at the start of step k."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..types import events as ev
from .commands import Ids
from .completion import RowCompletion
from .state import LedgerState
from .state.context import HomeLoss, LostColumns
from .state.rows import NONE
from .state.tasks import APART, DONE, Task
from .terminations import FAILED

LOST_REASON = "payload lost"
"""The reason of rows with lost payload, or its beginning."""


class PayloadLoss:
    """Ends unreadable rows. A repeated put adds failed ones again, except acknowledged rows of steps."""

    def __init__(self, state: LedgerState, completion: RowCompletion) -> None:
        self._state, self._completion, self._terminations = state, completion, completion.terminations
        self._rows, self._steps, self._context = state.rows, state.steps, state.context

    def lose(self, ids: Ids, reason: str) -> None:
        """Lose all columns of rows."""
        ids = self._rows.live(ids)
        self._state.columns.lose(ids)
        self._end(ids, reason)

    def lose_homes(self, losses: Sequence[tuple[HomeLoss, Sequence[LostColumns]]]) -> None:
        """Lose the columns in lost homes."""
        for loss, lost in losses:
            for ids, names in lost:
                self._state.columns.lose(self._rows.live(ids), names)
            needing = np.concatenate([np.empty(0, np.int64), *(self._needing(each) for each in lost)])
            failed = self._end(np.unique(needing), f"{LOST_REASON}: home {loss.name} was lost, {loss.reason}")
            self._state.homes.count_lost(loss.home, failed)
            self._context.publish(ev.HomeLost(**loss._asdict(), time_s=self._context.now, rows_failed=failed))

    def end_holes(self) -> None:
        """End rows of acknowledged steps that lost their payload and are to be trained again."""
        self._end(self._steps.take_holes(), LOST_REASON)

    def end_unreadable(self, task: Task) -> None:
        """End rows with lost columns needed by a new task."""
        live = self._rows.live_ids()
        at = self._rows.at(live)
        self._end(live[(task.state[at] != APART) & ((self._rows.lost[at] & task.need) != 0)], LOST_REASON)

    def _needing(self, lost: LostColumns) -> Ids:
        """Return live rows with a lost column that a task still needs, or a step trained again."""
        ids = self._rows.live(lost.ids)
        at = self._rows.at(ids)
        need = self._unfinished_needs(at)
        if self._steps.declared:
            need[self._uncovered(at)] |= self._steps.task.need
        needing: Ids = ids[(np.uint64(self._state.columns.mask(lost.columns)) & need) != 0]
        return needing

    def _unfinished_needs(self, at: Ids) -> npt.NDArray[np.uint64]:
        need = np.zeros(len(at), np.uint64)
        for task in self._state.tasks:
            need[task.state[at] < DONE] |= task.need
        return need

    def _uncovered(self, at: Ids) -> npt.NDArray[np.bool_]:
        """Return a mask of trained rows, by array index, that may be trained again."""
        done: npt.NDArray[np.bool_] = self._steps.task.state[at] == DONE
        return done & (self._rows.step[at] >= self._steps.covered) & self._state.limits.checkpoints

    def _end(self, ids: Ids, reason: str) -> int:
        """Fail rows with their groups; trained rows fail alone. Return the number of failed rows."""
        rows, steps = self._rows, self._steps
        ids = self._rows.live(ids)
        if not len(ids):
            return 0
        overtaken: Ids = ids[:0]
        if steps.declared:
            ids = self._keep_uncovered(ids, reason)
            overtaken = self._remove_from_steps(ids)
        groups = self._rows.live(rows.members(ids)) if len(ids) else ids
        if steps.declared:
            groups = groups[steps.not_closed(rows.at(groups))]
        gone = np.union1d(groups, overtaken)
        if steps.declared and steps.task.closed and (count := int(steps.takes(rows.at(gone)).sum())):
            text = f"{count} rows for steps were lost, and no more come: training ends with fewer steps"
            self._context.publish(ev.Note(time_s=self._context.now, text=text, level="warning"))
        self._state.keys.lose(self._untrained(gone))
        self._terminations.end_groups(groups, FAILED, reason)
        if len(overtaken):
            self._terminations.finish(overtaken, FAILED, f"{reason} in a step that a later one overtook")
        if len(trained := self._rows.live(ids)):
            self._terminations.finish(trained, FAILED, reason)
        failed, names = np.union1d(gone, trained), self._state.partitions.names
        for key, part, groups in self._state.keys.by_put(failed):
            where = rows.partition[rows.at(part)]
            self._state.dead_letters.lost(key, part, groups, where, names, reason, self._context.now)
        return len(failed)

    def _untrained(self, ids: Ids) -> Ids:
        """Return the rows in groups without a trained row."""
        rows, steps = self._rows, self._steps
        if not steps.declared or not len(ids):
            return ids
        members = rows.at(rows.members(ids))
        trained = rows.first[members[steps.task.state[members] == DONE]]
        return ids[~np.isin(rows.first[rows.at(ids)], trained)]

    def _keep_uncovered(self, ids: Ids, reason: str) -> Ids:
        """Keep trained rows that no checkpoint covers, done in all tasks. Return the other rows."""
        rows, steps = self._rows, self._steps
        at = rows.at(ids)
        kept = self._uncovered(at)
        holes = kept & ((rows.lost[at] & steps.task.need) != 0)
        steps.add_holes(ids[holes])
        skipped = kept & ((rows.lost[at] & self._unfinished_needs(at)) != 0)
        if skipped.any():
            self._completion.skip(ids[skipped], reason)
        return ids[~kept]

    def _remove_from_steps(self, ids: Ids) -> Ids:
        """Reopen full steps with missing rows. Return the rows of overtaken steps: they end whole."""
        steps, leases = self._steps, self._state.leases
        held = {grant.step: leases.outstanding(grant) for grant in leases.of_step(0) if grant.parts == NONE}
        full = dict(steps.closed) | held | steps.held
        since = steps.window.step
        while since - 1 in full:  # no step from here on is acknowledged
            since -= 1
        overtaken = [ids[:0]]
        for step in sorted(set(self._rows.step[self._rows.at(ids)].tolist()) & full.keys()):
            if step >= since:
                for grant in leases.of_step(step):
                    self._terminations.give_back_step(grant, f"payload of step {grant.step} is lost")
                steps.reopen(step)
                self._state.parked.wake_all()
                break
            for grant in leases.of_step(step):
                if grant.step == step:
                    self._terminations.give_back_step(grant, f"payload of step {step} is lost")
            steps.drop(step)
            overtaken.append(self._rows.live(full[step]))
        return np.concatenate(overtaken)
