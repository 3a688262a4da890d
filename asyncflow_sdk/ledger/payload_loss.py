"""Payload loss: rows with lost payload, for example after a host crash, fail with their groups.

A full step with missing rows cannot be trained. It is opened again with every step after it, if
none of them was acknowledged, and the remaining rows are selected anew. Invariant H of the
staleness rule still holds: rows selected into step m have deadline m or later, and a step has at
most B rows. So at most (j - k + 1)·B rows with deadlines up to j return, the slots granted by H at
the start of step k.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from .commands import Ids
from .state import LedgerState
from .state.rows import DONE, LIVE, NONE, READY, SELECTED
from .step_leases import StepLeases
from .terminations import FAILED, Terminations

LOST_REASON = "payload lost"
"""The failure reason of rows with lost payload."""


class PayloadLoss:
    """Ends unreadable rows. A repeated put adds them again, except rows of an acknowledged step:
    these must not be trained twice."""

    def __init__(self, state: LedgerState, step_leases: StepLeases, terminations: Terminations) -> None:
        self._state, self._step_leases, self._terminations = state, step_leases, terminations

    def lose(self, ids: Ids, reason: str) -> None:
        """Fail rows with their groups; trained rows fail alone."""
        rows, steps = self._state.rows, self._state.steps
        ids = ids[ids >= rows.base]
        failed: list[Ids] = []
        if steps.declared:
            ids = self._live(ids)
            at = rows.at(ids)
            # an acknowledged, uncovered step needs its payload only to be trained again
            hole = (rows.task(steps.name, "state")[at] == DONE) & (rows.step[at] >= steps.covered)
            hole &= self._state.limits.checkpoints
            steps.lost_rows = np.union1d(steps.lost_rows, ids[hole])
            ids = ids[~hole]
            failed = self._remove_from_steps(ids, reason)
        if len(ids := self._live(ids)):
            groups = self._live(rows.members(ids))
            self._terminations.end_groups(ids, FAILED, reason)
            failed.append(groups[rows.state[rows.at(groups)] != LIVE])
        trained = self._live(ids)
        if len(trained):
            self._terminations.finish(trained, FAILED, reason)
        untrained: Ids = np.sort(np.concatenate([np.empty(0, np.int64), *failed]))
        self._state.keys.lose(untrained)
        self._add_dead_letters(np.union1d(untrained, trained), reason)

    def _add_dead_letters(self, ids: Ids, reason: str) -> None:
        names = {number: name for name, number in self._state.partitions.numbers.items()}
        for key, part, groups in self._state.keys.by_put(ids):
            partition = self._state.rows.partition[self._state.rows.at(part)]
            self._state.dead_letters.lost(key, part, groups, partition, names, reason, self._state.context.now)

    def _live(self, ids: Ids) -> Ids:
        live: Ids = ids[self._state.rows.state[self._state.rows.at(ids)] == LIVE]
        return live

    def _remove_from_steps(self, ids: Ids, reason: str) -> list[Ids]:
        """Reopen full steps with missing rows. Return rows of overtaken steps, which fail whole."""
        steps, failed = self._state.steps, []
        leases = self._state.leases
        held = {grant.step: leases.outstanding(grant) for grant in leases.of_step(0) if grant.parts == NONE}
        full = dict(steps.closed) | held | steps.held
        since = steps.window.step
        while since - 1 in full:  # no step from here on is acknowledged
            since -= 1
        for step in sorted(set(self._state.rows.step[self._state.rows.at(ids)].tolist()) & full.keys()):
            if step >= since:
                self._open_again(step)
                break
            steps.uncovered.pop(step, None)
            steps.closed = deque((number, part) for number, part in steps.closed if number != step)
            steps.held.pop(step, None)
            steps.parts.pop(step, None)
            failed.append(self._live(full[step]))
            self._terminations.finish(failed[-1], FAILED, f"{reason} in a step that a later one overtook")
        return failed

    def _open_again(self, first: int) -> None:
        """Unselect the rows of this step and later ones, and end their leases."""
        steps = self._state.steps
        for grant in self._state.leases.of_step(first):
            self._step_leases.give_back(grant, f"payload of step {grant.step} is lost")
        chunks: list[tuple[int, Ids]] = [(steps.window.step, chunk) for chunk in steps.open_rows]
        chunks += [(step, ids) for step, ids in steps.closed if step >= first]
        steps.closed = deque((step, ids) for step, ids in steps.closed if step < first)
        steps.uncovered = {step: ids for step, ids in steps.uncovered.items() if step < first}
        steps.parts = {step: parts for step, parts in steps.parts.items() if step < first}
        steps.open_rows = []
        back: Counter[int] = Counter()
        for _, ids in sorted(chunks, key=lambda chunk: -chunk[0]):
            back.update(self._unselect(ids))
        steps.window.open_again(first, back)
        if not self._state.partitions.end_requested:  # it had ended with the last step
            self._state.partitions.ended = False
        steps.reselect = True
        self._state.parked.wake_all()

    def _unselect(self, ids: Ids) -> Counter[int]:
        """Make rows ready for a step again, before others. Return their number by deadline."""
        rows, steps = self._state.rows, self._state.steps
        at = rows.at(ids)
        rows.task(steps.name, "state")[at] = READY
        rows.step[at] = NONE
        steps.task.move(len(ids), SELECTED, READY)
        steps.unselected += len(ids)
        steps.push(ids, front=True)
        deadlines = rows.deadline[at]
        values, counts = np.unique(deadlines[deadlines != NONE], return_counts=True)
        return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
