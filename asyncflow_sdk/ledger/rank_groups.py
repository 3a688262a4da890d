"""Rank groups: the ranks of a data-parallel job lease together, see ``TransferQueue.get``.

A step is acknowledged once every rank has acknowledged its shard. Rows of other tasks are completed shard by shard;
such a lease has a row for each shard unless ``at_least`` allows fewer. Trainer ranks also wait for each other at
barriers before a step, checkpoint or resume."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from ..errors import ConfigError, LeaseLost, SchemaError
from ..types import events as ev
from . import commands as cmd
from .admission import LeaseAdmission
from .commands import Ids, pack_ids, unpack_ids
from .completion import RowCompletion
from .deal import deal, imbalance_of
from .state import LedgerState
from .state.rows import NONE
from .state.sessions import DealtPart, Grant, ParkedRequest, Session, ShardedLease, place_of
from .state.tasks import Task, positions


class RankGroups:
    """Grants, completes and returns leases of rank groups."""

    def __init__(self, state: LedgerState, admission: LeaseAdmission, completion: RowCompletion) -> None:
        self._state, self._admission, self._completion = state, admission, completion
        self._parked, self._sessions = state.parked, state.sessions

    def check(self, session: Session, task: Task, command: cmd.LeaseRows) -> None:
        """Raise SchemaError or ConfigError for a request impossible for groups."""
        size, shards = command.world_size, command.shards or command.world_size
        who = _who(command)
        if not 0 <= command.rank < size:
            raise SchemaError(f"{who}: ranks are 0 to world_size - 1")
        if shards < 1 or size % shards:
            raise SchemaError(f"{who}: {command.shards} shards; their number must divide world_size")
        if size == 1:
            return
        if not command.group:
            raise SchemaError(f"rank {command.rank} of {size}: ranks lease together as a group; name it")
        if task.spec.admits:
            raise SchemaError(f"{who}: task {task.spec.name!r} grants rows to single replicas, not to rank groups")
        rows = command.count if task.spec.batch_rows is None else task.spec.batch_rows
        if rows < shards:
            raise SchemaError(f"{who}: {rows} rows cannot be split into {shards} shards")
        if task.spec.batch_rows is not None and task.spec.gives:
            raise SchemaError(f"{who}: a rank group acknowledges steps without writing columns")
        for other in [each for asked in self._parked.of_group(command).values() for each in asked.values()]:
            rank = other.command.rank
            replaced = rank == command.rank and other.session < session.id
            if not replaced and other.command.token == command.token:  # not for a part of another lease
                for field in ("world_size", "shards", "count", "at_least", "partition", "parts"):
                    mine, theirs = getattr(command, field), getattr(other.command, field)
                    if mine != theirs:
                        name = f"rank {rank} ({self._sessions.name(other.session)})"
                        text = f"{who} asks with {field}={mine!r}, and {name} with {theirs!r}"
                        raise ConfigError(f"{text}; all ranks of a group must ask alike")
                return  # the others are alike

    def lease(self, session: Session, task: Task, command: cmd.LeaseRows, grant: Grant | None) -> cmd.Reply | None:
        """Lease to all ranks once each has asked, ``grant``'s next part if given. Return the shard of this one."""
        asking = self._parked.alike(command)
        if self._replaces(session, task, command) or len({command.rank, *asking}) < command.world_size:
            return None
        number, size = command.shards or command.world_size, command.world_size
        if command.parts:
            next_part = self._admission.find_part(command, grant, number)
            if next_part is None:
                return None
            step, part = next_part
        else:
            found = self._admission.find(task, command, command.at_least or number)
            if found is None:
                return None
            ids, step = found
            whole_groups = task.sampling.whole_groups and task.sampling.balanced and bool(task.sampling.measure)
            part = deal(self._state.rows, task, ids, number, whole_groups=whole_groups)
        sessions = {rank: request.session for rank, request in asking.items()} | {command.rank: session.id}
        members = [sessions[rank] for rank in range(size)]
        shards = ShardedLease(command.group, members, part.bounds, finished=np.zeros(len(part.ids), bool))
        leased: cmd.Leased
        if command.parts:
            leased = self._admission.deliver_part(session, grant, step, part, shards)
        else:
            spans = [shards.span(rank) for rank in range(size)]
            shards.done.update(rank for rank, span in enumerate(spans) if span.start == span.stop)  # no rows
            leased = self._admission.grant(session, task, part.ids, step, group=shards)
        off = imbalance_of(self._state.rows, task, part)
        now, name, rows = self._state.context.now, task.spec.name, len(part.ids)
        event = ev.Balanced(time_s=now, task=name, shards=number, rows=rows, imbalance=off, step=step)
        self._state.context.publish(event)
        for rank, request in asking.items():
            if rank != command.rank:
                self._answer(request, _shard_of(leased, part, rank, size, off))
        return _shard_of(leased, part, command.rank, size, off)

    def _answer(self, request: ParkedRequest, reply: cmd.Reply | LeaseLost) -> None:
        self._parked.remove(request)
        self._state.context.answer(request.ticket, reply)

    def parked(self, request: ParkedRequest) -> None:
        """Void requests and leases of earlier sessions under the rank of a newly parked request."""
        command, session = request.command, self._sessions.by_id[request.session]
        asked, held = self._of_rank(self._state.tasks[command.task], command)
        reason = f"rank {command.rank} of group {command.group!r} is {session.name} now"
        for other in asked:
            if other.session != session.id:
                self._answer(other, LeaseLost(reason))
        for number, grant in held:
            if number != session.id:
                self._completion.void(grant, reason, blame=True)
        self._state.context.wake(request.place)

    def complete(self, session: Session, command: cmd.Complete) -> cmd.Reply:
        """Complete rows of a lease or of a rank's shard, or acknowledge its shard of a step."""
        grant = self._state.leases.held(session, command.token, command.rank)
        if (shards := grant.shards) is None:
            return self._completion.complete(grant, grant.ids, command)
        if grant.step != NONE:
            return self._acknowledge(grant, shards, command)
        span = shards.span(command.rank)
        part = grant.ids[span]
        done_before = part[shards.finished[span]]
        reply = self._completion.complete(grant, part, command)
        named = positions(command.index, len(part))
        revoked = unpack_ids(reply.revoked)
        again = np.isin(revoked, done_before)
        shards.finish(command.rank, named, ~np.isin(part[named], revoked))
        self._mark_seen(grant, shards, command.rank, named)
        return cmd.Completed(revoked=pack_ids(revoked[~again]), again=pack_ids(revoked[again]))

    def give_back(self, session: Session, command: cmd.GiveBack) -> cmd.Reply:
        """Return rows of a lease or of a rank's shard."""
        leases, rank = self._state.leases, command.rank
        grant = leases.held(session, command.token, rank)
        shards, part = grant.shards, grant.part(rank)
        if shards is not None and rank in shards.done:
            raise LeaseLost(f"rank {rank} of group {shards.group!r} has completed its shard of lease {grant.token}")
        named = positions(command.index, len(part))
        held = part[named][leases.having(grant, part[named])]
        reason = command.reason or f"given back by {session.name}"
        self._completion.give_back(grant, held, reason, blame=command.blame)
        if shards is not None and grant.step == NONE:
            self._mark_seen(grant, shards, rank, named)
        return cmd.Done()

    def session_closed(self, session: Session, reason: str, *, blame: bool) -> None:
        """Return the leases of a session, except ones with all shards of its ranks completed."""
        tasks = self._state.tasks
        for grant, lost in [(each, tasks[each.task].held(session)) for each in session.leases.values()]:
            shards, why = grant.shards, reason
            if shards is not None:
                mine = {rank for rank, number in enumerate(shards.members) if number == session.id}
                if mine <= shards.done:
                    continue
                why = f"rank {min(mine - shards.done)} of group {shards.group!r} ({session.name}): {reason}"
            self._completion.void(grant, why, blame=blame, lost=lost)

    def gather(self, session: Session, command: cmd.AllGather) -> cmd.Reply | None:
        """Return all payloads once every rank waits at the same barrier: only parked requests count."""
        rank, size, who = command.rank, command.world_size, _who(command)
        if not 0 <= rank < size:
            raise SchemaError(f"{who}: ranks are 0 to world_size - 1")
        alike: dict[int, ParkedRequest] = {}
        for request in self._parked.at(place_of(command)):
            other = request.command
            if other.rank == rank and request.session > session.id:
                newer = self._sessions.name(request.session)
                raise LeaseLost(f"{who} is {newer} now, which joined later than {session.name}")
            if other.rank != rank and (other.what, other.world_size) == (command.what, size):
                alike[other.rank] = request
        if len(alike) + 1 < size:
            return None
        payloads = {each: request.command.payload for each, request in alike.items()} | {rank: command.payload}
        gathered = cmd.AllGathered(payloads=tuple(payloads[each] for each in range(size)))
        for request in alike.values():
            self._answer(request, gathered)
        self.replace_older(session, command)
        return gathered

    def replace_older(self, session: Session, command: cmd.AllGather) -> None:
        """Reject waiting requests of older sessions under the same rank."""
        for request in self._parked.at(place_of(command)):
            if request.command.rank == command.rank and request.session < session.id:
                self._answer(request, LeaseLost(f"{_who(command)} is {session.name} now"))

    def _of_rank(self, task: Task, command: cmd.LeaseRows) -> tuple[list[ParkedRequest], list[tuple[int, Grant]]]:
        """Return requests and leases under a rank, each lease with its session."""
        rank = command.rank
        held = [
            (shards.members[rank], grant)
            for grant in task.group_leases.get(command.group, {}).values()
            if (shards := grant.shards) is not None and rank < shards.size and rank not in shards.done
        ]
        return list(self._parked.of_group(command).get(rank, {}).values()), held

    def _replaces(self, session: Session, task: Task, command: cmd.LeaseRows) -> bool:
        """True if an earlier session has requests or leases under this rank; they are voided when the request is
        parked. Raises LeaseLost for a session older than the rank's newest."""
        asked, held = self._of_rank(task, command)
        sessions = [request.session for request in asked] + [number for number, _ in held]
        newest = max(sessions, default=0)
        if newest > session.id:
            who = f"rank {command.rank} of group {command.group!r} is {self._sessions.name(newest)} now"
            raise LeaseLost(f"{who}, which joined later than {session.name}")
        return min(sessions, default=session.id) < session.id

    def _acknowledge(self, grant: Grant, shards: ShardedLease, command: cmd.Complete) -> cmd.Completed:
        """Acknowledge a rank's shard of a step. The last rank acknowledges the step."""
        span = shards.span(command.rank)
        count = span.stop - span.start
        named = positions(command.index, count)
        if command.columns:
            raise SchemaError("a rank group acknowledges steps without writing columns")
        if len(named) != count:
            who = f"rank {command.rank} of group {shards.group!r} has {count} rows of step {grant.step}"
            raise SchemaError(f"{who} and acknowledges {len(named)}; a step is acknowledged whole")
        dropped = named[:0] if command.filtered is None else named[positions(command.filtered, count)]
        if command.rank in shards.done:
            return cmd.Completed(revoked=b"")
        if grant.parts != NONE:
            self._completion.check_delivered(grant)
        shards.filtered.setdefault(shards.shard(command.rank), dropped + span.start)
        shards.done.add(command.rank)
        if len(shards.done) < shards.size:
            return cmd.Completed(revoked=b"")
        every = np.concatenate(list(shards.filtered.values())).astype("<i4")
        whole = cmd.Complete(token=grant.token, columns={}, filtered=every.tobytes() if len(every) else None)
        return self._completion.complete(grant, grant.ids, whole)

    def _mark_seen(self, grant: Grant, shards: ShardedLease, rank: int, named: Ids) -> None:
        """Note rows completed or returned by a rank. With the last row of all ranks the lease is over."""
        if shards.see(rank, named) and grant.over:
            self._state.leases.remove(grant)


def _who(command: cmd.AllGather | cmd.LeaseRows) -> str:
    return f"rank {command.rank} of {command.world_size} of group {command.group!r}"


def _shard_of(whole: cmd.Leased, part: DealtPart, rank: int, world_size: int, off: float) -> cmd.Leased:
    shards = len(part.bounds) - 1
    shard = rank * shards // world_size
    span = slice(part.bounds[shard], part.bounds[shard + 1])
    dealt = {name: pack_ids(unpack_ids(getattr(whole, name))[span]) for name in ("ids", "groups", "completed_at")}
    return replace(whole, rank=rank, world_size=world_size, shard=shard, shards=shards, imbalance=off, **dealt)
