"""Rows whose payload is gone, as after a restart of the host: they fail with their groups, each counted.

A full step that lacks some of its rows cannot be trained. It is opened again, and every step after it, as long as none
of these was acknowledged: what is left of their rows is selected anew. Invariant H of the staleness rule holds
then, too: rows selected into step m have a deadline of m or later, B of them at most in each, so those that come back
with a deadline up to j are (j - k + 1)·B at most, which is what H leaves at the start of step k.
"""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import numpy.typing as npt

from ..types import events as ev
from .commands import Ids
from .ready import ReadyQueue
from .records import Steps
from .rolling_back import RollingBack
from .rows import DONE, LEASED, LIVE, NONE, READY, SELECTED
from .state import FAILED


class Losing(RollingBack):
    """Ends rows that nobody can read any more. Their puts may be repeated, and add what was lost, but for rows of a step
    that was acknowledged: these are not trained twice."""

    def _lose(self, ids: Ids, reason: str) -> None:
        """Rows fail, and their groups; those that were trained already fail alone."""
        rows = self.rows
        ids = ids[ids >= rows.base]
        failed: list[Ids] = []
        if self.steps is not None:
            ids = self._alive(ids)
            held = self._may_train_again(self.steps, ids)
            self.holes = np.union1d(self.holes, ids[held])
            ids = ids[~held]
            failed = self._leave_steps(self.steps, ids, reason)
        if len(ids := self._alive(ids)):
            groups = self._alive(rows.members(ids))
            self._end_groups(ids, FAILED, reason)
            failed.append(groups[rows.state[rows.at(groups)] != LIVE])
        trained = self._alive(ids)
        if len(trained):
            self._finish(trained, FAILED, reason)
        untrained: Ids = np.sort(np.concatenate([np.empty(0, np.int64), *failed]))
        self._keys.lose(untrained)
        self._write_letters(np.union1d(untrained, trained), reason)

    def _write_letters(self, ids: Ids, reason: str) -> None:
        """Keep which rows were lost, with the puts they came from."""
        names = {number: name for name, number in self.partitions.items()}
        for key, part, groups in self._keys.by_put(ids):
            self.letters.lost(key, part, groups, self.rows.partition[self.rows.at(part)], names, reason, self._now)

    def _may_train_again(self, steps: Steps, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which rows were acknowledged in a step that no checkpoint covers: that their payload is gone matters only if it is
        trained again."""
        at = self.rows.at(ids)
        done: npt.NDArray[np.bool_] = self.rows.task(steps.task.spec.name, "state")[at] == DONE
        return done & (self.rows.step[at] >= self.covered) & self.checkpoints

    def _alive(self, ids: Ids) -> Ids:
        alive: Ids = ids[self.rows.state[self.rows.at(ids)] == LIVE]
        return alive

    def _leave_steps(self, steps: Steps, ids: Ids, reason: str) -> list[Ids]:
        """Full steps that lack rows are opened again, or fail whole where a later one is acknowledged. Returns rows that
        failed so."""
        failed: list[Ids] = []
        held = {lease.step: self._outstanding(lease) for lease in self.leases.values() if lease.step != NONE}
        full = dict(steps.closed) | held
        since = steps.window.step
        while since - 1 in full:  # no step from here on is acknowledged
            since -= 1
        hit = sorted(set(self.rows.step[self.rows.at(ids)].tolist()) & full.keys())
        for step in hit:
            if step >= since:
                self._open_again(steps, step)
                break
            steps.whole.pop(step, None)
            steps.closed = deque((number, part) for number, part in steps.closed if number != step)
            failed.append(self._alive(full[step]))
            self._finish(failed[-1], FAILED, f"{reason} in a step that a later one overtook")
        return failed

    def _open_again(self, steps: Steps, first: int) -> None:
        """Rows of this step and later ones are unselected; leases of them end."""
        parts: list[tuple[int, Ids, int]] = [(steps.window.step, part, SELECTED) for part in steps.filling]
        parts += [(step, ids, SELECTED) for step, ids in steps.closed if step >= first]
        for lease in [lease for lease in self.leases.values() if lease.step >= first]:
            ids = self._outstanding(lease)
            parts.append((lease.step, ids, LEASED))
            self._release(lease, len(ids))
            self._effects.events.append(
                ev.LeaseReturned(
                    time_s=self._now, worker=self._name(lease.session), task=lease.task, count=len(ids),
                    reason=f"payload of step {lease.step} is lost",
                )
            )  # fmt: skip
        steps.closed = deque((step, ids) for step, ids in steps.closed if step < first)
        steps.whole = {step: ids for step, ids in steps.whole.items() if step < first}
        steps.filling = []
        back: Counter[int] = Counter()
        for _, ids, state in sorted(parts, key=lambda part: -part[0]):
            back.update(self._unselect(steps, ids, state))
        steps.window.open_again(first, back)
        if not self.end_said:  # it had ended because every step was filled
            self.ended = False
        self._reselect = True
        self._wake_all()

    def _unselect(self, steps: Steps, ids: Ids, state: int) -> Counter[int]:
        """Rows are ready for the step again, before those that are. Returns how many by deadline."""
        rows, name = self.rows, steps.task.spec.name
        at = rows.at(ids)
        rows.task(name, "state")[at] = READY
        rows.task(name, "token")[at] = NONE
        rows.step[at] = NONE
        steps.task.move(len(ids), state, READY)
        self.unselected += len(ids)
        counts: Counter[int] = Counter()
        for deadline, count in zip(*np.unique(rows.deadline[at], return_counts=True), strict=True):
            key = None if deadline == NONE else int(deadline)
            if key is not None:
                counts[key] = int(count)
            if key not in steps.ready:
                steps.ready[key] = ReadyQueue(rows, name)
            steps.ready[key].push_front(ids[rows.deadline[at] == deadline])
        return counts
