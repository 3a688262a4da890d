"""How rows end before their turn: whole groups, with everything that counted them put right."""

from __future__ import annotations

import numpy as np

from .commands import TERMINAL, Ids
from .noticing import Noticing
from .records import Held
from .rows import DONE, LEASED, LIVE, NONE, READY, TASK_STATES, WAITING
from .state import CANCELLED

REASONS, REASON_LETTERS = 200, 300
"""So many different reasons are told apart, by so much of their first lines: a run may go on for long."""


class Ending(Noticing):
    """Ends rows."""

    def _end_groups(self, ids: Ids, state: int, reason: str) -> int:
        """Rows end before they were trained, and their groups with them. Returns how many rows did."""
        rows, steps = self.rows, self.steps
        ids = rows.members(ids) if len(ids) else ids
        at = rows.at(ids)
        open_ones = rows.state[at] == LIVE
        if steps is not None:  # what is in a full step belongs to its trainer
            open_ones &= (rows.step[at] == NONE) | (rows.step[at] == steps.window.step)
        ids = ids[open_ones]
        if not len(ids):
            return 0
        self._withdraw(ids)
        if steps is not None:
            filling = rows.step[rows.at(ids)] == steps.window.step
            if filling.any():
                steps.window.unselect(int(filling.sum()))
                self._reselect = True
                steps.filling = [part[~np.isin(part, ids)] for part in steps.filling]
        self._finish(ids, state, reason)
        return len(ids)

    def _withdraw(self, ids: Ids) -> None:
        """Take admitted, unselected rows out of the staleness rule's counts."""
        if self.steps is None:
            return
        at = self.rows.at(ids)
        open_ones = self.rows.deadline[at][self.rows.step[at] == NONE]
        for deadline, count in zip(*np.unique(open_ones[open_ones != NONE], return_counts=True), strict=True):
            self.steps.window.withdraw(int(count), int(deadline))
        self._reselect = True

    def _finish(self, ids: Ids, state: int, reason: str = "", *, through: int | None = None) -> None:
        """``through``: the rows are of this partition, and every task that takes them is through with them."""
        rows = self.rows
        at = rows.at(ids)
        reason = self._told_as(TERMINAL[state - 1], reason)
        ended = self._ended_event(ids, state, reason)
        for name, task in self.tasks.items():
            if through is not None:
                task.counts[DONE] -= len(ids) * self._takes(task, through)
                continue
            states = rows.task(name, "state")[at]
            counts = np.bincount(states, minlength=1 + len(TASK_STATES)).tolist()
            task.counts = [now - gone for now, gone in zip(task.counts, counts, strict=False)]
            self._through(task, ids[states < DONE])
            self._count_fit(task, ids[states == READY], -1)
            self._count_waiting(task, ids[states == WAITING])
            if task.sampling.whole_groups and counts[WAITING]:
                self._excused.append((name, ids[states == WAITING]))
            if not counts[LEASED]:
                continue
            tokens = np.where(states == LEASED, rows.task(name, "token")[at], NONE)
            for token, count in zip(*np.unique(tokens[tokens != NONE], return_counts=True), strict=True):
                lease = self.leases[int(token)]
                self._tell_lost(lease, ids[tokens == token])
                self._release(lease, int(count))
        self._count_kinds(at, -1)
        if self.steps is not None:
            self.unselected -= int(((rows.step[at] == NONE) & self._trained(at)).sum())
        rows.finish(ids, state)
        self.charged -= int(rows.charged[at].sum())
        self.largest_row = max(self.largest_row, int(rows.nbytes[at].max(initial=0)))
        if self.letters.blamed:
            self.letters.forget(rows.first[at])
        self._effects.retired.append(ids)
        if reason:
            self.reasons[f"{ended.state}: {reason}"] += len(ids)
        self._effects.events.append(ended)
        self._dirty.update(("put", "wanted"))

    def _told_as(self, state: str, reason: str) -> str:
        """By which reason rows are counted: the first line of theirs, unless there are too many others."""
        line = reason.partition("\n")[0][:REASON_LETTERS]
        known = not line or f"{state}: {line}" in self.reasons
        return line if known or len(self.reasons) < REASONS else "other reasons"

    def _tell_lost(self, lease: Held, ids: Ids) -> None:
        """Rows of a lease have ended: whoever holds it and wants to hear of that, does."""
        for number in lease.sessions:
            session = self.sessions.get(number)
            if session is not None and session.lost is not None:
                session.lost.append(ids)
                self._dirty.add("lost")

    def _cancel_unselected(self, reason: str) -> None:
        """Rows that the steps take and never will."""
        live = self.rows.live_ids()
        at = self.rows.at(live)
        self._end_groups(live[(self.rows.step[at] == NONE) & self._trained(at)], CANCELLED, reason)

    def _cancel_live(self, partition: str | None, reason: str) -> int:
        """Live rows, of one partition or all, but for those in a full step. Returns how many."""
        live = self.rows.live_ids()
        if partition is not None:
            live = live[self.rows.partition[self.rows.at(live)] == self.partitions.get(partition, NONE)]
        return self._end_groups(live, CANCELLED, reason)

    def _cancel_what_cannot_fill(self) -> None:
        """After the end: rows too few to fill the step that is open. None follows it."""
        steps, rows = self.steps, self.rows
        if not self._supply_ended() or steps is None or steps.window.finished:
            return
        if self.unselected < steps.window.free:
            live = rows.live_ids()
            at = rows.at(live)
            open_ones = ((rows.step[at] == NONE) & self._trained(at)) | (rows.step[at] == steps.window.step)
            self._end_groups(live[open_ones], CANCELLED, "too few to fill a step")
            steps.window.stop()
