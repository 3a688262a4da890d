"""Finishing: leased rows are completed, given back or kept for longer, and what follows from that."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ..errors import LeaseLost, SchemaError, WriteOnceError
from ..types import events as ev
from . import commands as cmd
from .commands import Ids, pack_ids
from .leasing import Leasing
from .records import Held, Session, Task
from .rows import DONE, LEASED, LIVE, NONE, READY, SELECTED, WAITING
from .state import CONSUMED, FAILED, FILTERED

NO_GRADIENT = "no gradient in the step"


class Finishing(Leasing):
    """Completes and returns leases."""

    def _complete(self, session: Session, command: cmd.Complete) -> cmd.Reply:
        lease = self._held(session, command.token, command.rank)
        return self._finish_rows(lease, lease.ids, command)

    def _finish_rows(self, lease: Held, part: Ids, command: cmd.Complete) -> cmd.Completed:
        """Complete rows of a lease; positions are those in ``part`` of it."""
        task, rows = self.tasks[lease.task], self.rows
        ids = part if command.index is None else part[positions(command.index, len(part))]
        whole = lease.left == len(lease.ids)  # then it holds every row still
        held = None if whole else self.rows.having(lease.task, "token", lease.token, ids)
        if lease.step != NONE and self.checkpoints and command.columns:
            raise SchemaError(
                "a step that may be trained again is acknowledged without columns; write them before it"
            )
        missing = [name for name in task.spec.gives if name not in command.columns]
        filtered = None
        if command.filtered is not None:
            filtered = np.zeros(len(ids), bool)
            filtered[positions(command.filtered, len(ids))] = True
        if missing and len(ids) and (filtered is None or not filtered.all()):
            raise SchemaError(f"task {lease.task!r} gives {', '.join(map(repr, missing))}, which this lacks")
        self._check_columns(command.columns)
        mine = ids if held is None else ids[held]
        at = rows.at(mine)
        spot, before = rows.spot(at), rows.columns[at]  # a copy
        mask = np.uint64(self._mask(command.columns))
        if mask and np.count_nonzero(written := before & mask):
            name = next(name for name in command.columns if (written & self._bit(name)).any())
            twice = (before & self._bit(name)) != 0
            raise WriteOnceError(f"column {name!r} of row {mine[twice][0]} is already written")
        if len(mine) and command.columns:
            self._count_kinds(at, -1)
            rows.columns[at] = before | np.uint64(self._bits(command.columns))
            self._measure(mine, command.measures, slice(None) if held is None else held)
            self._count_kinds(at, 1)
            if command.lengths and self._note_lengths(mine, command.lengths, slice(None) if held is None else held):
                self._note_pace(mine, lease.since)
            self._charge(mine, command.nbytes * len(mine) // len(ids))
        task.move(len(mine), LEASED, DONE)
        task.passed += len(mine)
        rows.task(lease.task, "state")[spot] = DONE
        rows.task(lease.task, "token")[spot] = NONE
        if task.spec.admits:
            rows.newest[spot] = lease.newest
            rows.current[spot] = self.version
        rows.todo[spot] -= 1
        self._through(task, mine)
        self._release(lease, len(mine))
        if filtered is not None and len(dropped := mine[filtered if held is None else filtered[held]]):
            if task.spec.batch_rows is None:
                self._end_groups(dropped, FILTERED, f"filtered by task {lease.task!r}")
            elif self._is_final(lease.step):
                self._finish(dropped, FILTERED, NO_GRADIENT)
            else:
                rows.fate[rows.at(dropped)] = FILTERED
            alive = rows.state[at] == LIVE
            mine, before, at = mine[alive], before[alive], at[alive]
        if command.columns:
            self._make_ready(mine, before)
        self._consume(mine, at)
        if lease.step != NONE:
            self._acknowledged(lease)
        return cmd.Completed(revoked=b"" if held is None else pack_ids(ids[~held]))

    def _consume(self, ids: Ids, at: Ids) -> None:
        """Those of ``ids``, at places ``at``, that every task is through with, one of them an end, are consumed."""
        over = self.rows.todo[at] == 0
        if not np.count_nonzero(over):
            return
        if self.checkpoints:
            steps = self.rows.step[at]
            held = over & (steps >= self.covered) & (self.rows.state[at] == LIVE)
            if held.any():
                self.held += int(np.count_nonzero(held))
                over &= ~held
                self._dirty.add("put")
        for partition, through in self._by_partition(ids[over & (self.rows.state[at] == LIVE)]):
            if any(not task.spec.gives and self._takes(task, partition) for task in self.tasks.values()):
                self._finish(through, CONSUMED, through=partition)

    def _give_back(self, session: Session, command: cmd.GiveBack) -> cmd.Reply:
        lease = self._held(session, command.token, command.rank)
        ids, held = self._named(lease, lease.part(command.rank), command.index)
        self._return(lease, ids[held], command.reason or f"given back by {session.name}", command.blame)
        return cmd.Done()

    def _renew(self, session: Session, command: cmd.Renew) -> cmd.Reply:
        lease = self._held(session, command.token, command.rank)
        lease.expires = self._now + self.tasks[lease.task].spec.lease_s
        self._lease_ends.add(lease.token)
        return cmd.Done()

    def _await_lost(self, session: Session, command: cmd.AwaitLost) -> cmd.Reply | None:
        if not session.lost:
            session.lost = session.lost or []
            return None
        ids, session.lost = np.unique(np.concatenate(session.lost)), []  # one may have been leased by several tasks
        return cmd.Lost(ids=pack_ids(ids))

    def _return(self, lease: Held, ids: Ids, reason: str, blame: bool) -> None:
        """Rows go back to their task; those that lost too many leases fail with their group."""
        task, rows, name = self.tasks[lease.task], self.rows, lease.task
        if task.spec.batch_rows is not None:
            ids = self._outstanding(lease)  # a step goes back whole
        if not len(ids):
            return
        self._effects.events.append(
            ev.LeaseReturned(
                time_s=self._now, worker=self._name(lease.session), task=name, count=len(ids), reason=reason
            )
        )
        at = rows.at(ids)
        rows.task(name, "token")[at] = NONE
        self._release(lease, len(ids))
        task.move(len(ids), LEASED, READY if task.spec.batch_rows is None else SELECTED)
        if task.spec.batch_rows is not None:
            assert self.steps is not None
            rows.task(name, "state")[at] = SELECTED
            self.steps.closed = deque(sorted([(lease.step, ids), *self.steps.closed], key=lambda filled: filled[0]))
        else:
            rows.task(name, "state")[at] = READY
            self._count_fit(task, ids, 1)
            rows.task(name, "attempts")[at] += blame
            if blame:
                self.letters.blame(rows.first[at], f"{name}: {reason}")
            spent = rows.task(name, "attempts")[at] >= task.spec.max_attempts
            if spent.any():
                tries = f"failed {task.spec.max_attempts} times in task {name!r}; last: {reason}"
                self._bury(ids[spent], name)
                self._end_groups(ids[spent], FAILED, tries)
                given_up = ids[spent][rows.state[rows.at(ids[spent])] == LIVE]
                if len(given_up):  # its trainer has the row already: only this task goes without it
                    rows.task(name, "state")[rows.at(given_up)] = DONE
                    task.move(len(given_up), READY, DONE)
                    self._count_fit(task, given_up, -1)
                    rows.todo[rows.at(given_up)] -= 1
                    self._through(task, given_up)
                    self.reasons[f"skipped: {self._told_as('skipped', tries)}"] += len(given_up)
                    self._consume(given_up, rows.at(given_up))
                state = rows.task(name, "state")[rows.at(ids)]
                ids = ids[(rows.state[rows.at(ids)] == LIVE) & (state == READY)]
            if task.spec.admits:
                self._return_admitted(task, ids)
            else:
                self._come_back(task, ids)
        self._dirty.add(f"task {name}")

    def _come_back(self, task: Task, ids: Ids) -> None:
        """Rows are the next ones of their task again. Where groups stay whole, with those of their groups that came back
        before: what was pushed of these then is passed over."""
        for partition, part in self._by_partition(ids):
            ready = self._queue(task, partition)
            if task.spec.grouped or task.sampling.whole_groups:
                part = self.rows.members(part)
                part = part[ready.is_ready(part)]
            ready.push_front(part)

    def _bury(self, ids: Ids, task: str) -> None:
        """Keep what is known of groups that now fail for good. What is in a full step does not."""
        rows = self.rows
        if self.steps is not None:
            step = rows.step[rows.at(ids)]
            ids = ids[(step == NONE) | (step == self.steps.window.step)]
        firsts, where = np.unique(rows.first[rows.at(ids)], return_index=True)
        for first, size in zip(firsts.tolist(), rows.size[rows.at(ids[where])].tolist(), strict=True):
            key, place = self._keys.find(first)
            self.letters.failed(
                first=first, rows=size, task=task, partition=self._partition_of(firsts[firsts == first]), key=key,
                place=place, time_s=self._now,
            )  # fmt: skip

    def _return_admitted(self, task: Task, ids: Ids) -> None:
        """Groups nobody has begun lose their admission; of others, the missing rows are done again."""
        assert self.steps is not None
        rows, name, step = self.rows, task.spec.name, self.steps.task.spec.name
        trained = self._trained(rows.at(ids))
        rows.version[rows.at(ids[~trained])] = NONE
        self._come_back(task, ids[~trained])
        ids = ids[trained]
        for first in np.unique(rows.first[rows.at(ids)])[::-1]:
            back = ids[rows.first[rows.at(ids)] == first]
            group = rows.members(back)
            at = rows.at(group)
            partition = int(rows.partition[at[0]])
            begun = (rows.task(name, "state")[at] != READY) | (rows.task(step, "state")[at] != WAITING)
            if begun.any():
                task.redo.setdefault(partition, deque()).appendleft(back)
            else:
                self._withdraw(group)
                rows.version[at] = rows.newest[at] = rows.deadline[at] = NONE
                self._queue(task, partition).push_front(group)

    def _held(self, session: Session, token: int, rank: int) -> Held:
        lease = self.leases.get(token)
        if lease is None or not lease.held_by(session.id, rank):
            raise LeaseLost(
                f"lease {token} is not held by {session.name}: completed, expired, returned, or its rows ended"
            )
        return lease

    def _named(self, lease: Held, part: Ids, index: bytes | None) -> tuple[Ids, Any]:
        """The rows a command names, and which of them the lease still holds."""
        ids = part if index is None else part[positions(index, len(part))]
        return ids, self.rows.having(lease.task, "token", lease.token, ids)

    def _outstanding(self, lease: Held) -> Ids:
        ids, held = self._named(lease, lease.ids, None)
        outstanding: Ids = ids[held]
        return outstanding


def positions(index: bytes, count: int) -> Any:
    """Positions a client named, checked."""
    if len(index) % 4:
        raise SchemaError("positions are packed int32")
    at = np.frombuffer(index, "<i4")
    if len(at) and (at.min() < 0 or at.max() >= count or len(np.unique(at)) != len(at)):
        raise SchemaError(f"positions must lie in 0..{count - 1}, each once")
    return at
