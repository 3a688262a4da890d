"""Teams: the ranks of a data-parallel job lease together, so that the k-th lease of each rank is a shard of one.

A request of a rank waits for those of all others; then one lease is given, its rows dealt out in shards. A step is
acknowledged when every rank has acknowledged its shard; when one that has not is lost, it goes back whole and is leased
again, whole, under a new token. Rows of other tasks are completed shard by shard.
"""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError, LeaseLost, SchemaError
from ..types import events as ev
from . import commands as cmd
from .balance import balance, imbalance, split
from .commands import Ids, pack_ids, unpack_ids
from .finishing import Finishing, positions
from .records import Crew, Held, Session, Task, Team, Waiter
from .rows import NONE


class Teaming(Finishing):
    """Leases of teams."""

    def _check_lease(self, session: Session, task: Task, command: cmd.Lease) -> None:
        super()._check_lease(session, task, command)
        self._check_team(session, task, command)

    def _lease_rows(self, session: Session, task: Task, command: cmd.Lease) -> cmd.Reply | None:
        if command.world_size > 1:
            return self._lease_team(session, task, command)
        return super()._lease_rows(session, task, command)

    def _check_team(self, session: Session, task: Task, command: cmd.Lease) -> None:
        size, shards = command.world_size, command.shards or command.world_size
        who = f"rank {command.rank} of {size} of team {command.team!r}"
        if not 0 <= command.rank < size:
            raise SchemaError(f"{who}: ranks are 0 to world_size - 1")
        if shards < 1 or size % shards:
            raise SchemaError(f"{who}: {command.shards} shards; their number must divide world_size")
        if size == 1:
            return None
        if not command.team:
            raise SchemaError(f"rank {command.rank} of {size}: ranks lease together as a team; name it")
        if task.spec.admits:
            raise SchemaError(f"{who}: task {task.spec.name!r} gives rows to replicas one by one; it has no teams")
        rows = command.count if task.spec.batch_rows is None else task.spec.batch_rows
        if rows < shards:
            raise SchemaError(f"{who}: {rows} rows cannot be dealt out to {shards} shards")
        if task.spec.batch_rows is not None and task.spec.gives:
            raise SchemaError(f"{who}: a team acknowledges steps as a whole and writes no columns with that")
        asking = task.teams[command.team].asking if command.team in task.teams else {}
        for rank, asked in asking.items():
            for other in asked.values():
                if rank == command.rank and other.session < session.id:
                    continue  # of a process that is gone: this one takes its place
                return _check_alike(who, command, other.command, self._name(other.session))  # all that wait are alike
        return None

    def _lease_team(self, session: Session, task: Task, command: cmd.Lease) -> cmd.Reply | None:
        """The shard of a rank, when all have asked and there are rows. Answers the others then, too."""
        asking = task.teams[command.team].asking if command.team in task.teams else {}
        stale = self._check_rank(session, task, command)
        ranks = {command.rank, *asking}
        if stale or len(ranks) < command.world_size:
            return None
        shards = command.shards or command.world_size
        found = self._find(task, command, shards)
        if found is None:
            return None
        ids, step = found
        ids, bounds, off = self._deal(task, ids, shards)
        others = {rank: next(iter(asked.values())) for rank, asked in asking.items() if rank != command.rank}
        members = [session.id if r == command.rank else others[r].session for r in range(command.world_size)]
        crew = Crew(command.team, members, bounds, finished=np.zeros(len(ids), bool))
        spans = [crew.span(rank) for rank in range(command.world_size)]
        crew.done.update(rank for rank, span in enumerate(spans) if span.start == span.stop)  # they owe nothing
        whole = self._grant(session, task, ids, step, crew=crew)
        self._effects.events.append(
            ev.Balanced(time_s=self._now, task=task.spec.name, shards=shards, rows=len(ids), imbalance=off, step=step)
        )
        groups, completed_at = unpack_ids(whole.groups), unpack_ids(whole.completed_at)

        def shard(rank: int) -> cmd.Leased:
            span = crew.span(rank)
            return cmd.Leased(
                token=whole.token, task=whole.task, ids=pack_ids(ids[span]), groups=pack_ids(groups[span]), step=step,
                version=whole.version, lease_s=whole.lease_s, partition=whole.partition, rank=rank,
                world_size=command.world_size, shard=crew.shard(rank), shards=shards, imbalance=off,
                stretches=whole.stretches,
                completed_at=pack_ids(completed_at[span]) if step != NONE else b"",
            )  # fmt: skip

        for rank, waiter in others.items():
            self._unpark(waiter)
            self._answer(waiter.ticket, shard(rank))
        return shard(command.rank)

    def _park(self, waiter: Waiter) -> None:
        super()._park(waiter)
        if isinstance(waiter.command, cmd.Lease) and waiter.command.world_size > 1:
            task = self.tasks[waiter.command.task]
            self._take_over(self.sessions[waiter.session], task, waiter.command)
            self._dirty.add(waiter.place)

    def _under(self, task: Task, command: cmd.Lease) -> tuple[list[Waiter], list[tuple[int, Held]]]:
        """What is asked under a rank, and what sessions hold under it."""
        team = task.teams.get(command.team, Team())
        held = [
            (lease.crew.members[command.rank], lease)
            for lease in team.leases.values()
            if lease.crew is not None and command.rank < lease.crew.size and command.rank not in lease.crew.done
        ]
        return list(team.asking.get(command.rank, {}).values()), held

    def _check_rank(self, session: Session, task: Task, command: cmd.Lease) -> bool:
        """A rank is whoever joined last in its name. Whether an earlier one must go first, as it does when this request
        comes to wait."""
        asked, held = self._under(task, command)
        sessions = [waiter.session for waiter in asked] + [number for number, _ in held]
        newest = max(sessions, default=0)
        if newest > session.id:
            raise LeaseLost(
                f"rank {command.rank} of team {command.team!r} is {self._name(newest)} now, which joined later than"
                f" {session.name}"
            )
        return min(sessions, default=session.id) < session.id

    def _take_over(self, session: Session, task: Task, command: cmd.Lease) -> None:
        """What earlier sessions asked and hold under a rank is void."""
        asked, held = self._under(task, command)
        reason = f"rank {command.rank} of team {command.team!r} is {session.name} now"
        for waiter in asked:
            if waiter.session != session.id:
                self._unpark(waiter)
                self._answer(waiter.ticket, LeaseLost(reason))
        for number, lease in held:
            if number != session.id:
                self._void(lease, reason, blame=True)

    def _void(self, lease: Held, reason: str, blame: bool) -> None:
        """All that is left of a lease goes back, and nobody holds it any more."""
        self._return(lease, self._outstanding(lease), reason, blame)
        self._drop(lease)

    def _deal(self, task: Task, ids: Ids, shards: int) -> tuple[Ids, list[int], float]:
        """Rows in the order of their shards, where each shard begins, and how unequal they are."""
        at, sampling = self.rows.at(ids), task.sampling
        weights = np.ones(len(ids))
        shard = split(len(ids), shards)
        if sampling.balanced and sampling.measure:
            weights = self.rows.measures[sampling.measure][at]
            if sampling.whole_groups:
                _, group = np.unique(self.rows.first[at], return_inverse=True)
                shard = balance(np.bincount(group, np.nan_to_num(weights)).astype(np.float64), shards)[group]
            else:
                shard = balance(weights, shards)
        order = np.argsort(shard, kind="stable")
        bounds = np.concatenate([[0], np.cumsum(np.bincount(shard, minlength=shards))])
        return ids[order], bounds.tolist(), imbalance(weights, shard, shards)

    # ---- what ranks say of their shards

    def _complete(self, session: Session, command: cmd.Complete) -> cmd.Reply:
        lease = self._held(session, command.token, command.rank)
        crew = lease.crew
        if crew is None:
            return super()._complete(session, command)
        if lease.step != NONE:
            return self._acknowledge(lease, crew, command)
        span = crew.span(command.rank)
        part, before = lease.ids[span], crew.finished[span]
        done_before = part[before]
        reply = self._finish_rows(lease, part, command)
        named = np.arange(len(part)) if command.index is None else positions(command.index, len(part))
        revoked = unpack_ids(reply.revoked)
        again = np.isin(revoked, done_before)
        crew.finished[span][named] |= ~np.isin(part[named], revoked)
        self._saw(lease, crew, command.rank, named)
        return cmd.Completed(revoked=pack_ids(revoked[~again]), again=pack_ids(revoked[again]))

    def _acknowledge(self, lease: Held, crew: Crew, command: cmd.Complete) -> cmd.Reply:
        """A rank's word on its shard of a step; the last rank's makes it so."""
        span = crew.span(command.rank)
        count = span.stop - span.start
        named = np.arange(count) if command.index is None else positions(command.index, count)
        if command.columns:
            raise SchemaError("a team acknowledges a step as a whole and writes no columns with that")
        if len(named) != count:
            raise SchemaError(
                f"rank {command.rank} of team {crew.team!r} has {count} rows of step {lease.step} and acknowledges"
                f" {len(named)}; a step is acknowledged whole"
            )
        dropped = named[:0] if command.filtered is None else named[positions(command.filtered, count)]
        if command.rank in crew.done:
            return cmd.Completed(revoked=b"")
        crew.filtered.setdefault(crew.shard(command.rank), dropped + span.start)
        crew.done.add(command.rank)
        if len(crew.done) < crew.size:
            return cmd.Completed(revoked=b"")
        every = np.concatenate(list(crew.filtered.values())).astype("<i4")
        whole = cmd.Complete(token=lease.token, columns={}, filtered=every.tobytes() if len(every) else None)
        return self._finish_rows(lease, lease.ids, whole)

    def _give_back(self, session: Session, command: cmd.GiveBack) -> cmd.Reply:
        lease = self._held(session, command.token, command.rank)
        crew = lease.crew
        if crew is not None and command.rank in crew.done:
            raise LeaseLost(
                f"rank {command.rank} of team {crew.team!r} is through with its shard of lease {lease.token}"
            )
        reply = super()._give_back(session, command)
        if crew is not None and lease.step == NONE:
            span = crew.span(command.rank)
            count = span.stop - span.start
            named = np.arange(count) if command.index is None else positions(command.index, count)
            self._saw(lease, crew, command.rank, named)
        return reply

    def _saw(self, lease: Held, crew: Crew, rank: int, named: Ids) -> None:
        """A rank is through with rows of its shard; with all of them it owes nothing."""
        span = crew.span(rank)
        seen = crew.seen.setdefault(rank, np.zeros(span.stop - span.start, bool))
        seen[named] = True
        if seen.all():
            crew.done.add(rank)
            if lease.over:
                self._drop(lease)

    def _lost(self, session: Session, reason: str, blame: bool) -> None:
        """A session is gone: what it holds goes back, of a team's lease all that is left, unless it owed nothing."""
        for lease in list(session.leases.values()):
            crew = lease.crew
            mine = set() if crew is None else {r for r, number in enumerate(crew.members) if number == session.id}
            if crew is not None and mine <= crew.done:
                continue
            self._void(lease, reason, blame)


def _check_alike(who: str, one: cmd.Lease, other: cmd.Lease, name: str) -> None:
    for field in ("world_size", "shards", "count", "at_least", "partition"):
        if getattr(one, field) != getattr(other, field):
            raise ConfigError(
                f"{who} asks with {field}={getattr(one, field)!r}, and rank {other.rank} ({name}) with"
                f" {getattr(other, field)!r}; all ranks of a team ask alike"
            )
