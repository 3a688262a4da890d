"""What a naive ledger says of leases: who may have which rows, and what completing and giving back do."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from naive_lineage import NaiveLineage
from naive_rows import Crew, Lease, Parked

from asyncflow_sdk.errors import ConfigError, Ended, LeaseLost, SchemaError, WriteOnceError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

PARKED = "parked"


class NaiveLeases(NaiveLineage, ABC):
    claimed: set[int]
    permits: set[int]

    @abstractmethod
    def must_load(self, session: int) -> int | None:
        """A version without which a replica gets nothing, whatever the staleness rule says."""

    def _is(self, outcome: Any, expected: Any) -> None:
        assert outcome == expected, f"{outcome!r} is not {expected!r}"

    def _is_error(self, outcome: Any, errors: Sequence[type[Exception]]) -> bool:
        """Several things may be wrong at once; any of their errors will do."""
        if errors:
            assert type(outcome) in errors, f"{outcome!r} is none of {errors}"
        return bool(errors)

    def _write_schema(self, columns: cmd.Columns) -> None:
        for name, spec in columns.items():
            self.schema.setdefault(name, spec)
            self.named_columns.add(name)

    def _lease(self, session: int, c: cmd.Lease, outcome: Any) -> None:
        if self._is_error(outcome, [SchemaError] if c.task not in self.tasks or c.count < 1 else []):
            return
        task = self.tasks[c.task]
        if self._is_error(outcome, [SchemaError] if c.partition is not None and not task.takes(c.partition) else []):
            return
        most = c.count if task.batch_rows is None else task.batch_rows
        if not 0 <= c.at_least <= min(most, self.capacity) or (c.at_least and task.admits):
            self._is_error(outcome, [SchemaError])
            return
        self.judged = c
        if c.world_size > 1 and isinstance(outcome, LeaseLost):
            assert max(self._named(c), default=session) > session, "nobody came later under this rank"
            return
        if c.world_size > 1 and self._lease_of_team_is_wrong(session, task, c, outcome):
            return
        if self._is_error(outcome, [Ended] if session in self.dismissed or self.exhausted(task, c.partition) else []):
            return
        if c.world_size > 1 and not self._all_ask(session, c, outcome):
            return
        if task.batch_rows is not None:
            self._lease_step(session, task, outcome)
        elif task.admits:
            self._lease_admitted(session, task, c, outcome)
        elif not self.ready(task, c.partition):
            self._is(outcome, PARKED)
        else:
            self._lease_rows(session, task, c, outcome)

    def _asking(self, c: cmd.Lease) -> dict[int, list[Parked]]:
        """Requests of a team that wait, by rank."""
        found: dict[int, list[Parked]] = {}
        for parked in self.parked:
            p = parked.command
            if isinstance(p, cmd.Lease) and p.world_size > 1 and (p.task, p.team) == (c.task, c.team):
                found.setdefault(p.rank, []).append(parked)
        return found

    def _lease_of_team_is_wrong(self, session: int, task: TaskSpec, c: cmd.Lease, outcome: Any) -> bool:
        shards = c.shards or c.world_size
        rows = c.count if task.batch_rows is None else task.batch_rows
        if (
            not 0 <= c.rank < c.world_size
            or shards < 1
            or c.world_size % shards
            or not c.team
            or task.admits
            or rows < shards
            or (task.batch_rows is not None and task.gives)
        ):
            return self._is_error(outcome, [SchemaError])
        others = [
            parked.command
            for rank, asked in self._asking(c).items()
            for parked in asked
            if rank != c.rank or parked.session >= session
        ]
        alike = ("world_size", "shards", "count", "at_least", "partition")
        differs = any(getattr(c, f) != getattr(o, f) for o in others for f in alike)
        return self._is_error(outcome, [ConfigError] if differs else [])

    def _named(self, c: cmd.Lease) -> list[int]:
        """Sessions that ask or hold something under a rank."""
        sessions = [parked.session for parked in self._asking(c).get(c.rank, [])]
        for token in self.under(c):
            crew = self.leases[token].crew
            assert crew is not None
            sessions.append(crew.members[c.rank])
        return sessions

    def _all_ask(self, session: int, c: cmd.Lease, outcome: Any) -> bool:
        """Whether the answer depends on rows alone; else it is judged here."""
        if isinstance(outcome, cmd.Leased) and outcome.token in self.leases:  # told with another rank of its team
            crew = self.leases[outcome.token].crew
            assert crew is not None
            assert crew.members[c.rank] == session
            assert outcome.rank == c.rank
            return False
        asking, sessions = self._asking(c), self._named(c)
        if self._is_error(outcome, [LeaseLost] if max(sessions, default=session) > session else []):
            return False
        if min(sessions, default=session) < session or {c.rank, *asking} != set(range(c.world_size)):
            self._is(outcome, PARKED)
            return False
        return True

    def _lease_rows(self, session: int, task: TaskSpec, c: cmd.Lease, outcome: Any) -> None:
        enough = {}
        for partition in {row.partition for row in self.rows.values()} if c.partition is None else {c.partition}:
            ready, waits = self.ready(task, partition), self.count_waiting(task, partition)
            if ready and (
                len(ready) >= max(c.at_least, (c.shards or c.world_size) * (c.world_size > 1))
                or (self.closed(partition) and not waits)
            ):
                enough[partition] = ready
        if not enough:
            self._is(outcome, PARKED)
            return
        sampler = "" if task.sampler is None else task.sampler.name
        size = max(len(self.rows[i].group) for ready in enough.values() for i in ready)
        if sampler == "whole_groups" and isinstance(outcome, SchemaError):
            assert c.count - c.at_least < size - 1, "groups would have made it up"
            return
        ids = self._leased(session, task, outcome)
        ready = enough[outcome.partition]
        assert set(ids) <= set(ready)
        if sampler == "whole_groups":
            groups = {self.rows[i].group for i in ids}
            assert set(ids) == {i for i in ready if self.rows[i].group in groups}, "whole, or what is left of it"
            assert len(ids) <= c.count or len(groups) == 1
            assert len(ids) > c.count - size or len(ids) == len(ready)
        else:
            assert len(ids) == min(c.count, len(ready))
        highest = self._highest(ready)[: len(ids)]
        assert sorted((self.rows[i].priority for i in ids), reverse=True) == highest
        if sampler != "length_bucketed":
            assert [self.rows[i].priority for i in ids] == highest
        self._is(outcome.step, -1)

    def closed(self, partition: str) -> bool:
        return self.ended or partition in self.ended_partitions

    def count_waiting(self, task: TaskSpec, partition: str) -> int:
        live = self.live().items()
        return sum(row.partition == partition and self.shown_state(i, task) == "waiting" for i, row in live)

    def _highest(self, ids: list[int]) -> list[int]:
        """Priorities in the order of their turn."""
        return sorted((self.rows[i].priority for i in ids), reverse=True)

    def ready_before(self, ids: list[int], task: TaskSpec, partition: str) -> list[int]:
        """What was ready in a partition before ``ids`` were leased."""
        assert {self.rows[i].partition for i in ids} == {partition}, "a lease is of one partition"
        return sorted({*ids, *self.ready(task, partition)})

    def _lease_step(self, session: int, task: TaskSpec, outcome: Any) -> None:
        full = {
            r.step for r in self.live().values() if r.step not in (None, self.step) and r.state[task.name] == "open"
        }
        if not full:
            self._is(outcome, PARKED)
            return
        rows = {i for i, r in self.live().items() if r.step == min(full) and r.state[task.name] == "open"}
        self.resume(min(full))
        version = self.version_of(min(full))
        ids = self._leased(session, task, outcome)
        assert set(ids) == rows, "a step is leased whole, the oldest first"
        assert outcome.step == min(full)
        assert outcome.version == version

    def _lease_admitted(self, session: int, task: TaskSpec, c: cmd.Lease, outcome: Any) -> None:
        """Rows no step takes come as they are; the others as the rule allows."""
        if c.most and session in self.permits:  # others can begin now what it would leave until it has loaded
            self._is(outcome, PARKED)
            return
        if c.most:
            mine = [t for t, lease in self.leases.items() if (lease.session, lease.task) == (session, task.name)]
            held = sum(len(self.held(token)) for token in mine)
            c = msgspec.structs.replace(c, count=max(c.count, c.most - held))
        rest = [i for i in self.ready(task, c.partition) if not self.trained(self.rows[i])]
        loaded = self.loaded[session]
        if self.train() is None or loaded is None or not rest or self.must_load(session) is not None:
            self._lease_in_window(session, task, c, outcome)
        elif isinstance(outcome, cmd.Leased) and not self.train().takes(outcome.partition):  # type: ignore[union-attr]
            ids = self._leased(session, task, outcome)
            ready = self.ready_before(ids, task, outcome.partition)
            size = len(self.rows[ready[0]].group)
            assert len(ids) <= max(c.count, size)
            self._is(outcome.version, loaded)
            for i in ids:
                self.rows[i].version = loaded
        else:  # it was the turn of one that is trained
            assert isinstance(outcome, cmd.Leased), f"{rest} are ready, not {outcome!r}"
            self._lease_in_window(session, task, c, outcome)

    def _lease_in_window(self, session: int, task: TaskSpec, c: cmd.Lease, outcome: Any) -> None:
        loaded, partition, count = self.loaded[session], c.partition, c.count
        load_first = PARKED if c.most else cmd.LoadFirst(version=self.version)
        if self.train() is None or (loaded is None and not self.published):
            self._is(outcome, PARKED)
            return
        if loaded is None:
            self._is(outcome, load_first)
            return
        if (decided := self.must_load(session)) is not None:
            told = decided != loaded and not c.most
            self._is(outcome, cmd.LoadFirst(version=decided) if told else PARKED)
            return
        ready = [i for i in self.ready(task, partition) if self.trained(self.rows[i])]
        again = [i for i in ready if self.rows[i].deadline is not None]
        if again:  # rows whose producer was lost: begun with a version that must not be newer than this replica's
            begun = {
                self.rows[i].group: {
                    self.rows[m].version or 0 for m in again if self.rows[m].group == self.rows[i].group
                }
                for i in again
            }
            fits = {group for group, by in begun.items() if all(self.follows(loaded, version) for version in by)}
            refused = load_first if self.version > loaded else PARKED
            if not fits or (len(fits) < len(begun) and outcome == refused):
                self._is(outcome, refused)
                return
            ids = self._leased(session, task, outcome)
            group = self.rows[ids[0]].group
            assert group in fits
            assert set(ids) <= {i for i in again if i in group}
            self._is(outcome.version, loaded)
            return
        groups = {self.rows[i].group for i in ready}
        size = len(next(iter(groups))) if groups else 1
        base = self.trains[loaded]
        most = sum(self.may_admit(n * size, base) for n in range(1, len(groups) + 1))
        if not most and groups and self.version > loaded and self.may_admit(size, self.trains[self.version]):
            self._is(outcome, load_first)
            return
        if not most:
            self._is(outcome, PARKED)
            return
        ids = self._leased(session, task, outcome)
        got = {self.rows[i].group for i in ids}
        assert set(ids) == {i for group in got for i in group}
        assert set(ids) <= set(ready)
        assert len(got) == min(most, max(1, count // size)), "about count, at least one group, as the rule allows"
        assert [self.rows[i].priority for i in ids] == self._highest(ready)[: len(ids)]
        self._is(outcome.version, loaded)
        for i in ids:
            self.rows[i].version = loaded
            self.rows[i].deadline = base + self.max_staleness

    def _crew(self, session: int, outcome: cmd.Leased) -> tuple[Crew, list[int]]:
        """Who got which rows of a team's lease, from all that was told."""
        told = self.dealt[outcome.token]
        assert sorted(told) == list(range(outcome.world_size)), "every rank is told"
        shards: dict[int, list[int]] = {}
        for rank, reply in told.items():
            ids = cmd.unpack_ids(reply.ids).tolist()
            assert reply.shard == rank * reply.shards // reply.world_size
            assert shards.setdefault(reply.shard, ids) == ids, "ranks of a shard get the very same rows"
            assert cmd.unpack_ids(reply.groups).tolist() == [self.rows[i].group[0] for i in ids]
            assert (reply.step, reply.version, reply.task) == (outcome.step, outcome.version, outcome.task)
        sizes = [len(shards[s]) for s in range(outcome.shards)]
        assert max(sizes) - min(sizes) <= 1
        asking = self._asking(self.judged)
        members = [session if r == outcome.rank else asking[r][0].session for r in range(outcome.world_size)]
        rows = [cmd.unpack_ids(told[r].ids).tolist() for r in range(outcome.world_size)]
        crew = Crew(self.judged.team, members, rows, outcome.shards < outcome.world_size)
        return crew, [i for shard in range(outcome.shards) for i in shards[shard]]

    def _leased(self, session: int, task: TaskSpec, outcome: Any) -> list[int]:
        assert isinstance(outcome, cmd.Leased), f"{outcome!r} is no lease"
        if outcome.world_size > 1:
            crew, ids = self._crew(session, outcome)
            return self._hold(session, task, outcome, ids, crew)
        ids = cmd.unpack_ids(outcome.ids).tolist()
        assert len(set(ids)) == len(ids) > 0
        assert outcome.token not in self.leases
        assert (outcome.task, outcome.lease_s) == (task.name, task.lease_s)
        assert cmd.unpack_ids(outcome.groups).tolist() == [self.rows[i].group[0] for i in ids]
        return self._hold(session, task, outcome, ids, None)

    def _hold(
        self, session: int, task: TaskSpec, outcome: cmd.Leased, ids: list[int], crew: Crew | None
    ) -> list[int]:
        for i in ids:
            assert self.rows[i].ended is None
            assert self.rows[i].state[task.name] == "open"
            self.rows[i].state[task.name] = "leased"
            self.rows[i].token[task.name] = outcome.token
        assert {self.rows[i].partition for i in ids} == {outcome.partition} or task.batch_rows is not None
        lease = Lease(task.name, session, ids, self.now + task.lease_s, crew, outcome.version, len(self.turns))
        self.leases[outcome.token] = lease
        if task.admits:
            self.claimed.discard(session)
        return ids

    def _lease_of(self, session: int, token: int, rank: int) -> Lease | None:
        lease = self.leases.get(token)
        if lease is not None and lease.crew is not None:
            mine = 0 <= rank < len(lease.crew.members) and lease.crew.members[rank] == session
            return lease if mine and self.open_crew(token) else None
        return lease if lease is not None and lease.session == session and self.held(token) else None

    def _complete(self, session: int, c: cmd.Complete, outcome: Any) -> None:
        lease = self._lease_of(session, c.token, c.rank)
        if lease is None:
            assert isinstance(outcome, LeaseLost), outcome
            return
        if lease.crew is not None and self.tasks[lease.task].batch_rows is not None:
            self._acknowledge(lease, lease.crew, c, outcome)
            return
        part = lease.part(c.rank)
        named = _positions(c.index, len(part))
        dropped = [] if c.filtered is None or named is None else _positions(c.filtered, len(named))
        if self._is_error(outcome, [SchemaError] if named is None or dropped is None else []):
            return
        assert named is not None
        assert dropped is not None
        task, errors = self.tasks[lease.task], []
        ids = [part[at] for at in named]
        mine = [i for i in ids if i in self.held(c.token)]
        if set(task.gives) - set(c.columns) and len(dropped) < len(ids):
            errors.append(SchemaError)
        if any(self.schema.get(name, spec) != spec for name, spec in c.columns.items()):
            errors.append(SchemaError)
        if len(self.named_columns | set(c.columns)) > 64:
            errors.append(SchemaError)
        if task.batch_rows is not None and self.checkpoints and c.columns:
            errors.append(SchemaError)
        if any(name in self.rows[i].columns for i in mine for name in c.columns):
            errors.append(WriteOnceError)
        if self._is_error(outcome, errors):
            return
        assert isinstance(outcome, cmd.Completed), outcome
        finished = lease.crew.finished if lease.crew is not None else set()
        gone = [i for i in ids if i not in mine]
        assert cmd.unpack_ids(outcome.revoked).tolist() == [i for i in gone if i not in finished]
        assert cmd.unpack_ids(outcome.again).tolist() == [i for i in gone if i in finished]
        if lease.crew is not None:
            finished |= set(mine)
            self._saw(lease.crew, c.rank, ids)
        if mine:
            self._write_schema(c.columns)
            self.charge(mine, c.nbytes * len(mine) // len(ids))
        for i in mine:
            self.rows[i].columns |= set(c.columns)
            self._done(i, task)
            if task.admits:
                self.rows[i].newest = lease.newest
        for i in {ids[at] for at in dropped} & set(mine):
            if task.batch_rows is not None:
                self.drop_trained(i)
            else:
                self._end_group(i, "filtered")
        if task.batch_rows is not None:
            self.acknowledged(lease)

    def _saw(self, crew: Crew, rank: int, ids: list[int]) -> None:
        seen = crew.seen.setdefault(rank, set())
        seen |= set(ids)
        if seen == set(crew.rows[rank]):
            crew.done.add(rank)

    def _acknowledge(self, lease: Lease, crew: Crew, c: cmd.Complete, outcome: Any) -> None:
        part = crew.rows[c.rank]
        named = _positions(c.index, len(part))
        dropped = [] if c.filtered is None or named is None else _positions(c.filtered, len(part))
        wrong = named is None or len(named) != len(part) or dropped is None or bool(c.columns)
        if self._is_error(outcome, [SchemaError] if wrong else []):
            return
        self._is(outcome, cmd.Completed(revoked=b""))
        assert named is not None
        assert dropped is not None
        if c.rank in crew.done:
            return
        crew.done.add(c.rank)
        crew.dropped.setdefault(tuple(part), [part[named[at]] for at in dropped])
        if len(crew.done) == len(crew.members):
            for i in lease.ids:
                self._done(i, self.tasks[lease.task])
            for i in {i for ids in crew.dropped.values() for i in ids}:
                self.drop_trained(i)
            self.acknowledged(lease)

    def _giveback(self, session: int, c: cmd.GiveBack, outcome: Any) -> None:
        lease = self._lease_of(session, c.token, c.rank)
        if lease is None or (lease.crew is not None and c.rank in lease.crew.done):
            assert isinstance(outcome, LeaseLost), outcome
            return
        part = lease.part(c.rank)
        named = _positions(c.index, len(part))
        if self._is_error(outcome, [SchemaError] if named is None else []):
            return
        self._is(outcome, cmd.Done())
        assert named is not None
        self._return(c.token, [part[at] for at in named], c.blame)
        if lease.crew is not None and self.tasks[lease.task].batch_rows is None:
            self._saw(lease.crew, c.rank, [part[at] for at in named])

    def _awaitlost(self, session: int, c: cmd.AwaitLost, outcome: Any) -> None:
        untold = self.listening.setdefault(session, set())
        if not untold:
            self._is(outcome, PARKED)
            return
        assert isinstance(outcome, cmd.Lost), outcome
        told = cmd.unpack_ids(outcome.ids).tolist()
        assert told, "nothing was lost"
        assert len(set(told)) == len(told), "each row is told once"
        assert set(told) <= untold
        untold -= set(told)

    def _renew(self, session: int, c: cmd.Renew, outcome: Any) -> None:
        lease = self._lease_of(session, c.token, c.rank)
        if lease is None:
            assert isinstance(outcome, LeaseLost), outcome
            return
        self._is(outcome, cmd.Done())
        lease.expires = self.now + self.tasks[lease.task].lease_s


def _positions(packed: bytes | None, count: int) -> list[int] | None:
    """None: what was sent is no list of different positions."""
    if packed is None:
        return list(range(count))
    if len(packed) % 4:
        return None
    at = list(struct.unpack(f"<{len(packed) // 4}i", packed))
    return at if len(set(at)) == len(at) and all(0 <= a < count for a in at) else None
