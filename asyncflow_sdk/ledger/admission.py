"""Admission: rows are put within the limits of the queue, and leased to sessions for a step or a version."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from ..errors import ConfigError, Ended, SchemaError
from . import commands as cmd
from .assembly import StepAssembly
from .commands import Ids, pack_ids, unpack_ids
from .configuration import check_groups_fill
from .deal import deal
from .pins import VersionPins
from .samplers import TaskSamplers
from .state import LedgerState
from .state.context import Placed
from .state.idempotency import DIGEST_BYTES
from .state.rows import NONE
from .state.sessions import DealtPart, Grant, Session, ShardedLease
from .state.tasks import READY, SELECTED, WAITING, Task
from .terminations import CANCELLED


class LeaseAdmission:
    """Grants leases. Methods return None if the request has to wait.

    A step may be leased in parts, while the rest of it is still being selected. A part contains whole groups already
    selected for the step, so the staleness rule does not change. All parts of a step have one token. The step keeps
    its parts: if the lease is lost, the next one gets the same parts, with the same shards for as many ranks."""

    def __init__(self, state: LedgerState, assembly: StepAssembly, samplers: TaskSamplers, pins: VersionPins) -> None:
        self._state, self._assembly, self._staleness = state, assembly, assembly.staleness
        self._samplers, self._pins = samplers, pins

    def check(self, task: Task, command: cmd.LeaseRows) -> None:
        """Raise SchemaError for an impossible request."""
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
            text = f"the queue holds {capacity} (capacity_rows)"
            raise SchemaError(f"at_least={command.at_least} rows are never ready together: {text}")
        if command.at_least and spec.admits:
            raise SchemaError(f"task {spec.name!r} grants groups within the staleness rule, and takes no at_least")
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
        fed, partitions = partition or not self._state.parked.feeder_is_done, self._state.partitions
        return bool(fed) and not partitions.closed(partitions.names[partition])

    def grant(
        self, session: Session, task: Task, ids: Ids, step: int, loaded: int = NONE, group: ShardedLease | None = None
    ) -> cmd.Leased:
        """Lease rows to a session, or to the sessions of ``group``. ``loaded``: the version of prompts."""
        versions = self._state.versions
        if step != NONE:
            self._assembly.lease(step)
            loaded = self._assembly.version_of(step)
        elif loaded != NONE and session.claimed:
            session.load(loaded)
            versions.name_zero(own=True)
        grant = self._state.leases.add(session, task, ids, step, loaded, len(versions.lineage.changes), group)
        return self._leased(task, grant, ids)

    def _leased(self, task: Task, grant: Grant, ids: Ids) -> cmd.Leased:
        rows, lineage, in_step = self._state.rows, self._state.versions.lineage, grant.step != NONE
        at, names = ids - rows.base, self._state.partitions.names
        where = names[rows.partition[at[0]]] if at.size else ""
        if in_step:
            self._state.metrics.note_ages(rows.at(grant.ids), grant.step, lineage)
        return cmd.Leased(
            token=grant.token, task=grant.task, ids=pack_ids(ids), groups=pack_ids(rows.first[at]), step=grant.step,
            version=grant.newest, lease_s=task.spec.lease_s, partition=where,
            version_step_offsets=lineage.offsets if in_step else (),
            completed_at=pack_ids(rows.current[at]) if in_step else b"",
        )  # fmt: skip

    def lease_prompts(self, session: Session, task: Task, command: cmd.LeaseRows) -> cmd.Reply | None:
        """Lease whole groups under the staleness rule."""
        count = command.count
        if command.most:
            held = sum(grant.left for grant in session.leases.values() if grant.task == command.task)
            count = max(count, command.most - held)
        reply = self._lease_admitted(session, task, command.partition, count)
        starved = isinstance(reply, cmd.LoadFirst)  # it has to load before it gets prompts, so it may load at once
        if session.replica is not None and session.replica.starved != starved:
            session.follow(starved=starved)
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
                reply = reply or self._lease_fresh(session, task, loaded, partition, count)
            else:
                reply = self._lease_apart(session, task, loaded, partition, count) or reply
            if isinstance(reply, cmd.Leased):
                task.turn_from(partition)
                return reply
        return reply

    def _lease_apart(self, session: Session, task: Task, loaded: int, partition: int, count: int) -> cmd.Reply | None:
        """Lease whole groups of an untrained partition, in order."""
        if not self._pins.allows(session, partition):
            return None
        ids = self._samplers.take(task, task.queue(partition), count)
        if not ids.size:
            return None
        self._state.versions.admit(ids, loaded)
        return self.grant(session, task, ids, NONE, loaded)

    def _lease_fresh(self, session: Session, task: Task, loaded: int, partition: int, count: int) -> cmd.Reply | None:
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
            return self.grant(session, task, ids, NONE, loaded)
        if not ready:
            return None
        deadline = versions.lineage.step(loaded) + limit
        ids = self._samplers.take(task, ready, count, room=self._staleness.admittable(deadline))
        if ids.size:
            versions.admit(ids, loaded, deadline)
            self._state.steps.window.admit(ids.size, deadline)
            return self.grant(session, task, ids, NONE, loaded)
        group = ready.peek_group()
        deadline = versions.lineage.step(versions.current) + limit
        if group.size and versions.current > loaded and self._staleness.admittable(deadline) >= group.size:
            return cmd.LoadFirst(version=versions.current)
        return None

    def check_part(self, session: Session, task: Task, command: cmd.LeaseRows) -> Grant | None:
        """Return the lease for a next part; None for a new one. Raises LeaseLost, SchemaError, PluginError."""
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
            texts = ("{!r} with {} ranks and {} shards".format(*group) for group in (held, asked))
            raise SchemaError(f"lease {grant.token} is of group {', and not of '.join(texts)}")
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
        number, left = (0, 0) if grant is None else (grant.parts, grant.left)
        filled = steps.window.batch_rows - steps.window.free - left
        if number < len(known := steps.parts.get(step, [])):
            if len(known[number].bounds) == shards + 1:
                return step, known[number]
            ids = known[number].ids
        elif step == steps.window.step and filled < max(command.at_least, 1):
            return None
        else:
            ids = steps.rows_of(step)
            ids = ids[steps.task.state[rows.at(ids)] == SELECTED]
        return step, deal(rows, steps.task, ids, shards, whole_groups=True, first=number)

    def deliver_part(
        self, session: Session, grant: Grant | None, step: int, part: DealtPart, group: ShardedLease | None = None
    ) -> cmd.LeasedPart:
        """Lease a part found by ``find_part``. ``group``: the ranks of a new lease of a rank group."""
        steps, leases, number = self._state.steps, self._state.leases, 0 if grant is None else grant.parts
        steps.deliver(step, number, part)
        if grant is None:
            leased = self.grant(session, steps.task, part.ids, step, group=group)
            grant = leases.by_token[leased.token]
            grant.begin_parts()
        else:
            grant.extend(part)
            leases.renew(grant)
            steps.task.grant(part.ids, grant.token)
            leased = self._leased(steps.task, grant, part.ids)
        return cmd.LeasedPart(**msgspec.structs.asdict(leased), part=number, last=steps.delivered_whole(grant))

    def waits_for_part(self, grant: Grant) -> bool:
        """True if all holders of a lease wait for its next part."""
        place = self._state.tasks[grant.task].place
        asking = {each.command.rank for each in self._state.parked.at(place) if each.command.token == grant.token}
        return len(asking) == (1 if grant.shards is None else grant.shards.size)


class Puts:
    """Adds rows within the limits of the queue."""

    def __init__(self, state: LedgerState, assembly: StepAssembly, pins: VersionPins) -> None:
        self._state, self._terminations, self._assembly, self._pins = state, assembly.terminations, assembly, pins

    def put(self, command: cmd.AddRows) -> cmd.Reply | None:
        """Add rows. None if there is no room yet."""
        state = self._state
        if command.groups < 1 or command.group_size < 1:
            raise SchemaError(f"a put needs rows; this one has {command.groups} groups of {command.group_size}")
        if command.digest and len(command.digest) != DIGEST_BYTES * len(command.columns):
            raise SchemaError(f"the digest of {len(command.columns)} columns is not {len(command.digest)} bytes")
        lacking: Ids | None = None
        if command.key and (known := state.keys.get(command.key)) is not None:
            lacking = state.keys.lacking(known, command)
            if not lacking.size:
                return cmd.PutDone(first=known.first, count=known.size, again=True)
        count = (command.groups if lacking is None else lacking.size) * command.group_size
        takers = state.tasks.takers(command.partition)
        trained = bool(takers) and takers[-1].makes_steps
        self._check(command, count, takers, trained=trained)
        if command.version != NONE or state.partitions.pins:
            self._pins.check(command)
        if not self._fits(command, count, trained=trained):
            return None
        groups = np.arange(command.groups) if lacking is None else lacking
        of_group = groups if command.group_size == 1 else groups.repeat(command.group_size)
        ids, bits = self._add(command, of_group, takers, trained=trained)
        first, again = int(ids[0]), lacking is not None
        if again:
            state.keys.add_again(command.key, first, groups)
        elif command.key:
            state.keys.add(command, first, state.rows)
        if command.key:
            state.context.wake_puts()  # a parked put with the same key need not wait
        if command.block is not None:
            state.context.effects.placed.append(Placed(ids, command.block, of_group))
        for task in takers:
            need = int(task.need)
            if bits & need == need:
                self._assembly.ready(task, ids)
        if command.version != NONE:
            self._pins.add(command)
        return cmd.PutDone(first=first, count=count, again=False, groups=pack_ids(groups) if again else b"")

    def cancel(self, command: cmd.Cancel) -> cmd.Reply:
        """Cancel live rows with their groups."""
        rows, terminations = self._state.rows, self._terminations
        if bool(command.ids) + bool(command.key) + (command.partition is not None) != 1:
            raise SchemaError("cancel rows by one of: ids, key, partition")
        if command.partition is not None:
            number = self._state.partitions.number(command.partition)
            return cmd.Cancelled(count=terminations.end_live(number, CANCELLED, command.reason))
        if command.key:
            if self._state.keys.get(command.key) is None:
                raise SchemaError(f"no put with key {command.key[:200]!r} is remembered")
            ids = self._state.keys.rows_of(command.key)
        else:
            if len(command.ids) % 8:
                raise SchemaError("row ids are packed int64")
            ids = np.unique(unpack_ids(command.ids))
            unknown = ids[(ids < 0) | (ids >= rows.base + rows.count)]
            if unknown.size:
                raise SchemaError(f"row {unknown[0]} was never put; the newest is {self._state.budget.put - 1}")
        return cmd.Cancelled(count=terminations.end_groups(rows.live(ids), CANCELLED, command.reason))

    def end(self, command: cmd.End) -> cmd.Reply:
        """End the stream or one partition."""
        if command.partition == "*":
            raise SchemaError('"*" is no partition; end them one by one, or all with no name')
        partitions = self._state.partitions
        number = None if command.partition is None else partitions.number(command.partition)
        partitions.end(*(() if command.partition is None else [command.partition]))
        if self._pins.end(number) and self._assembly.supply_ended():
            partitions.end()
        if command.cancel:
            self._terminations.end_live(number, CANCELLED, "cancelled at the end")
        self._state.parked.wake_all()
        return cmd.Done()

    def wanted(self, command: cmd.AwaitRowsWanted) -> cmd.Reply | None:
        """Return the number of rows the steps lack, and the feeder's lost puts; None if none."""
        steps, feeds = self._state.steps, bool(command.prefix)
        full = steps.declared and not steps.open
        if self._assembly.supply_ended() or (full if not feeds else "" in self._state.partitions.ended_names):
            raise Ended("every step is filled; no more rows are wanted")
        lost = self._state.keys.lost(command.prefix) if feeds and not full else {}
        if lost or not command.more:
            return cmd.RowsWanted(count=0, lost=lost) if lost or not self._assembly.can_lose() else None
        count = steps.window.wanted - steps.unselected if steps.declared else 0
        return cmd.RowsWanted(count=count) if count > 0 else None

    def _check(self, command: cmd.AddRows, count: int, takers: list[Task], *, trained: bool) -> None:
        limits, rows = self._state.limits, self._state.limits.capacity_rows
        if self._state.partitions.ended:
            raise Ended("the stream has ended; nothing more can be put")
        if command.partition in self._state.partitions.ended_names:
            raise Ended(f"partition {command.partition!r} has ended; nothing more can be put there")
        if trained and not self._state.steps.open:
            raise Ended("every step is filled; nothing more can be put for them")
        if command.partition == "*":
            raise SchemaError('"*" is no partition: a task names it to take all of them; put rows in one')
        if command.block is not None and command.block.rows != command.groups:
            raise SchemaError(f"{command.groups} groups are put with {command.block.rows} values")
        if count > rows:
            raise SchemaError(f"{count} rows in one put are too many (capacity_rows={rows}); put fewer at a time")
        nbytes, room = max(count * limits.row_bytes, command.nbytes), limits.capacity_bytes
        if nbytes > room:
            text = f"{count} rows of {nbytes} bytes are more than the whole queue holds (capacity_bytes={room})"
            raise SchemaError(f"{text}; put fewer at a time")
        self._check_group_size(command, takers, trained=trained)
        if not command.columns:
            raise SchemaError("a put needs at least one column")
        if not -(1 << 31) < command.priority < 1 << 31:
            raise SchemaError(f"a priority is an int32, not {command.priority}")
        self._state.columns.check(command.columns)

    def _check_group_size(self, command: cmd.AddRows, takers: list[Task], *, trained: bool) -> None:
        sizes, size, alike = self._state.partitions.group_sizes, command.group_size, [command.partition]
        if trained:
            check_groups_fill(self._state.steps.window.batch_rows, size)
            alike = [name for name in sizes if self._state.steps.task.spec.takes(name)]
        others = [sizes[name] for name in alike if sizes.get(name, size) != size]
        if others and any(task.grouped for task in takers):
            raise ConfigError(f"this run has groups of {others[0]}; groups of {size} would leave steps unfilled")

    def _fits(self, command: cmd.AddRows, count: int, *, trained: bool) -> bool:
        limits, budget = self._state.limits, self._state.budget
        if budget.occupied + count > limits.capacity_rows:
            return False
        first = self._state.parked.first("put")
        if first is not None and first.command is not command and not (trained and self._state.steps.lacks_rows):
            return False  # small puts must not overtake a large one for ever
        if budget.charged + max(count * budget.reserve, command.nbytes) <= limits.capacity_bytes:
            return True
        # otherwise no row could ever end and free bytes for this put
        return not budget.charged or (trained and self._state.steps.unselected < self._state.steps.window.free)

    def _add(self, command: cmd.AddRows, of_group: Ids, takers: list[Task], *, trained: bool) -> tuple[Ids, int]:
        """Add rows. Return their ids and the bits of their columns."""
        state, rows, count = self._state, self._state.rows, of_group.size
        partition = state.partitions.add(command.partition, command.group_size)
        ids = rows.add(count // command.group_size, command.group_size, partition, command.priority)
        new = slice(rows.count - count, rows.count)
        bits = state.columns.put(new, count, partition, command.columns)
        state.versions.put(new)
        state.budget.charge_new(new, count, command.nbytes)
        if command.measures:
            state.columns.measure(ids, command.measures, of_group)
        if command.lengths:
            state.metrics.note_lengths(ids, command.lengths, of_group)
        if trained:
            state.steps.offer(count)
        state.tasks.enter(new, count, partition, takers)
        return ids, bits
