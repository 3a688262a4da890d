"""A ledger that is checked from outside after every input: by its replies, events, audit and status.

The model below knows of a row only what commands and replies say of it. It predicts little; it checks what must hold
whatever the ledger chooses: each row ends once, columns are written once, a row is leased to one holder at a time and
completed once by each task, steps are whole and in order, no trained token is too old, versions rise, groups stay
together, and a request waits only while nothing can be given.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, WriteOnceError
from asyncflow_sdk.ledger import TERMINAL, Effects, Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import Audit, StatusReport
from asyncflow_sdk.types.spans import steps_of


@dataclass
class Row:
    group: range
    columns: set[str]
    partition: str
    priority: int
    done: set[str] = field(default_factory=set)  # tasks that completed it
    holder: dict[str, int] = field(default_factory=dict)  # task → token of its newest lease
    version: int | None = None  # loaded by the replica that completed it, when it leased it
    step: int | None = None
    versions: set[int] = field(default_factory=set)  # loaded by each replica that leased it


@dataclass
class Lease:
    task: str
    version: int
    expires: float
    sessions: dict[int, int] = field(default_factory=dict)  # by rank
    ids: dict[int, list[int]] = field(default_factory=dict)  # by rank
    world_size: int = 1
    done: set[int] = field(default_factory=set)  # ranks that acknowledged a step
    over: bool = False
    unsure: bool = False  # something happened that may have ended it


@dataclass
class Client:
    name: str
    loaded: int | None = None
    staged: int | None = None
    dismissed: bool = False
    had: set[int] = field(default_factory=set)  # rows ever leased
    told: set[int] = field(default_factory=set)  # rows it was told that it lost


class CheckedLedger:
    """The interface of ``Ledger``, but that each input returns its effects. ``twin``: a second ledger gets every input but
    those that failed, and must do all the same: so what fails changes nothing. Not where samplers keep a state."""

    def __init__(self, *, twin: bool = True, **options: Any) -> None:
        self.ledger = Ledger(**options)
        self._twin = Ledger(**options) if twin else None
        self.now = 0.0
        self.tasks: dict[str, TaskSpec] = {}
        self.sessions: dict[int, Client] = {}
        self.rows: dict[int, Row] = {}  # all there ever were
        self.live: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}  # by token, all there ever were
        self.open: dict[int, Lease] = {}  # those that may hold rows
        self.waiting: dict[int, tuple[int, Any]] = {}  # ticket → session, command
        self.deadlines: dict[int, float] = {}
        self.steps: dict[int, list[int]] = {}  # rows of each step that was leased
        self.acknowledged: set[int] = set()
        self.unsettled: set[int] = set()  # steps that may be filled again, since payload of one was lost
        self.ended: Counter[str] = Counter()
        self.version = -1
        self.publishers: dict[int, int] = {}  # rank → session
        self.permits: set[int] = set()
        self.limits = cmd.Configure(max_staleness=1, max_swapping=0, quorum=0)
        self._parts: dict[int, dict[int, cmd.VersionPart]] = {}  # version → rank → what it published
        self._made: dict[int, tuple[cmd.VersionPart, ...]] = {}  # version → its bytes
        self._keys: dict[str, cmd.PutDone] = {}
        self._stream_ended: set[str | None] = set()
        self._rewound = False  # a rollback or a resume may end leases of replicas
        self._later: list[Callable[[], None]] = []  # checks for when all effects are known

    # ---- inputs

    def apply(self, session: int, command: Any, now: float, ticket: int) -> Effects:
        self.now = now
        self.ledger.apply(session, command, now, ticket)
        effects = self.ledger.drain()
        own = next((answer for each, answer in effects.answers if each == ticket), None)
        if isinstance(own, AsyncFlowError) and not isinstance(own, DeadlineExceeded):
            self._check_error(session, command, own, effects)
            return effects
        if self._twin is not None:
            self._twin.apply(session, command, now, ticket)
        self._before(session, command)
        self.waiting[ticket] = session, command
        self.deadlines[ticket] = now + getattr(command, "timeout_s", 0.0)
        if own is None:
            assert self.deadlines[ticket] > now, "it waits without a deadline"
        first = [answer for answer in effects.answers if answer[0] == ticket]
        self._observe(effects, first + [answer for answer in effects.answers if answer[0] != ticket])
        return effects

    def tick(self, now: float) -> Effects:
        self.now = now
        for token in [token for token, lease in self.open.items() if lease.expires <= now]:
            self.open.pop(token).over = True
        effects = self._feed(lambda ledger: ledger.tick(now))
        assert all(deadline > now for deadline in self.deadlines.values()), "a request outlived its deadline"
        return effects

    def session_died(self, session: int, now: float, reason: str) -> Effects:
        self.now = now
        self._close(session)
        return self._feed(lambda ledger: ledger.session_died(session, now, reason))

    def forget(self, ticket: int, now: float) -> Effects:
        self.now = now
        self.waiting.pop(ticket, None)
        self.deadlines.pop(ticket, None)
        return self._feed(lambda ledger: ledger.forget(ticket, now))

    def reply_undelivered(self, session: int, version: int, now: float) -> Effects:
        self.now = now
        self.permits.discard(session)
        return self._feed(lambda ledger: ledger.reply_undelivered(session, version, now))

    def lose(self, ids: list[int], now: float, reason: str) -> Effects:
        self.now = now
        groups = {member for i in ids for member in self.rows[i].group}
        waiting = [step for step in self.steps if step not in self.acknowledged]
        first = min((step for step in waiting if groups & set(self.steps[step])), default=1 << 62)
        self.unsettled |= {step for step in waiting if step >= first}
        self._doubt_steps()
        return self._feed(lambda ledger: ledger.lose(np.array(ids, np.int64), now, reason))

    def audit(self) -> Audit:
        return self.ledger.audit()

    def status(self) -> StatusReport:
        return self.ledger.status()

    def next_deadline(self) -> float | None:
        return self.ledger.next_deadline()

    def _feed(self, give: Callable[[Ledger], None]) -> Effects:
        give(self.ledger)
        if self._twin is not None:
            give(self._twin)
        effects = self.ledger.drain()
        self._observe(effects, effects.answers)
        return effects

    # ---- what is checked of every input

    def _check_error(self, session: int, command: Any, error: AsyncFlowError, effects: Effects) -> None:
        assert len(effects.answers) == 1, f"{command} failed, and yet others were answered"
        assert not effects.events
        assert not effects.retired
        if self._twin is not None:
            assert (self.audit(), self.status()) == (self._twin.audit(), self._twin.status()), (
                f"{command} failed, and yet changed something"
            )
        lease = self.leases.get(getattr(command, "token", -1))
        rank = getattr(command, "rank", 0)
        if isinstance(error, LeaseLost) and lease is not None and session in self.sessions:
            known = lease.sessions.get(rank) == session and rank not in lease.done
            mine = [self.live[i] for i in lease.ids.get(rank, ()) if i in self.live]
            held = any(row.holder.get(lease.task) == command.token for row in mine)
            assert not (known and held) or self._is_over(lease), f"{command} lost a lease that it holds: {error}"
        if isinstance(error, WriteOnceError):
            assert lease is not None
            rows = [self.rows[i] for i in lease.ids[rank]]
            assert any(row.columns & set(command.columns) for row in rows), f"nothing is written twice: {error}"
        if isinstance(error, Ended) and isinstance(command, cmd.LeaseRows):
            self._check_end(session, command)

    def _before(self, session: int, command: Any) -> None:
        if isinstance(command, cmd.Publish):
            (rank,) = (rank for rank, holder in self.publishers.items() if holder == session)
            self._parts.setdefault(command.version, {})[rank] = command.part
        # a request of a newer process ends what an older one holds under its rank
        if isinstance(command, cmd.LeaseRows) and command.world_size > 1:
            for lease in self.open.values():
                if lease.task == command.task and lease.sessions.get(command.rank, session) < session:
                    lease.unsure = True

    def _observe(self, effects: Effects, answers: list[tuple[int, Any]]) -> None:
        if self._twin is not None:
            self._check_twin(effects)
        for event in effects.events:
            self._note(event)
        for ticket, reply in answers:
            session, command = self.waiting.pop(ticket)  # answered once, and only if it was asked
            self.deadlines.pop(ticket)
            if isinstance(reply, Ended) and isinstance(command, cmd.LeaseRows):
                self._later.append(lambda session=session, command=command: self._check_end(session, command))
            check = getattr(self, f"_on_{type(reply).__name__.lower()}", None)
            if check is not None:
                check(session, command, reply)
        self._retire(effects)
        while self._later:
            self._later.pop()()

    def _check_twin(self, effects: Effects) -> None:
        assert self._twin is not None
        other = self._twin.drain()
        told = [
            [(t, str(a) if isinstance(a, Exception) else a) for t, a in each.answers] for each in (effects, other)
        ]
        assert told[0] == told[1], "a command that failed has changed what is answered"
        assert effects.events == other.events, "a command that failed has changed what happens"
        assert [ids.tolist() for ids in effects.retired] == [ids.tolist() for ids in other.retired]
        assert self.ledger.next_deadline() == self._twin.next_deadline()

    def _retire(self, effects: Effects) -> None:
        ids = [i for part in effects.retired for i in part.tolist()]
        said = Counter[str]()
        for event in effects.events:
            if isinstance(event, ev.RowsEnded):
                said[event.state] += event.count
        assert said.total() == len(ids) == len(set(ids)), "every row that ends is in one event, and in one alone"
        assert set(ids) <= self.live.keys(), "a row ended twice"
        self.ended += said
        trains = any(task.batch_rows is not None for task in self.tasks.values())
        if not trains and len(said) == 1 and "consumed" not in said:
            groups = {i for row in ids for i in self.rows[row].group}
            assert groups & self.live.keys() == set(ids), "a group ends as a whole"
        if set(said) == {"consumed"} and not self._skips():
            lacks = [t for t in self.tasks.values() if not t.admits for i in ids if self._undone(self.rows[i], t)]
            assert not lacks, "consumed before every task was through with it"
        for i in ids:
            del self.live[i]
        self._end_leases({token for i in ids for token in self.rows[i].holder.values()})

    def _note(self, event: Any) -> None:
        if isinstance(event, ev.Published):
            assert event.version > self.version, "versions rise"
            self.version = event.version
            if event.source in (-1, event.version):
                parts = self._parts[event.version]
                self._made[event.version] = tuple(parts[rank] for rank in sorted(self.publishers))
            else:
                self._made[event.version] = self._made[event.source]

    # ---- replies

    def _on_sessionopened(self, _: int, command: cmd.OpenSession, reply: cmd.SessionOpened) -> None:
        assert reply.session not in self.sessions
        self.sessions[reply.session] = Client(command.name)

    def _on_done(self, session: int, command: Any, _: cmd.Done) -> None:
        client = self.sessions[session]
        if isinstance(command, cmd.Configure):
            self.limits = msgspec.structs.replace(
                self.limits, **{n: v for n in command.__struct_fields__ if (v := getattr(command, n)) is not None}
            )
        elif isinstance(command, cmd.Declare):
            self.tasks.setdefault(command.task.name, command.task)
        elif isinstance(command, cmd.End):
            self._stream_ended.add(command.partition)
        elif isinstance(command, cmd.Renew):
            lease = self.leases[command.token]
            assert lease.sessions[command.rank] == session
            assert not lease.over, "a lease that had ended is renewed"
            lease.expires = self.now + self.tasks[lease.task].lease_s
        elif isinstance(command, cmd.GiveBack):
            self._given_back(session, command)
        elif isinstance(command, cmd.ReportLoaded):
            client.loaded = command.version
            self.permits.discard(session)
            for lease in self.open.values() if self._rewound else ():
                lease.unsure |= session in lease.sessions.values()
        elif isinstance(command, cmd.ReportStaged):
            client.staged = command.version
        elif isinstance(command, cmd.ReportLoadFailed | cmd.Retire):
            self.permits.discard(session)
            client.staged = None
            client.loaded = None if isinstance(command, cmd.Retire) else client.loaded
        elif isinstance(command, cmd.ClosePublisher):
            self.publishers = {rank: holder for rank, holder in self.publishers.items() if holder != session}
        elif isinstance(command, cmd.CloseSession):
            self._close(session)

    def _on_putdone(self, _: int, command: cmd.AddRows, reply: cmd.PutDone) -> None:
        known = self._keys.get(command.key)
        if reply.again:
            assert known is not None
            assert (reply.first, reply.count) == (known.first, known.count)
            return
        groups = len(reply.groups) // 8 or command.groups
        assert reply.first == len(self.rows), "ids are given out once, in order"
        assert reply.count == groups * command.group_size
        for start in range(reply.first, reply.first + reply.count, command.group_size):
            group = range(start, start + command.group_size)
            for i in group:
                self.rows[i] = self.live[i] = Row(group, set(command.columns), command.partition, command.priority)
        if command.key and known is None:
            self._keys[command.key] = reply
        if self.limits.capacity_rows is not None and not self.limits.checkpoints:
            most = self.limits.capacity_rows
            self._later.append(lambda: self._assert(len(self.live) <= most, "more rows than the queue's capacity"))

    def _assert(self, right: bool, what: str) -> None:
        assert right, what

    def _on_leased(self, session: int, command: cmd.LeaseRows, reply: cmd.Leased) -> None:
        task, ids = self.tasks[reply.task], unpack_ids(reply.ids).tolist()
        lease = self.leases.get(reply.token)
        if lease is None:
            assert reply.token > max(self.leases, default=0), "fencing tokens rise"
            lease = Lease(task.name, reply.version, self.now + task.lease_s, world_size=reply.world_size)
            self.leases[reply.token] = self.open[reply.token] = lease
        assert reply.rank == command.rank
        assert reply.rank not in lease.ids, "a token is given once"
        lease.sessions[reply.rank], lease.ids[reply.rank] = session, ids
        self.sessions[session].had |= set(ids)
        assert len(set(ids)) == len(ids)
        assert ids or reply.world_size > 1
        assert unpack_ids(reply.groups).tolist() == [self.rows[i].group.start for i in ids]
        for i in ids:
            row = self.rows[i]
            assert i in self.live, f"row {i} had ended"
            assert task.takes(row.partition)
            assert set(task.needs) <= row.columns, f"row {i} lacks a column that {task.name} needs"
            assert task.name not in row.done, f"row {i} comes again"
            holder = row.holder.get(task.name)
            assert holder in (None, reply.token) or self._is_over(self.leases[holder]), f"row {i} is leased already"
            row.holder[task.name] = reply.token
        if task.batch_rows is not None:
            if len(lease.ids) == reply.world_size:
                shards = [lease.ids[rank] for rank in range(0, reply.world_size, reply.world_size // reply.shards)]
                self._leased_step(task, reply, [i for shard in shards for i in shard])
            return
        assert {self.rows[i].partition for i in ids} <= {reply.partition}
        if task.admits:
            assert reply.version == self.sessions[session].loaded
            got = set(ids)
            for i in ids:
                group = self.rows[i].group
                assert got >= set(group) or any(self.rows[m].versions for m in group), "a group is begun as a whole"
            for i in ids:
                self.rows[i].versions.add(reply.version)
        elif reply.world_size == 1 and not self._groups_whole(task):
            assert len(ids) <= command.count
            assert len(ids) >= command.at_least or self._has_ended(reply.partition)
            left = [self.live[i].priority for i in self.ready(task, reply.partition)]
            assert max(left, default=-(1 << 40)) <= min(self.rows[i].priority for i in ids), "higher priorities first"

    def _leased_step(self, task: TaskSpec, reply: cmd.Leased, ids: list[int]) -> None:
        step, rows = reply.step, [self.rows[i] for i in ids]
        assert len(set(ids)) == len(ids) == task.batch_rows, "a step is whole"
        if step in self.unsettled:
            assert step not in self.acknowledged, "a step is trained once"
            for i in self.steps[step]:  # those that are not in it any more may be in another
                self.rows[i].step = None
        elif step in self.steps:
            assert sorted(self.steps[step]) == sorted(ids), "a step comes again with the same rows"
            assert step not in self.acknowledged, "a step is trained once"
        else:
            assert step == max(self.steps, default=-1) + 1, "steps come in order"
            assert {i for row in rows for i in row.group} == set(ids), "of whole groups"
        assert all(row.step in {None, step, *self.unsettled} for row in rows), "a row is in one step"
        for earlier in range(step):
            held = any(row.holder.get(task.name) for i in self.steps.get(earlier, ()) if (row := self.live.get(i)))
            settled = earlier in self.steps and earlier not in self.unsettled
            assert earlier in self.acknowledged or not settled or held, "the oldest step comes first"
        self.steps[step] = ids
        self.unsettled.discard(step)
        for row in rows:
            row.step = step
            if row.version is not None and (self.limits.staleness is None or self.limits.staleness.name != "count"):
                made = steps_of(np.array(sorted(row.versions)), reply.version_step_offsets).max()
                assert step - made <= (self.limits.max_staleness or 0), "a token is too old"

    def _on_completed(self, session: int, command: cmd.Complete, reply: cmd.Completed) -> None:
        lease = self.leases[command.token]
        assert lease.sessions[command.rank] == session, "completed by another session than has the lease"
        assert not lease.over, "a lease that had ended is completed"
        assert lease.expires > self.now
        task, part = self.tasks[lease.task], lease.ids[command.rank]
        named = part if command.index is None else [part[at] for at in np.frombuffer(command.index, "<i4")]
        revoked, again = set(unpack_ids(reply.revoked).tolist()), set(unpack_ids(reply.again).tolist())
        assert revoked | again <= set(named)
        assert all(task.name in self.rows[i].done for i in again)
        if task.batch_rows is not None and lease.world_size > 1:
            lease.done.add(command.rank)
            if not all(rank in lease.done or not ids for rank, ids in lease.ids.items()):
                return
            named = [i for ids in lease.ids.values() for i in ids]
        for i in set(named) - again:
            row = self.rows[i]
            mine = i in self.live and row.holder.get(task.name) == command.token
            if i in revoked:
                assert not mine, f"row {i} is revoked, and leased"
                continue
            assert mine or lease.world_size > 1, f"row {i} is not of this lease any more"
            assert not row.columns & set(command.columns), f"a column of row {i} is written twice"
            assert lease.world_size > 1 or task.name not in row.done, f"row {i} is completed twice"
            row.columns |= set(command.columns)
            row.done.add(task.name)
            row.holder.pop(task.name, None)
            if task.admits:
                row.version = lease.version
            if row.step is not None and task.batch_rows is not None:
                self.acknowledged.add(row.step)
        self._end_leases({command.token})
        trains = any(each.batch_rows is not None for each in self.tasks.values())
        if command.filtered is not None and not trains:
            dropped = {named[at] for at in np.frombuffer(command.filtered, "<i4")} - revoked - again
            groups = {m for i in dropped for m in self.rows[i].group}
            self._later.append(lambda: self._assert(not groups & self.live.keys(), "a group is filtered as a whole"))

    def _given_back(self, session: int, command: cmd.GiveBack) -> None:
        lease = self.leases[command.token]
        assert lease.sessions[command.rank] == session
        assert not lease.over, "a lease that had ended is given back"
        part = lease.ids[command.rank]
        named = part if command.index is None else [part[at] for at in np.frombuffer(command.index, "<i4")]
        if self.tasks[lease.task].batch_rows is not None:  # a step goes back as a whole
            named = [i for ids in lease.ids.values() for i in ids]
        for i in named:
            if self.rows[i].holder.get(lease.task) == command.token:
                del self.rows[i].holder[lease.task]
        self._end_leases({command.token})

    def _on_loadfirst(self, session: int, _: cmd.LeaseRows, reply: cmd.LoadFirst) -> None:
        assert reply.version != self.sessions[session].loaded
        assert reply.version <= self.version

    def _on_lost(self, session: int, _: cmd.AwaitLost, reply: cmd.Lost) -> None:
        ids, client = set(unpack_ids(reply.ids).tolist()), self.sessions[session]
        assert ids
        assert ids <= client.had - client.told, "a row is told once, to who had it"
        client.told |= ids
        self._later.append(lambda: self._assert(not ids & self.live.keys(), "a row that lives is not lost"))

    def _on_rowswanted(self, _: int, command: cmd.AwaitRowsWanted, reply: cmd.RowsWanted) -> None:
        assert reply.count > 0

    def _on_cancelled(self, _: int, command: cmd.Cancel, reply: cmd.Cancelled) -> None:
        before = self.ended.total()
        self._later.append(
            lambda: self._assert(self.ended.total() - before >= reply.count, "as many ended as it says")
        )

    def _on_dismissed(self, session: int, command: cmd.Dismiss, reply: cmd.Dismissed) -> None:
        meant = (
            [n for n, client in self.sessions.items() if client.name == command.name] if command.name else [session]
        )
        if command.session:
            meant = [command.session] if command.session in self.sessions else []
        assert reply.count == len(meant)
        for each in meant:
            self.sessions[each].dismissed = True
            if command.ended and each != session:
                self._close(each)

    def _on_publisher(self, session: int, command: cmd.OpenPublisher, reply: cmd.Publisher) -> None:
        assert command.rank not in self.publishers, "there is one publisher of a rank"
        assert reply.version == self.version
        self.publishers[command.rank] = session

    def _on_publishreply(self, session: int, command: Any, reply: cmd.PublishReply) -> None:
        assert session in self.publishers.values()
        assert set(reply.keep) <= {*self._made, *self._parts, command.version}

    def _on_version(self, _: int, command: cmd.AwaitVersion, reply: cmd.Version) -> None:
        assert command.after < reply.version <= self.version
        assert reply.version == self.version or self.limits.quorum
        assert reply.parts == self._made[reply.version] == self._made[reply.source], "the bytes it was published with"

    def _on_permitted(self, session: int, command: cmd.Swap, reply: cmd.Permitted) -> None:
        assert self.sessions[session].staged == reply.version == command.version
        self.permits.add(session)
        assert not self.limits.max_swapping or len(self.permits) <= self.limits.max_swapping

    def _on_rollbackdone(self, _: int, command: cmd.Rollback, reply: cmd.RollbackDone) -> None:
        assert reply.version == self.version
        self._rewound = True

    def _on_resumed(self, _: int, command: cmd.Resume, reply: cmd.Resumed) -> None:
        assert reply.step == command.step
        self._rewound = True
        self._reopen(command.step)

    def _on_allgathered(self, _: int, command: cmd.AllGather, reply: cmd.AllGathered) -> None:
        assert len(reply.payloads) == command.world_size
        assert reply.payloads[command.rank] == command.payload

    # ---- what is known of rows and leases

    def _close(self, session: int) -> None:
        self.sessions.pop(session, None)
        self.permits.discard(session)
        self.publishers = {rank: holder for rank, holder in self.publishers.items() if holder != session}
        for ticket in [ticket for ticket, (asked, _) in self.waiting.items() if asked == session]:
            del self.waiting[ticket], self.deadlines[ticket]
        for token, lease in list(self.open.items()):
            if session in lease.sessions.values():
                lease.unsure = True
                if lease.world_size == 1:
                    self.open.pop(token).over = True

    def _end_leases(self, tokens: set[int]) -> None:
        """Of these leases, those are over whose rows are all through."""
        for token in tokens & self.open.keys():
            lease = self.open[token]
            if lease.world_size == 1 and not any(
                i in self.live and self.rows[i].holder.get(lease.task) == token for i in lease.ids[0]
            ):
                self.open.pop(token).over = True

    def _reopen(self, step: int) -> None:
        """Steps from this one on are to be leased again, with the rows that they had."""
        train = next((task for task in self.tasks.values() if task.batch_rows is not None), None)
        self.acknowledged = {each for each in self.acknowledged if each < step}
        for each in self.steps if train is not None else ():
            for i in self.steps[each] if each >= step else ():
                self.rows[i].done.discard(train.name)
                self.rows[i].holder.pop(train.name, None)
        self._doubt_steps()

    def _doubt_steps(self) -> None:
        """Leases of steps may have ended."""
        for lease in self.open.values():
            lease.unsure |= self.tasks[lease.task].batch_rows is not None

    def _is_over(self, lease: Lease) -> bool:
        return lease.over or lease.unsure or lease.expires <= self.now

    def _undone(self, row: Row, task: TaskSpec) -> bool:
        return task.takes(row.partition) and task.name not in row.done

    def _is_held(self, row: Row, task: TaskSpec) -> bool:
        token = row.holder.get(task.name)
        if token is None:
            return False
        lease = self.leases[token]
        return lease.unsure or not self._is_over(lease)

    def _skips(self) -> bool:
        """True if a task gave up rows that go on without it."""
        return any(reason.startswith("skipped") for reason in self.audit().reasons)

    def _groups_whole(self, task: TaskSpec) -> bool:
        return task.sampler is not None and task.sampler.name == "whole_groups"

    def _has_ended(self, partition: str) -> bool:
        return bool(self._stream_ended & {None, partition}) or self.status().over

    def ready(self, task: TaskSpec, partition: str | None = None) -> list[int]:
        """Rows that a task without steps could be given; none where a task gave some up, and which is not known."""
        if self._skips():
            return []
        return [
            i
            for i, row in self.live.items()
            if self._undone(row, task)
            and not self._is_held(row, task)
            and set(task.needs) <= row.columns
            and partition in (None, row.partition)
        ]

    def _check_end(self, session: int, command: cmd.LeaseRows) -> None:
        task = self.tasks[command.task]
        if self.sessions[session].dismissed or task.admits or self._skips():
            return
        rest = [row for row in self.live.values() if command.partition in (None, row.partition)]
        assert not any(self._undone(row, task) for row in rest), "the end, and rows are left"

    # ---- what is checked now and then

    def check(self) -> None:
        """Audit and status say what is known of the rows, and no request waits that could be answered."""
        audit, status = self.audit(), self.status()
        assert audit.balanced
        assert (audit.put, audit.live) == (len(self.rows), len(self.live))
        assert audit.terminal == {state: self.ended[state] for state in TERMINAL}
        assert (status.live, status.version) == (len(self.live), self.version)
        assert (status.session_count, status.parked_count) == (len(self.sessions), len(self.waiting))
        sure = not any(lease.unsure for lease in self.open.values())
        for task in self.tasks.values():
            rows = [row for row in self.live.values() if task.takes(row.partition)]
            assert sum(status.rows[task.name].values()) == len(rows)
            held = [
                row for row in rows if (token := row.holder.get(task.name)) and not self._is_over(self.leases[token])
            ]
            assert not sure or status.rows[task.name]["leased"] == len(held)
        ends = [lease.expires for lease in self.open.values() if lease.world_size == 1 and not lease.unsure]
        due = min([*ends, *self.deadlines.values()], default=None)
        assert due is None or (self.next_deadline() or 0.0) <= due, "somebody would not be woken"
        self._check_no_lost_wakeup()

    def _check_no_lost_wakeup(self) -> None:
        """Asked anew in a copy, no request that waits is answered."""
        twin = copy.deepcopy(self.ledger) if self.waiting else None
        for ticket, (session, command) in self.waiting.items():
            assert twin is not None
            twin.forget(ticket, self.now)
            answered = {t for t, _ in twin.drain().answers}
            if answered:  # those that it kept waiting go on, and may be asked no more
                twin = copy.deepcopy(self.ledger)
                continue
            twin.apply(session, msgspec.structs.replace(command, timeout_s=0.0), self.now, -1)
            (reply,) = [answer for t, answer in twin.drain().answers if t == -1]
            assert isinstance(reply, DeadlineExceeded), f"{command} waits, but could have {reply!r}"
            task = self.tasks.get(getattr(command, "task", ""))
            if task is None or task.admits or task.batch_rows is not None or self._groups_whole(task):
                continue
            if (
                command.world_size == 1
                and not command.at_least
                and not any(each.unsure for each in self.open.values())
            ):
                assert not self.ready(task, command.partition), f"{command} waits, and rows are ready"
