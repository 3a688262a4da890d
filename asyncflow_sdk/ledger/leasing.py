"""Leasing: who gets which rows, of which step, for which version. (What becomes of them then is ``finishing``.)"""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import Ended, SchemaError
from . import commands as cmd
from .choosing import Choosing
from .commands import Ids, pack_ids
from .records import Crew, Held, Session, Task
from .rows import LEASED, NONE, READY, SELECTED


class Leasing(Choosing):
    """Grants leases."""

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
        if not task.spec.admits:
            return self._lease_rows(session, task, command)
        count = command.count
        if command.most:
            if session.id in self.swapping:
                return None  # others can begin now what it would have to leave until it has loaded
            held = sum(lease.left for lease in session.leases.values() if lease.task == command.task)
            count = max(count, command.most - held)
        reply = self._lease_admitted(session, task, command.partition, count)
        return None if command.most and isinstance(reply, cmd.LoadFirst) else reply

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

    def _lease_admitted(self, session: Session, task: Task, named: str | None, count: int) -> cmd.Reply | None:
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
        for partition in self._in_turn(task, named):
            if self._takes(self.steps.task, partition):
                reply = reply or self._lease_in_window(session, task, partition, count)
            else:
                ids = self._take(task, self._queue(task, partition), count)
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
