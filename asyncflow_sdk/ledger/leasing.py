"""Leases: who holds which rows, completing them, and giving them back."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from ..errors import Ended, LeaseLost, SchemaError, WriteOnceError
from ..types import events as ev
from . import commands as cmd
from .choosing import Choosing
from .commands import Ids, pack_ids
from .rows import DONE, LEASED, LIVE, NONE, READY, SELECTED, WAITING
from .state import (
    CONSUMED,
    FAILED,
    FILTERED,
    Crew,
    Held,
    Session,
    Task,
)

NO_GRADIENT = "no gradient in the step"


class Leasing(Choosing):
    """Grants, completes and returns leases."""

    def _lease(self, session: Session, command: cmd.Lease) -> cmd.Reply | None:
        task = self._task(command.task)
        self._check_lease(session, task, command)
        if session.dismissed:
            raise Ended(f"{session.name} was told to leave, and is given no more rows")
        if self._exhausted(task, command.partition):
            where = "" if command.partition is None else f" of partition {command.partition!r}"
            raise Ended(f"task {command.task!r} has had every row{where} it will get")
        if task.spec.grouped:
            self._check_policy()
        if task.spec.admits:
            return self._lease_admitted(session, task, command)
        return self._lease_rows(session, task, command)

    def _check_lease(self, session: Session, task: Task, command: cmd.Lease) -> None:
        if command.count < 1:
            raise SchemaError(f"a lease needs a count of 1 or more, not {command.count}")
        if command.partition is not None and not task.spec.takes(command.partition):
            takes = ", ".join(map(repr, task.spec.partitions))
            raise SchemaError(
                f"task {command.task!r} takes no rows of partition {command.partition!r}, only of {takes}"
            )
        self._check_at_least(task, command)
        for column in command.columns or ():
            if column not in task.spec.needs:
                needs = ", ".join(map(repr, task.spec.needs))
                raise SchemaError(
                    f"task {task.spec.name!r} is not declared to need column {column!r}; it needs: {needs}"
                )

    def _lease_rows(self, session: Session, task: Task, command: cmd.Lease) -> cmd.Reply | None:
        found = self._find(task, command, 1)
        return None if found is None else self._grant(session, task, *found)

    def _find(self, task: Task, command: cmd.Lease, at_least: int) -> tuple[Ids, int] | None:
        """Rows for a lease, and their step, if there are enough; they are in no queue any more."""
        if task.spec.batch_rows is not None:
            assert self.steps is not None
            if not self.steps.closed:
                return None
            step, ids = self.steps.closed.popleft()
            return ids, step
        for partition in self._in_turn(task, command.partition):
            if not self._enough(task, partition, max(at_least, command.at_least)):
                continue
            least = command.at_least if task.fit[partition] >= command.at_least else 1
            ids = self._take(task, task.ready[partition], command.count, least)
            if len(ids):
                task.turn = partition + 1
                return ids, NONE
        return None

    def _check_at_least(self, task: Task, command: cmd.Lease) -> None:
        most = command.count if task.spec.batch_rows is None else task.spec.batch_rows
        if not 0 <= command.at_least <= most:
            raise SchemaError(f"at_least is a number of rows up to {most}, not {command.at_least}")
        if command.at_least > self.capacity_rows:
            raise SchemaError(
                f"at_least={command.at_least} rows are never ready together: the queue holds {self.capacity_rows}"
                " (capacity_rows)"
            )
        if command.at_least and task.spec.admits:
            raise SchemaError(
                f"task {task.spec.name!r} gives whole groups as the staleness rule allows; at_least is not for it"
            )

    def _enough(self, task: Task, partition: int, at_least: int) -> bool:
        """Whether rows are ready: ``at_least`` of them, or the last there will be but for what others hold."""
        fit = task.fit[partition]
        return fit >= max(at_least, 1) or (fit > 0 and not task.waiting[partition] and self._closed(partition))

    def _in_turn(self, task: Task, partition: str | None) -> list[int]:
        """Partitions where a task may have ready rows, the one whose turn it is first."""
        if partition is not None:
            return [number for number in [self.partitions.get(partition)] if number in task.ready]
        return sorted(task.ready, key=lambda number: (number < task.turn, number))

    def _lease_admitted(self, session: Session, task: Task, command: cmd.Lease) -> cmd.Reply | None:
        """Whole groups: of partitions that are trained, as the staleness rule allows for the version this replica
        has loaded; of others, as they come."""
        if self.steps is None:
            return None
        if session.loaded is None:
            return cmd.LoadFirst(version=self.version) if self.version != NONE else None
        if self._is_behind(session, session.loaded):
            if session.loaded == self.version:
                return None  # it was lost with its trainer, and the next is not there yet
            return cmd.LoadFirst(version=self.committed if session.loaded < self.committed else self.version)
        reply: cmd.Reply | None = None
        for partition in self._in_turn(task, command.partition):
            if self._takes(self.steps.task, partition):
                reply = reply or self._lease_in_window(session, task, partition, command.count)
            else:
                ids = self._take(task, self._queue(task, partition), command.count)
                if len(ids):
                    self.rows.version[self.rows.at(ids)] = session.loaded
                    reply = self._grant(session, task, ids, version=session.loaded)
            if isinstance(reply, cmd.Leased):
                task.turn = partition + 1
                return reply
        return reply

    def _lease_in_window(self, session: Session, task: Task, partition: int, count: int) -> cmd.Reply | None:
        assert self.steps is not None
        assert session.loaded is not None
        loaded, rows = session.loaded, self.rows
        ready = self._queue(task, partition)
        redo = task.redo.setdefault(partition, deque())
        while redo:
            ids = redo[0][ready.is_ready(redo[0])]
            ids = ids[rows.deadline[rows.at(ids)] != NONE]  # else its whole group came back since
            if not len(ids):
                redo.popleft()
                continue
            begun = np.unique(rows.version[rows.at(ids)]).tolist()
            if not all(self.lineage.follows(loaded, version) for version in begun):
                return cmd.LoadFirst(version=self.version) if self.version > loaded else None
            redo.popleft()
            return self._grant(session, task, ids, version=loaded)
        if not ready:
            return None
        deadline = self.lineage.step(loaded) + self.max_staleness
        ids = self._take(task, ready, count, room=self._admittable(deadline))
        if len(ids):
            at = rows.at(ids)
            rows.version[at] = loaded
            rows.deadline[at] = deadline
            self.steps.window.admit(len(ids), deadline)
            return self._grant(session, task, ids, version=loaded)
        group = ready.peek_group()
        deadline = self.lineage.step(self.version) + self.max_staleness
        if len(group) and self.version > loaded and self._admittable(deadline) >= len(group):
            return cmd.LoadFirst(version=self.version)
        return None

    def _is_behind(self, session: Session, loaded: int) -> bool:
        """Whether a replica gets nothing, whatever the staleness rule says: what it has was given up, or others are decided
        for a newer one, or it is what the replica brought itself and a late joiner takes no prompts with that."""
        return loaded < self.committed or (session.claimed and self.version > 0) or self.lineage.given_up(loaded)

    def _next_to_train(self) -> int:
        """The first step that is not acknowledged."""
        assert self.steps is not None
        leased = [lease.step for lease in self.steps.task.leases.values()]
        return min([self.steps.window.step, *leased, *(step for step, _ in self.steps.closed)])

    def _version_of(self, step: int) -> int:
        """The version that a step trains: no lower than whoever leased it was told, nor than follows from what was told of
        steps before it. Numbers may have been further ahead of steps then than they are now."""
        assert self.steps is not None
        told = (lease.newest + step - lease.step for lease in self.steps.task.leases.values() if lease.step <= step)
        return max([self.lineage.version(step), *told])

    def _acknowledged(self, lease: Held) -> None:
        """A step was; is the version that is current trained no earlier than at what comes next, unless something was published
        after it? Of a step that was leased before a rollback it is: what it was trained to went with the versions given up. Of
        one that is in the weights rolled back to, that was leased again, or that made the first version, as well."""
        lineage, last = self.lineage, self.lineage.last
        if self.version != last.first:
            return
        before = lease.stretch < len(lineage.stretches)
        if last.resumed != NONE:  # later steps may have been acknowledged before it
            past = lease.step == last.resumed
        elif last.rolled_back:
            past = before or lease.step < lineage.step(last.parent)
        else:
            past = before and lease.newest < self.version
        if past:
            last.shift = min(last.shift, self.version - self._next_to_train())
            self._wake_replicas()

    def _is_final(self, step: int) -> bool:
        """Whether what is acknowledged of a step has ended: with checkpoints, not before one covers it."""
        return not self.checkpoints or step < self.covered

    def _wake_replicas(self) -> None:
        """What the staleness rule says to them may have changed."""
        self._dirty.update(f"task {name}" for name, task in self.tasks.items() if task.spec.admits)

    def _grant(
        self, session: Session, task: Task, ids: Ids, step: int = NONE, version: int | None = None,
        crew: Crew | None = None,
    ) -> cmd.Leased:  # fmt: skip
        name, rows = task.spec.name, self.rows
        token, self._next_token = self._next_token, self._next_token + 1
        at = rows.at(ids)
        spot = rows.spot(at)
        task.given += 1
        if step == NONE:
            self._count_fit(task, ids, -1)
        rows.task(name, "state")[spot] = LEASED
        task.move(len(ids), READY if task.spec.batch_rows is None else SELECTED, LEASED)
        rows.task(name, "token")[spot] = token
        until = self._now + task.spec.lease_s
        if step != NONE and self.version > self.lineage.version(
            step
        ):  # what it was trained to is current, but for its word
            self.lineage.resume(self.version, step)
        if version is None:
            version = NONE if step == NONE else self._version_of(step)
        else:
            session.claimed = False
        held = Held(token, name, session.id, ids, self._now, until, len(ids), step, crew)
        held.stretch, held.newest = len(self.lineage.stretches), version
        self._hold(held)
        return cmd.Leased(
            token=token, task=name, ids=pack_ids(ids), groups=pack_ids(rows.first[at]),
            step=step, version=version, lease_s=task.spec.lease_s, partition=self._partition_of(ids[:1]),
            stretches=() if step == NONE else self.lineage.told,
            completed_at=b"" if step == NONE else self._note_ages(at, step),
        )  # fmt: skip

    def _partition_of(self, ids: Ids) -> str:
        if len(self.partitions) == 1:
            return ""
        number = int(self.rows.partition[self.rows.at(ids)][0])
        return next(name for name, known in self.partitions.items() if known == number)

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
