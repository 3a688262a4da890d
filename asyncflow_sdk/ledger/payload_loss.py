"""Payload loss: rows whose payload is gone, as after a restart of the host. They fail with their groups, each counted.

A full step that lacks some of its rows cannot be trained. It is opened again, and every step after it, if none of these was
acknowledged: the rows that are left are selected anew. Invariant H of the staleness rule then still holds: rows selected into step m
have a deadline of m or later, and each step has B rows at most. So the rows that come back with a deadline up to j are
(j - k + 1)·B at most, the slots that H leaves at the start of step k.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np

from .commands import Ids
from .state import LedgerState
from .state.rows import DONE, LEASED, LIVE, NONE, READY, SELECTED
from .terminations import FAILED, Terminations, returned


class PayloadLoss:
    """Ends rows that cannot be read any more. Their puts may be repeated, and then add them again, except rows of an acknowledged step:
    these are not trained twice."""

    def __init__(self, state: LedgerState, terminations: Terminations) -> None:
        self._context, self._rows, self._partitions, self._limits = (
            state.context,
            state.rows,
            state.partitions,
            state.limits,
        )
        self._sessions, self._steps, self._parked, self._leases = (
            state.sessions,
            state.steps,
            state.parked,
            state.leases,
        )
        self._letters, self._keys, self._terminations = state.letters, state.keys, terminations

    def lose(self, ids: Ids, reason: str) -> None:
        """Fail rows with their groups; rows that were trained fail alone."""
        rows, steps = self._rows, self._steps
        ids = ids[ids >= rows.base]
        failed: list[Ids] = []
        if steps.declared:
            ids = self._live(ids)
            at = rows.at(ids)
            # an acknowledged step that no checkpoint covers needs its payload only if it is trained again
            hole = (rows.task(steps.name, "state")[at] == DONE) & (rows.step[at] >= steps.covered)
            hole &= self._limits.checkpoints
            steps.holes = np.union1d(steps.holes, ids[hole])
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
        self._keys.lose(untrained)
        self._add_letters(np.union1d(untrained, trained), reason)

    def _add_letters(self, ids: Ids, reason: str) -> None:
        names = {number: name for name, number in self._partitions.numbers.items()}
        for key, part, groups in self._keys.by_put(ids):
            partition = self._rows.partition[self._rows.at(part)]
            self._letters.lost(key, part, groups, partition, names, reason, self._context.now)

    def _live(self, ids: Ids) -> Ids:
        live: Ids = ids[self._rows.state[self._rows.at(ids)] == LIVE]
        return live

    def _remove_from_steps(self, ids: Ids, reason: str) -> list[Ids]:
        """Open full steps again that lack rows; a step that a later acknowledged one overtook fails whole. Return rows that failed so."""
        steps, failed = self._steps, []
        held = {grant.step: self._leases.outstanding(grant) for grant in self._leases.of_step(0)}
        full = dict(steps.closed) | held
        since = steps.window.step
        while since - 1 in full:  # no step from here on is acknowledged
            since -= 1
        for step in sorted(set(self._rows.step[self._rows.at(ids)].tolist()) & full.keys()):
            if step >= since:
                self._open_again(step)
                break
            steps.whole.pop(step, None)
            steps.closed = deque((number, part) for number, part in steps.closed if number != step)
            failed.append(self._live(full[step]))
            self._terminations.finish(failed[-1], FAILED, f"{reason} in a step that a later one overtook")
        return failed

    def _open_again(self, first: int) -> None:
        """Unselect the rows of this step and later ones; leases of them end."""
        steps = self._steps
        parts: list[tuple[int, Ids, int]] = [(steps.window.step, part, SELECTED) for part in steps.filling]
        parts += [(step, ids, SELECTED) for step, ids in steps.closed if step >= first]
        for grant in self._leases.of_step(first):
            ids = self._leases.outstanding(grant)
            parts.append((grant.step, ids, LEASED))
            self._leases.release(grant, len(ids))
            worker = self._sessions.name(grant.session)
            returned(self._context, worker, grant.task, len(ids), f"payload of step {grant.step} is lost")
        steps.closed = deque((step, ids) for step, ids in steps.closed if step < first)
        steps.whole = {step: ids for step, ids in steps.whole.items() if step < first}
        steps.filling = []
        back: Counter[int] = Counter()
        for _, ids, state in sorted(parts, key=lambda part: -part[0]):
            back.update(self._unselect(ids, state))
        steps.window.open_again(first, back)
        if not self._partitions.end_requested:  # it had ended because every step was filled
            self._partitions.ended = False
        steps.reselect = True
        self._parked.wake_all()

    def _unselect(self, ids: Ids, state: int) -> Counter[int]:
        """Make rows ready for a step again, before others. Return how many by deadline."""
        rows, steps = self._rows, self._steps
        at = rows.at(ids)
        rows.task(steps.name, "state")[at] = READY
        rows.task(steps.name, "token")[at] = NONE
        rows.step[at] = NONE
        steps.task.move(len(ids), state, READY)
        steps.unselected += len(ids)
        steps.push(ids, front=True)
        deadlines = rows.deadline[at]
        values, counts = np.unique(deadlines[deadlines != NONE], return_counts=True)
        return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))
