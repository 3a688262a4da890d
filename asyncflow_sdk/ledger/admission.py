"""Lease admission: grant rows of a step, for a version, to a session."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from ..errors import Ended, SchemaError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids
from .deal import deal
from .pins import VersionPins
from .samplers import TaskSamplers
from .staleness import StalenessControl
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import DealtPart, Grant, Session, ShardedLease
from .state.tasks import READY, SELECTED, WAITING, Task


class LeaseAdmission:
    """Grants leases. Methods return None if the request has to wait.

    A step may be leased in parts, while the rest of it is still being selected. A part contains whole groups already
    selected for the step, so the staleness rule does not change. All parts of a step have one token. The step keeps
    its parts: if the lease is lost, the next one gets the same parts again, with the same shards for as many ranks."""

    def __init__(
        self,
        state: LedgerState,
        assembly: StepAssembly,
        staleness: StalenessControl,
        samplers: TaskSamplers,
        pins: VersionPins,
    ) -> None:
        self._state, self._assembly, self._staleness, self._samplers = state, assembly, staleness, samplers
        self._pins = pins

    def check(self, task: Task, command: cmd.LeaseRows) -> None:
        """Raise SchemaError for a request that can never be granted."""
        spec, capacity = task.spec, self._state.limits.capacity_rows
        if command.count < 1:
            raise SchemaError(f"a lease needs a count of 1 or more, not {command.count}")
        if command.partition is not None and not spec.takes(command.partition):
            takes = ", ".join(map(repr, spec.partitions))
            raise SchemaError(f"task {spec.name!r} takes no rows of partition {command.partition!r}, only of {takes}")
        most = command.count if spec.batch_rows is None else spec.batch_rows
        if not 0 <= command.at_least <= most:
            raise SchemaError(f"at_least is a number of rows up to {most}, not {command.at_least}")
        if command.at_least > capacity:
            raise SchemaError(
                f"at_least={command.at_least} rows are never ready together: the queue holds"
                f" {capacity} (capacity_rows)"
            )
        if command.at_least and spec.admits:
            raise SchemaError(
                f"task {spec.name!r} grants whole groups within the staleness rule; it takes no at_least"
            )
        for column in command.columns or ():
            if column not in spec.needs:
                needs = ", ".join(map(repr, spec.needs))
                raise SchemaError(f"task {spec.name!r} is not declared to need column {column!r}; it needs: {needs}")

    def check_open(self, session: Session, task: Task, command: cmd.LeaseRows) -> None:
        """Raise Ended if no further row can come, PluginError if the policy has failed."""
        if session.dismissed:
            raise Ended(f"{session.name} was dismissed and gets no more rows")
        if task.exhausted(command.partition):
            where = "" if command.partition is None else f" of partition {command.partition!r}"
            raise Ended(f"task {command.task!r} has no more rows{where} to grant")
        if task.grouped:
            self._staleness.check()

    def find(
        self, task: Task, command: cmd.LeaseRows, at_least: int, session: Session | None = None
    ) -> tuple[Ids, int] | None:
        """Remove rows for a lease from their queue. Return them and their step; None if too few.
        ``session``: gets rows of pinned partitions only with their version. ``at_least``: rows, one for each rank."""
        if task.makes_steps:
            if not self._state.steps.closed:
                return None
            step, ids = self._state.steps.closed.popleft()
            return ids, step
        pins = self._state.partitions.pins
        for partition in task.next_partitions(command.partition):
            if session is not None and pins and not self._pins.allows(session, partition):
                continue
            counts, least = task.by_partition[partition], max(at_least, command.at_least, 1)
            if (fit := counts[READY]) < least and (not fit or counts[WAITING] or self._more_come(partition)):
                continue
            dealt = at_least > command.at_least and not (task.sampling.chooses or task.whole_groups)
            exact = (least if dealt else command.at_least) if fit >= least else 1
            ids = self._samplers.take(task, task.queues[partition], command.count, exact)
            if ids.size:
                task.turn_from(partition)
                return ids, NONE
        return None

    def _more_come(self, partition: int) -> bool:
        """True if rows may come in a partition without a loss."""
        fed = partition or not self._state.parked.feeder_is_done
        return bool(fed) and not self._state.partitions.closed(partition)

    def grant(self, session: Session, task: Task, ids: Ids, step: int = NONE, version: int | None = None, shards: ShardedLease | None = None) -> cmd.Leased:  # fmt: skip
        """Lease rows to a session, or to the sessions of ``shards``. ``version``: loaded by the replica."""
        versions = self._state.versions
        if step != NONE:
            self._assembly.lease(step)
        if version is not None:
            if session.claimed:
                session.load(session.loaded)
                versions.name_zero(own=True)
        else:
            version = NONE if step == NONE else self._assembly.version_of(step)
        grant = self._state.leases.add(session, task, ids, step, version, len(versions.lineage.changes), shards)
        return self._leased(task, grant, ids)

    def _leased(self, task: Task, grant: Grant, ids: Ids) -> cmd.Leased:
        """Return the reply for newly leased rows."""
        rows, lineage, in_step = self._state.rows, self._state.versions.lineage, grant.step != NONE
        at = ids - rows.base
        if in_step:
            self._state.metrics.note_ages(rows.at(grant.ids), grant.step, lineage)
        return cmd.Leased(
            token=grant.token, task=grant.task, ids=pack_ids(ids), groups=pack_ids(rows.first[at]), step=grant.step,
            version=grant.newest, lease_s=task.spec.lease_s, partition=self._state.partitions.name_of(ids),
            version_step_offsets=lineage.offsets if in_step else (),
            completed_at=pack_ids(rows.current[at]) if in_step else b"",
        )  # fmt: skip

    # ---- prompts

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
        starved = isinstance(reply, cmd.LoadFirst)  # it has to load before it gets prompts, so it may load at once
        if session.replica is not None and session.replica.starved != starved:
            session.replica.starve(starved)
            if starved:
                self._state.context.wake("swap")
        return None if command.most and starved else reply

    def _lease_admitted(self, session: Session, task: Task, named: str | None, count: int) -> cmd.Reply | None:
        """Lease whole groups: of trained partitions within the staleness rule, else in order."""
        versions, loaded, pins = self._state.versions, session.loaded, self._state.partitions.pins
        if not self._state.steps.declared:
            return None
        if loaded is None:
            return cmd.LoadFirst(version=versions.current) if versions.current != NONE else None
        reply: cmd.Reply | None = None
        for partition in task.next_partitions(named):
            if partition in pins:
                reply = reply or self._lease_apart(session, task, loaded, partition, count)
        if reply is not None:
            return reply
        if loaded < versions.committed or versions.lineage.given_up(loaded):  # no rows, whatever the policy
            if loaded == versions.current:
                return None  # lost with its trainer; the next one is not published yet
            return cmd.LoadFirst(version=versions.committed if loaded < versions.committed else versions.current)
        for partition in task.next_partitions(named):
            if self._state.steps.task.takes(partition):
                reply = reply or self._lease_in_window(session, task, loaded, partition, count)
            else:
                reply = self._lease_apart(session, task, loaded, partition, count) or reply
            if isinstance(reply, cmd.Leased):
                task.turn_from(partition)
                return reply
        return reply

    def _lease_apart(self, session: Session, task: Task, loaded: int, partition: int, count: int) -> cmd.Reply | None:
        """Lease whole groups of a partition that is not trained, in order."""
        if not self._pins.allows(session, partition):
            return None
        ids = self._samplers.take(task, task.queue(partition), count)
        if not ids.size:
            return None
        self._state.versions.admit(ids, loaded)
        return self.grant(session, task, ids, version=loaded)

    def _lease_in_window(
        self, session: Session, task: Task, loaded: int, partition: int, count: int
    ) -> cmd.Reply | None:
        versions, rows, limit = self._state.versions, self._state.rows, self._state.limits.max_staleness
        ready, redo = task.queue(partition), task.redo.setdefault(partition, deque())
        for _ in range(len(redo)):  # rows lost by another replica keep their deadline
            ids = redo[0][ready.is_ready(redo[0])]
            ids = ids[rows.deadline[rows.at(ids)] != NONE]  # a group returned whole was withdrawn
            if not ids.size:
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
        if ids.size:
            versions.admit(ids, loaded, deadline)
            self._state.steps.window.admit(ids.size, deadline)
            return self.grant(session, task, ids, version=loaded)
        group = ready.peek_group()
        deadline = versions.lineage.step(versions.current) + limit
        if group.size and versions.current > loaded and self._staleness.admittable(deadline) >= group.size:
            return cmd.LoadFirst(version=versions.current)
        return None

    # ---- steps in parts

    def check_part(self, session: Session, task: Task, command: cmd.LeaseRows) -> Grant | None:
        """Return the lease whose next part is requested; None for a new lease. Raises LeaseLost,
        SchemaError, PluginError."""
        if not command.parts:
            if command.token:
                raise SchemaError(f"lease {command.token} is named in a request for another lease")
            return None
        name = task.spec.name
        if not task.makes_steps:
            raise SchemaError(f"task {name!r} has no steps to lease in parts; declare it with batch_rows")
        if task.spec.gives:
            raise SchemaError(f"task {name!r} gives columns, and a step in parts is acknowledged without columns")
        if not command.token:
            return None
        grant = self._state.leases.held(session, command.token, command.rank)
        if grant.parts == NONE or grant.task != name:
            raise SchemaError(f"lease {grant.token} is not of a step of task {name!r} in parts")
        size, shards = command.world_size, grant.shards
        held = ("", 1, 1) if shards is None else (shards.group, shards.size, len(shards.bounds) - 1)
        asked = (command.group if size > 1 else "", size, command.shards or size)
        if asked != held:
            raise SchemaError(
                f"lease {grant.token} is of group {held[0]!r} with {held[1]} ranks and {held[2]} shards, and not of"
                f" {asked[0]!r} with {asked[1]} and {asked[2]}"
            )
        if self._state.steps.delivered_whole(grant):
            raise SchemaError(f"step {grant.step} is delivered whole under lease {grant.token}; acknowledge it")
        self._staleness.check()
        return grant

    def find_part(self, command: cmd.LeaseRows, grant: Grant | None, shards: int) -> tuple[int, DealtPart] | None:
        """Return the step and the next part of a lease, or of a new one; None if too few rows are
        selected. ``shards``: number of shards to deal a part to, unless it is dealt to as many."""
        steps, rows = self._state.steps, self._state.rows
        step = steps.next_to_lease() if grant is None else grant.step
        if step is None:
            return None
        number, known = (0 if grant is None else grant.parts), steps.parts.get(step, [])
        if number < len(known):
            part = known[number]
            return step, part if part.shards == shards else self._deal(part.ids, shards, number)
        if step == steps.window.step:
            filled = steps.window.batch_rows - steps.window.free
            if filled - (0 if grant is None else grant.left) < max(command.at_least, 1):
                return None
        ids = steps.rows_of(step)
        return step, self._deal(ids[steps.task.state[rows.at(ids)] == SELECTED], shards, number)

    def _deal(self, ids: Ids, shards: int, number: int) -> DealtPart:
        if shards == 1:
            return DealtPart(ids, [0, ids.size])
        return deal(self._state.rows, self._state.steps.task, ids, shards, whole_groups=True, first=number)

    def deliver_part(
        self,
        session: Session,
        task: Task,
        grant: Grant | None,
        step: int,
        part: DealtPart,
        shards: ShardedLease | None = None,
    ) -> cmd.LeasedPart:
        """Lease a part found by ``find_part``. ``shards``: of a new lease of a rank group."""
        steps, leases, number = self._state.steps, self._state.leases, 0 if grant is None else grant.parts
        steps.deliver(step, number, part)
        if grant is None:
            leased = self.grant(session, task, part.ids, step, shards=shards)
            grant = leases.by_token[leased.token]
            grant.begin_parts()
        else:
            grant.extend(part)
            leases.renew(grant)
            task.grant(part.ids, grant.token)
            leased = self._leased(task, grant, part.ids)
        return cmd.LeasedPart(**msgspec.structs.asdict(leased), part=number, last=steps.delivered_whole(grant))

    def waits_for_part(self, grant: Grant) -> bool:
        """True if all holders of a lease wait for its next part."""
        place = self._state.tasks[grant.task].place
        asking = {each.command.rank for each in self._state.parked.at(place) if each.command.token == grant.token}
        return len(asking) == (1 if grant.shards is None else grant.shards.size)
