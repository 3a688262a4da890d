"""Lease admission: grant rows of a step, for a version, to a session."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..errors import Ended, SchemaError
from . import commands as cmd
from .commands import Ids, pack_ids
from .pins import VersionPins
from .staleness import StalenessControl
from .state import LedgerState
from .state.grants import ShardedLease
from .state.rows import LEASED, NONE, READY, SELECTED
from .state.sessions import Session
from .state.tasks import Task
from .step_versions import StepVersions
from .task_samplers import TaskSamplers


class LeaseAdmission:
    """Grants leases. Methods return None if the request has to wait."""

    def __init__(
        self,
        state: LedgerState,
        step_versions: StepVersions,
        staleness: StalenessControl,
        samplers: TaskSamplers,
        pins: VersionPins,
    ) -> None:
        self._state, self._step_versions, self._staleness, self._samplers = state, step_versions, staleness, samplers
        self._pins = pins

    def check(self, task: Task, command: cmd.LeaseRows) -> None:
        """Raise SchemaError for a request that can never be granted."""
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

    def check_open(self, session: Session, task: Task, command: cmd.LeaseRows) -> None:
        """Raise Ended if no further row can come, PluginError if the policy has failed."""
        if session.dismissed:
            raise Ended(f"{session.name} was dismissed and gets no more rows")
        if self._state.tasks.exhausted(task, command.partition):
            where = "" if command.partition is None else f" of partition {command.partition!r}"
            raise Ended(f"task {command.task!r} has no more rows{where} to grant")
        if task.spec.grouped:
            self._staleness.check()

    def lease_prompts(
        self, session: Session, task: Task, command: cmd.LeaseRows, *, swapping: bool
    ) -> cmd.Reply | None:
        """Lease whole groups under the staleness rule. ``swapping``: the replica may load now."""
        count = command.count
        if command.most:
            if swapping:
                return None  # it would have to return them; other replicas can start them now
            held = sum(grant.left for grant in session.leases.values() if grant.task == command.task)
            count = max(count, command.most - held)
        reply = self._lease_admitted(session, task, command.partition, count)
        self._note_starved(session, isinstance(reply, cmd.LoadFirst))
        return None if command.most and isinstance(reply, cmd.LoadFirst) else reply

    def find(
        self, task: Task, command: cmd.LeaseRows, at_least: int, session: Session | None = None
    ) -> tuple[Ids, int] | None:
        """Remove rows for a lease from their queue. Return them and their step; None if too few.
        ``session``: gets rows of pinned partitions only with their version. ``at_least``: rows, one for each rank."""
        if task.spec.batch_rows is not None:
            if not self._state.steps.closed:
                return None
            step, ids = self._state.steps.closed.popleft()
            return ids, step
        for partition in self._state.tasks.next_partitions(task, command.partition):
            if session is not None and not self._pins.allows(session, partition):
                continue
            fit, least = task.fit[partition], max(at_least, command.at_least, 1)
            last = fit > 0 and not task.waiting[partition] and self._state.partitions.closed(partition)
            if fit < least and not last:
                continue
            dealt = at_least > command.at_least and not (task.sampling.chooses or task.whole_groups)
            exact = (least if dealt else command.at_least) if fit >= least else 1
            ids = self._samplers.take(task, task.ready[partition], command.count, exact)
            if len(ids):
                task.next_partition = partition + 1
                return ids, NONE
        return None

    def grant(
        self, session: Session, task: Task, ids: Ids, step: int = NONE, version: int | None = None,
        shards: ShardedLease | None = None,
    ) -> cmd.Leased:  # fmt: skip
        """Lease rows to a session, or to the sessions of ``shards``. ``version``: loaded by the replica."""
        name, rows = task.spec.name, self._state.rows
        at = rows.at(ids)
        spot = rows.write_index(at)
        task.leases_granted += 1
        if task.suspects.size:  # others need not wait for these any more
            self._state.context.wake(task.place)
        if step == NONE:
            self._state.tasks.count_fit(task, ids, -1)
        else:
            self._step_versions.lease(step)
        if version is not None:
            if session.claimed:
                session.claimed = False
                self._state.versions.name_zero(own=True)
        else:
            version = NONE if step == NONE else self._step_versions.version_of(step)
        lineage = self._state.versions.lineage
        token = self._state.leases.add(session, task, ids, step, version, len(lineage.changes), shards).token
        rows.task(name, "state")[spot] = LEASED
        rows.task(name, "token")[spot] = token
        task.move(len(ids), READY if task.spec.batch_rows is None else SELECTED, LEASED)
        return cmd.Leased(
            token=token, task=name, ids=pack_ids(ids), groups=pack_ids(rows.first[at]),
            step=step, version=version, lease_s=task.spec.lease_s, partition=self._state.partitions.name_of(ids[:1]),
            version_step_offsets=() if step == NONE else lineage.offsets,
            completed_at=b"" if step == NONE else self._state.metrics.note_ages(at, step, lineage),
        )  # fmt: skip

    def _check_at_least(self, task: Task, command: cmd.LeaseRows) -> None:
        most = command.count if task.spec.batch_rows is None else task.spec.batch_rows
        if not 0 <= command.at_least <= most:
            raise SchemaError(f"at_least is a number of rows up to {most}, not {command.at_least}")
        if command.at_least > self._state.limits.capacity_rows:
            raise SchemaError(
                f"at_least={command.at_least} rows are never ready together: the queue holds"
                f" {self._state.limits.capacity_rows} (capacity_rows)"
            )
        if command.at_least and task.spec.admits:
            raise SchemaError(
                f"task {task.spec.name!r} grants whole groups within the staleness rule; it takes no at_least"
            )

    def _lease_admitted(self, session: Session, task: Task, named: str | None, count: int) -> cmd.Reply | None:
        """Lease whole groups: of trained partitions within the staleness rule, else in order."""
        versions, loaded = self._state.versions, session.loaded
        if not self._state.steps.declared:
            return None
        if loaded is None:
            return cmd.LoadFirst(version=versions.current) if versions.current != NONE else None
        reply: cmd.Reply | None = None
        for partition in self._state.tasks.next_partitions(task, named):
            if partition in self._state.partitions.pins:
                reply = reply or self._lease_apart(session, task, loaded, partition, count)
        if reply is not None:
            return reply
        if self._is_behind(loaded):
            if loaded == versions.current:
                return None  # lost with its trainer; the next one is not published yet
            return cmd.LoadFirst(version=versions.committed if loaded < versions.committed else versions.current)
        for partition in self._state.tasks.next_partitions(task, named):
            if self._state.tasks.takes(self._state.steps.task, partition):
                reply = reply or self._lease_in_window(session, task, loaded, partition, count)
            else:
                reply = self._lease_apart(session, task, loaded, partition, count) or reply
            if isinstance(reply, cmd.Leased):
                task.next_partition = partition + 1
                return reply
        return reply

    def _lease_apart(self, session: Session, task: Task, loaded: int, partition: int, count: int) -> cmd.Reply | None:
        """Lease whole groups of a partition that is not trained, in order."""
        if not self._pins.allows(session, partition):
            return None
        ids = self._samplers.take(task, self._state.tasks.queue(task, partition), count)
        if not len(ids):
            return None
        self._state.rows.version[self._state.rows.at(ids)] = loaded
        return self.grant(session, task, ids, version=loaded)

    def _note_starved(self, session: Session, starved: bool) -> None:
        """Note if a replica has to load before it gets prompts. Then it may load at once."""
        if session.replica is None or session.replica.starved == starved:
            return
        session.replica.starved = starved
        if starved:
            self._state.context.wake("swap")

    def _is_behind(self, loaded: int) -> bool:
        """True if a replica gets no rows with its loaded version, whatever the policy: the version
        was given up, or a newer one is committed."""
        versions = self._state.versions
        return loaded < versions.committed or versions.lineage.given_up(loaded)

    def _lease_in_window(
        self, session: Session, task: Task, loaded: int, partition: int, count: int
    ) -> cmd.Reply | None:
        versions, rows, limit = self._state.versions, self._state.rows, self._state.limits.max_staleness
        ready, redo = self._state.tasks.queue(task, partition), task.redo.setdefault(partition, deque())
        for _ in range(len(redo)):  # rows lost by another replica keep their deadline
            ids = redo[0][ready.is_ready(redo[0])]
            ids = ids[rows.deadline[rows.at(ids)] != NONE]  # a group returned whole was withdrawn
            if not len(ids):
                redo.popleft()
                continue
            begun = np.unique(rows.version[rows.at(ids)]).tolist()
            if not all(versions.lineage.follows(loaded, version) for version in begun):
                if versions.current > loaded:
                    return cmd.LoadFirst(version=versions.current)
                redo.rotate(-1)  # begun by a lost version of a later step: a later version continues it
                continue
            redo.popleft()
            return self.grant(session, task, ids, version=loaded)
        if not ready:
            return None
        deadline = versions.lineage.step(loaded) + limit
        ids = self._samplers.take(task, ready, count, room=self._staleness.admittable(deadline))
        if len(ids):
            at = rows.at(ids)
            rows.version[at] = loaded
            rows.deadline[at] = deadline
            self._state.steps.window.admit(len(ids), deadline)
            return self.grant(session, task, ids, version=loaded)
        group = ready.peek_group()
        deadline = versions.lineage.step(versions.current) + limit
        if len(group) and versions.current > loaded and self._staleness.admittable(deadline) >= len(group):
            return cmd.LoadFirst(version=versions.current)
        return None
