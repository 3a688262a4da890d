"""A ledger that is checked from outside after every input: by its replies, events, audit and status.

The model below knows of a row only what commands and replies say of it. It predicts little; it checks what must hold
whatever the ledger chooses: each row ends once, columns are written once, a row is leased to one holder at a time and
completed once by each task, steps are whole and in order, no trained token is too old, versions rise, groups stay
together, and a request waits only while nothing can be given. Like a server's index, it knows the home of each column of
each row; it answers lost homes with the columns that were there, and checks which rows fail and which are made again.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, WriteOnceError
from asyncflow_sdk.ledger import TERMINAL, Effects, Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.state.homes import HomeLoss, LostColumns, Replacement
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.spans import steps_of

Place = tuple[int, int]
"""A home and its epoch."""
SERVER: Place = (0, 0)
LOST: Place = (-1, 0)
"""Of columns in a lost block of a live home."""


@dataclass
class Row:
    group: range
    columns: set[str]
    partition: str
    priority: int
    done: set[str] = field(default_factory=set)  # tasks that completed it
    holder: dict[str, int] = field(default_factory=dict)  # task → token of the lease that has it
    version: int | None = None  # loaded by the replica that completed it, when it leased it
    versions: set[int] = field(default_factory=set)  # loaded by each replica that leased it
    put: frozenset[str] = frozenset()  # columns of its put
    places: dict[str, Place] = field(default_factory=dict)  # of each column
    parent: int | None = None
    child: int | None = None


@dataclass
class Home:
    name: str
    identity: str
    epoch: int
    unit: int | None = None  # a session
    absent_since: float = 0.0


@dataclass
class Lease:
    task: str
    version: int
    expires: float
    world_size: int
    step: int
    sessions: dict[int, int] = field(default_factory=dict)  # by rank
    ids: dict[int, list[int]] = field(default_factory=dict)  # by rank
    done: set[int] = field(default_factory=set)  # ranks that acknowledged a step
    unsure: bool = False  # something happened that may have ended it
    parts: dict[int, list[list[int]]] = field(default_factory=dict)  # rank → rows of each part; none of a whole lease
    shards: int = 1
    group: str = ""
    last: bool = False  # it has all parts of its step

    def rows(self) -> list[int]:
        return [i for rank in sorted(self.ids) for i in self.ids[rank]]

    def of_shards(self, ids: dict[int, Any]) -> list[Any]:
        """Of each shard, what its first rank has."""
        return [ids[rank] for rank in sorted(ids)[:: self.world_size // self.shards]]

    def step_rows(self) -> list[int]:
        return [i for ids in self.of_shards(self.ids) for i in ids]


@dataclass
class Client:
    name: str
    loaded: int | None = None
    dismissed: bool = False
    swapping: bool = False
    in_vain: bool = False  # it asked for prompts, and got none with its version


class Request(NamedTuple):
    session: int
    command: Any
    deadline: float
    place: Place = SERVER  # of its payload


class CheckedLedger:
    """A ledger with its clock. ``twin``: a second ledger gets every input except commands that failed, and must do the
    same: a command that fails changes nothing. Not for samplers that keep a state. ``options``: of the ledger."""

    def __init__(self, *, twin: bool = True, **options: Any) -> None:
        self.ledgers = [Ledger(**options) for _ in range(1 + twin)]
        self.audit, self.status, self.next_deadline = (
            getattr(self.ledgers[0], name) for name in ("audit", "status", "next_deadline")
        )
        self.now, self.tickets = 0.0, 0
        self.answers: dict[int, Any] = {}  # by ticket
        self.events: list[Any] = []
        self.ended: list[int] = []  # rows
        self.tasks: dict[str, TaskSpec] = {}
        self.sessions: dict[int, Client] = {}
        self.rows: dict[int, Row] = {}  # all there ever were
        self.live: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}  # by token, all there ever were
        self.open: dict[int, Lease] = {}  # those that may hold rows
        self.waiting: dict[int, Request] = {}  # by ticket
        self.steps: dict[int, list[int]] = {}  # rows of each step that was leased, and not dissolved since
        self.acknowledged: set[int] = set()
        self.overtaken: set[int] = set()  # steps that ended, as they lost rows after a later one was acknowledged
        self.begun: set[int] = set()  # steps that were leased in parts
        self.parts: dict[int, list[list[list[int]]]] = {}  # of each step, the rows of each shard of each part
        self.version = -1
        self.homes: dict[int, Home] = {}
        self.places: set[Place] = {SERVER}  # all there ever were
        self.lost_places = {LOST}
        self._limits = cmd.Configure(max_staleness=1, max_swapping=0, quorum=0, home_silence_s=60.0)
        self._terminal: Counter[str] = Counter()
        self._parts: dict[int, set[cmd.VersionPart]] = {}  # version → what was published of it
        self._bytes: dict[int, tuple[cmd.VersionPart, ...]] = {}  # of each version that was fetched
        self._ended_partitions: set[str | None] = set()
        self._lost: set[int] = set()  # rows without payload
        self._rewound = False  # a rollback or a resume may end leases of replicas
        self._blurred = False  # payload was lost while a step was in parts: which steps were dissolved is not known

    # ---- inputs

    def trace(self, share: float) -> None:
        for ledger in self.ledgers:
            ledger.state.traces.share = share

    def ask(self, session: int, command: Any) -> int:
        """Send a command. Return its ticket; ``answers`` has the reply or the error, unless the request waits."""
        self.tickets += 1
        first, *twin = self.ledgers
        first.apply(session, command, self.now, self.tickets)
        effects = first.drain()
        own = dict(effects.answers).get(self.tickets)
        if isinstance(own, AsyncFlowError) and not isinstance(own, DeadlineExceeded):
            self._check_error(session, command, own, effects)
            self.answers[self.tickets] = own
            return self.tickets
        for ledger in twin:
            ledger.apply(session, command, self.now, self.tickets)
        if isinstance(command, cmd.Publish):
            self._parts.setdefault(command.version, set()).add(command.part)
        if isinstance(command, cmd.LeaseRows) and command.world_size > 1:
            for lease in self.open.values():  # a newer process of a rank ends the lease of an older one
                lease.unsure |= lease.task == command.task and lease.sessions.get(command.rank, session) < session
        if isinstance(command, cmd.LeaseRows) and command.most and session in self.sessions:
            self.sessions[session].in_vain = True  # unless it is given some
        deadline = self.now + getattr(command, "timeout_s", 0.0)
        self.waiting[self.tickets] = Request(session, command, deadline, self.place_of_write(command))
        assert own is not None or self.waiting[self.tickets].deadline > self.now, "it waits without a deadline"
        if own is None and isinstance(command, cmd.LeaseRows) and command.token in self.open:
            self._renew(command.token)
        self._observe(effects, first=self.tickets)
        return self.tickets

    def send(self, session: int, command: Any) -> Any:
        """The reply, or the error; None if the request waits."""
        return self.answers.pop(self.ask(session, command), None)

    def join(self, name: str) -> int:
        return int(self.send(0, cmd.OpenSession(name=name)).session)

    def at(self, now: float) -> None:
        """Let time pass."""
        self.now = now
        for token in [token for token, lease in self.open.items() if lease.expires <= now]:
            if self._waits(token):
                self._renew(token)
            else:
                self._close_lease(token)
        self._feed("tick")
        assert all(request.deadline > now for request in self.waiting.values()), "a request outlived its deadline"
        assert all(due > now for due in self._absent_until()), "a home was silent for too long, and is not lost"

    def die(self, session: int) -> None:
        self._close(session)
        self._feed("session_died", session, reason="killed")

    def forget(self, ticket: int) -> None:
        self.waiting.pop(ticket, None)
        self._feed("forget", ticket)

    def reply_undelivered(self, session: int, version: int) -> None:
        self._feed("reply_undelivered", session, version)

    def lose(self, *ids: int, reason: str = "payload lost") -> None:
        self._lost.update(ids)
        self._dissolve(ids)
        self._feed("lose", np.array(ids, np.int64), reason=reason)

    def place_of_write(self, command: Any) -> Place:
        """Where the payload of the next command is: each live home in turn, and most puts are in the server's."""
        live = sorted(self.places - self.lost_places)
        away = not isinstance(command, cmd.AddRows) or self.tickets % 4 == 0
        return live[self.tickets % len(live)] if away else SERVER

    def is_live(self, place: Place) -> bool:
        return place in self.places - self.lost_places

    def _gives_up(self, home: Home) -> float:
        return home.absent_since + (self._limits.home_silence_s or 0.0)

    def _absent_until(self) -> list[float]:
        """When live homes without a unit are given up."""
        live = [home for number, home in self.homes.items() if self.is_live((number, home.epoch))]
        return [self._gives_up(home) for home in live if home.unit is None]

    def _feed(self, method: str, *arguments: Any, **more: Any) -> None:
        for ledger in self.ledgers:
            getattr(ledger, method)(*arguments, now=self.now, **more)
        self._observe(self.ledgers[0].drain())

    # ---- what is checked of every input

    def _check_error(self, session: int, command: Any, error: AsyncFlowError, effects: Effects) -> None:
        assert len(effects.answers) == 1, f"{command} failed, and yet others were answered"
        assert _plain(effects)[1:] == ([], [], [], []), f"{command} failed, and yet something happened"
        if isinstance(command, cmd.EvictHome):
            place = (command.home, command.epoch)
            assert place == SERVER or not self.is_live(place), "a live home is not evicted"
        states = [(ledger.audit(), ledger.status()) for ledger in self.ledgers]
        assert states[0] == states[-1], f"{command} failed, and yet changed something"
        lease, rank = self.leases.get(getattr(command, "token", -1)), getattr(command, "rank", 0)
        if isinstance(error, LeaseLost) and session in self.sessions and not getattr(lease, "unsure", True):
            known = lease.sessions.get(rank) == session and rank not in lease.done
            held = any(self._holds(command.token, i) for i in lease.ids.get(rank, ()))
            assert not (known and held), f"{command} lost a lease that it holds: {error}"
        if isinstance(error, WriteOnceError):
            rows = [self.rows[i] for i in lease.ids[rank]]
            assert any(row.columns & set(command.columns) for row in rows), f"nothing is written twice: {error}"
        if isinstance(error, Ended) and isinstance(command, cmd.LeaseRows):
            self._check_end(session, command)

    def _observe(self, effects: Effects, first: int = 0) -> None:
        """``first``: the ticket whose answer comes before the others."""
        for twin in self.ledgers[1:]:
            assert _plain(effects) == _plain(twin.drain()), "a command that failed has changed what happens"
            assert self.next_deadline() == twin.next_deadline()
        for version in [event.version for event in effects.events if isinstance(event, ev.Published)]:
            assert version > self.version, "versions rise"
            self.version = version
        ids = [i for part in effects.retired for i in part.tolist()]
        self._on_remade(effects.remade, set(ids))
        for ticket, reply in effects.answers:  # rows that are put may end at once
            if isinstance(reply, cmd.PutDone) and not reply.again:
                self._on_put(self.waiting[ticket], reply)
        assert set(ids) <= self.live.keys(), "a row ended twice"
        for i in ids:
            del self.live[i]
        self._void_steps(ids, effects)
        for ticket, reply in sorted(effects.answers, key=lambda answer: answer[0] != first):
            request = self.waiting.pop(ticket)  # answered once, and only if it was asked
            self._on_reply(request, reply, ids)
        again = [i for part in effects.remade for i in part.parents.tolist()]
        assert not any(self._trained(self.rows[i]) for i in again), "a row that was trained is made again"
        self._retire(ids, effects)
        self.answers |= effects.answers
        self.events += effects.events
        self.ended += ids
        if effects.homes_lost:
            self._lose_homes(effects.homes_lost)

    def _void_steps(self, ids: list[int], effects: Effects) -> None:
        """A step in parts is void without a delivered row, unless it ends because the step is acknowledged."""
        completed = [ticket for ticket, reply in effects.answers if isinstance(reply, cmd.Completed)]
        done = {self.waiting[ticket].command.token for ticket in completed}
        tokens = {token for i in ids for token in self.rows[i].holder.values()} - done
        for token in tokens & self.open.keys():
            if self.leases[token].parts:
                self._close_lease(token)

    def _retire(self, ids: list[int], effects: Effects) -> None:
        states = _ended(effects.events)
        assert states.total() == len(ids) == len(set(ids)), "every row that ends is in one event, and in one alone"
        self._terminal += states
        if not self._trains() and len(states) == 1 and "consumed" not in states:
            assert not self._groups(ids) & self.live.keys(), "a group ends as a whole"
        if set(states) == {"consumed"} and not self._skips():
            lacks = [t for t in self.tasks.values() if not t.admits for i in ids if self._undone(self.rows[i], t)]
            assert not lacks, "consumed before every task was through with it"
        tokens = {token for i in ids for token in self.rows[i].holder.values()}
        for i in ids:
            self.rows[i].holder.clear()
        self._end_leases(tokens)

    # ---- replies

    def _on_reply(self, request: Request, reply: Any, ended: list[int]) -> None:
        """``ended``: rows that ended by the same input."""
        session, command, _, place = request
        client = self.sessions.get(session)
        match command, reply:
            case cmd.OpenSession(), cmd.SessionOpened():
                assert reply.session not in self.sessions
                self.sessions[reply.session] = Client(command.name)
            case cmd.CloseSession(), cmd.Done():
                self._close(session)
            case cmd.Dismiss(), cmd.Dismissed():
                named = [n for n, other in self.sessions.items() if other.name == command.name]
                meant = named if command.name else [session]
                assert reply.count == len(meant)
                for other in meant:
                    self.sessions[other].dismissed = True
                    if command.ended and other != session:
                        self._close(other)
            case cmd.Configure(), cmd.Done():
                given = {name: getattr(command, name) for name in command.__struct_fields__}
                given = {name: value for name, value in given.items() if value is not None}
                self._limits = msgspec.structs.replace(self._limits, **given)
            case cmd.Declare(), cmd.Done():
                if self.tasks.setdefault(command.task.name, command.task) is command.task:
                    self._miss({i: self.rows[i] for i in (*self.live, *ended)})
            case cmd.End(), cmd.Done():
                self._ended_partitions.add(command.partition)
            case cmd.AddRows(), cmd.PutDone(again=False):
                most = None if self._limits.checkpoints else self._limits.capacity_rows
                assert most is None or len(self.live) <= most, "more rows than the queue's capacity"
            case cmd.Cancel(), cmd.Cancelled():
                assert len(ended) >= reply.count, "as many ended as it says"
            case cmd.AwaitLost(), cmd.Lost():
                assert not set(unpack_ids(reply.ids).tolist()) & self.live.keys(), "a row that lives is not lost"
            case cmd.LeaseRows(), cmd.Leased():
                self._on_leased(session, command, reply)
            case cmd.LeaseRows(), cmd.LoadFirst():
                assert client.loaded != reply.version <= self.version
                client.in_vain = True
            case cmd.LeaseRows(), Ended():
                self._check_end(session, command)
            case cmd.Renew(), cmd.Done():
                self._own_lease(session, command)
                self._renew(command.token)
            case cmd.GiveBack(), cmd.Done():
                lease = self._own_lease(session, command)
                whole = self.tasks[lease.task].batch_rows is not None  # a step goes back as a whole
                self._release(command.token, lease.rows() if whole else self._named(command))
                self._end_leases({command.token})
            case cmd.Complete(), cmd.Completed():
                self._on_completed(session, command, reply, place)
            case cmd.OpenHome(), cmd.HomeOpened():
                self._on_home_opened(session, command, reply)
            case cmd.AwaitVersion(), cmd.Version():
                assert command.after < reply.version <= self.version
                assert reply.version == self.version or self._limits.quorum
                assert set(reply.parts) <= self._parts[reply.source], "bytes that were published"
                assert reply.parts == self._bytes.setdefault(reply.source, reply.parts), "always the same bytes"
            case cmd.Swap(), cmd.Permitted():
                loading = sum(each.weights.startswith("loading") for each in self.status().sessions)
                within = not self._limits.max_swapping or loading <= self._limits.max_swapping
                assert within or client.swapping or client.in_vain, "only those without prompts may be more"
                client.swapping = True
            case cmd.ReportLoadFailed(), cmd.Done():
                client.swapping = False
            case cmd.ReportLoaded(), cmd.Done():
                client.loaded, client.swapping, client.in_vain = command.version, False, False
                for lease in self.open.values() if self._rewound else ():
                    lease.unsure |= session in lease.sessions.values()
            case cmd.Retire(), cmd.Done():
                client.loaded, client.swapping = None, False
            case cmd.Rollback(), cmd.RollbackDone():
                assert reply.version == self.version
                self._rewound = True
            case cmd.Resume(), cmd.Resumed():
                assert reply.step == command.step
                self._rewound = True
                self._reopen(command.step, self.live.keys() | set(ended))

    def _on_put(self, request: Request, reply: cmd.PutDone) -> None:
        command, place = request.command, request.place
        assert place not in self.lost_places, "a put without payload"
        groups = len(reply.groups) // 8 or command.groups
        assert reply.first == len(self.rows), "ids are given out once, in order"
        assert reply.count == groups * command.group_size
        for i in range(reply.first, reply.first + reply.count):
            start = i - (i - reply.first) % command.group_size
            group = range(start, start + command.group_size)
            self.rows[i] = self.live[i] = Row(
                group, set(command.columns), command.partition, command.priority, put=frozenset(command.columns),
                places=dict.fromkeys(command.columns, place),
            )  # fmt: skip

    def _on_leased(self, session: int, command: cmd.LeaseRows, reply: cmd.Leased) -> None:
        task, ids = self.tasks[reply.task], unpack_ids(reply.ids).tolist()
        if task.admits:
            self.sessions[session].in_vain = False
        lease = self.leases.get(reply.token)
        if lease is None:
            assert reply.token > max(self.leases, default=0), "fencing tokens rise"
            assert not getattr(command, "token", 0), "a part of another lease"
            lease = Lease(task.name, reply.version, self.now + task.lease_s, reply.world_size, reply.step)
            lease.shards, lease.group = reply.shards, command.group
            self.leases[reply.token] = self.open[reply.token] = lease
        assert reply.rank == command.rank
        assert isinstance(reply, cmd.LeasedPart) == command.parts
        assert command.parts or reply.rank not in lease.ids, "a token is given once"
        lease.sessions[reply.rank] = session
        lease.ids[reply.rank] = [*lease.ids.get(reply.rank, []), *ids]
        assert len(set(lease.ids[reply.rank])) == len(lease.ids[reply.rank]), "a row is delivered once under a token"
        assert ids or reply.world_size > 1
        assert unpack_ids(reply.groups).tolist() == [self.rows[i].group.start for i in ids]
        for i in ids:
            row = self.rows[i]
            assert i in self.live, f"row {i} had ended"
            assert task.takes(row.partition)
            assert set(task.needs) <= row.columns, f"row {i} lacks a column that {task.name} needs"
            assert not self._lacks(row, task), f"row {i} is leased, and {task.name} cannot read it"
            assert task.name not in row.done, f"row {i} comes again"
            holder = row.holder.get(task.name, reply.token)
            assert holder == reply.token or self.leases[holder].unsure, f"row {i} is leased already"
            row.holder[task.name] = reply.token
        if isinstance(reply, cmd.LeasedPart):
            self._on_part(task, command, reply, lease, ids)
            return
        if task.batch_rows is not None:
            if len(lease.ids) == reply.world_size:
                self._on_step(task, reply, lease.step_rows())
            return
        assert {self.rows[i].partition for i in ids} <= {reply.partition}
        if task.admits:
            assert reply.version == self.sessions[session].loaded
            whole = self._groups(i for i in ids if not any(self.rows[m].versions for m in self.rows[i].group))
            assert whole <= set(ids), "a group is begun as a whole"
            for i in ids:
                self.rows[i].versions.add(reply.version)
        elif reply.world_size == 1 and not self._groups_whole(task):
            assert len(ids) <= command.count
            ended = self._ended_partitions & {None, reply.partition}
            assert len(ids) >= command.at_least or ended or self.status().over
            left = [self.live[i].priority for i in self._ready(task, reply.partition)]
            assert max(left, default=-(1 << 40)) <= min(self.rows[i].priority for i in ids), "higher priorities first"

    def _on_part(self, task: TaskSpec, command: cmd.LeaseRows, reply: Any, lease: Lease, ids: list[int]) -> None:
        step, mine = reply.step, lease.parts.setdefault(reply.rank, [])
        assert step not in self.acknowledged, "a step is trained once"
        assert (reply.part, reply.step, reply.version) == (len(mine), lease.step, lease.version)
        assert command.token in (0, reply.token)
        mine.append(ids)
        self.begun.add(step)
        self._renew(reply.token)
        if {len(parts) for parts in lease.parts.values()} != {reply.part + 1} or len(lease.parts) < reply.world_size:
            return
        *earlier, part = [list(shards) for shards in zip(*lease.of_shards(lease.parts), strict=True)]
        rows, known = [i for shard in part for i in shard], self._known_parts(step) or earlier
        assert rows, "a part has rows"
        for shard in part:  # rows that a whole lease acknowledged are not in it
            whole = {i for i in self._groups(shard) if task.name not in self.rows[i].done}
            assert whole == set(shard), "groups are whole, and of one shard"
        if reply.part < len(known):
            before = known[reply.part]
            assert sorted(i for shard in before for i in shard) == sorted(rows), "a part comes again with its rows"
            assert len(before) != len(part) or before == part, "a part comes again with its shards"
        left = task.batch_rows - sum(task.name in self.rows[i].done for i in self.steps.get(step, ()))
        lease.last = reply.last
        assert self._blurred or reply.last == (len(lease.step_rows()) == left)
        assert self._blurred or len(rows) >= command.at_least or reply.last or reply.part < len(known)
        self.parts[step] = [*known[: reply.part], part, *known[reply.part + 1 :]]
        self._check_ages(reply, rows)
        if reply.last:
            self._on_step(task, reply, lease.step_rows())

    def _known_parts(self, step: int) -> list[list[list[int]]]:
        """The parts of a step, without rows that have ended since."""
        parts = [[[i for i in shard if i in self.live] for shard in part] for part in self.parts.get(step, ())]
        return [part for part in parts if any(part)]

    def _on_step(self, task: TaskSpec, reply: cmd.Leased, ids: list[int]) -> None:
        step = reply.step
        assert step not in self.acknowledged, "a step is trained once"
        if self._blurred:
            self.steps[step] = ids
        elif step in self.steps:
            left = [i for i in self.steps[step] if task.name not in self.rows[i].done]
            assert sorted(left) == sorted(ids), "a step comes again with the rows that are left of it"
        else:
            assert len(set(ids)) == len(ids) == task.batch_rows, "a step is whole"
            known = self.steps.keys() | self.begun | self.overtaken
            assert step in self.begun or step == min(set(range(len(known) + 1)) - known), "steps come in order"
            assert not set(ids) & {i for rows in self.steps.values() for i in rows}, "a row is in one step"
            self.steps[step] = ids
        for earlier in set(range(step)) - self.acknowledged - self.overtaken if not self._blurred else ():
            shards = [shard for part in self._known_parts(earlier) for shard in part]
            rows = self.steps.get(earlier) or [i for shard in shards for i in shard]
            assert any(task.name in self.rows[i].holder for i in rows), "the oldest step comes first"
        if not isinstance(reply, cmd.LeasedPart):
            self._check_ages(reply, ids)

    def _check_ages(self, reply: cmd.Leased, ids: list[int]) -> None:
        for row in [self.rows[i] for i in ids]:
            if row.version is not None and (self._limits.staleness is None or self._limits.staleness.name != "count"):
                made = steps_of(np.array(sorted(row.versions)), reply.version_step_offsets).max()
                assert reply.step - made <= (self._limits.max_staleness or 0), "a token is too old"

    def _on_completed(self, session: int, command: cmd.Complete, reply: cmd.Completed, place: Place) -> None:
        lease = self._own_lease(session, command)
        task, named = self.tasks[lease.task], self._named(command)
        revoked, again = set(unpack_ids(reply.revoked).tolist()), set(unpack_ids(reply.again).tolist())
        assert revoked | again <= set(named)
        assert all(task.name in self.rows[i].done for i in again)
        if command.filtered and not self._trains():
            dropped = {named[at] for at in np.frombuffer(command.filtered, "<i4")} - revoked - again
            assert not self._groups(dropped) & self.live.keys(), "a group is filtered as a whole"
        if lease.parts:
            assert lease.last, "a step is acknowledged before it is delivered whole"
        elif task.batch_rows is not None:
            self.parts.pop(lease.step, None)  # it may be acknowledged in part
        if task.batch_rows is not None and lease.world_size > 1:
            lease.done.add(command.rank)
            if not all(rank in lease.done or not (ids or lease.parts) for rank, ids in lease.ids.items()):
                return
            named = lease.rows()
        for i in set(named) - again:
            row, mine = self.rows[i], self._holds(command.token, i)
            if i in revoked:
                assert not mine, f"row {i} is revoked, and leased"
                continue
            assert mine or lease.world_size > 1, f"row {i} is not of this lease any more"
            assert not row.columns & set(command.columns), f"a column of row {i} is written twice"
            assert lease.world_size > 1 or task.name not in row.done, f"row {i} is completed twice"
            row.columns |= set(command.columns)
            row.places.update(dict.fromkeys(command.columns, place))
            row.done.add(task.name)
            row.holder.pop(task.name, None)
            if task.admits:
                row.version = lease.version
        if task.batch_rows is not None and all(task.name in self.rows[i].done for i in self.steps[lease.step]):
            self.acknowledged.add(lease.step)
            if not self._limits.checkpoints:
                self.parts.pop(lease.step, None)
        self._end_leases({command.token})

    # ---- homes

    def _on_home_opened(self, session: int, command: cmd.OpenHome, reply: cmd.HomeOpened) -> None:
        live = {n: home for n, home in self.homes.items() if self.is_live((n, home.epoch))}
        same = [n for n, home in live.items() if home.identity == command.identity]
        named = [n for n, home in self.homes.items() if home.name == command.name]
        if same:
            (number,), epoch = same, self.homes[same[0]].epoch
        elif named:
            (number,), epoch = named, self.homes[named[0]].epoch + 1
            assert named[0] not in live or self.homes[named[0]].unit in (None, session), "another unit has it"
        else:
            number, epoch = len(self.homes) + 1, 1
        assert (reply.home, reply.epoch) == (number, epoch)
        assert all(home.unit != session or n == number for n, home in self.homes.items()), "a unit serves one home"
        name = self.homes[number].name if number in self.homes else command.name
        self.homes[number] = Home(name, command.identity, epoch, session)
        self.places.add((number, epoch))

    def _lose_homes(self, lost: list[HomeLoss]) -> None:
        """Answer lost homes and blocks as a server does, and check what becomes of the rows."""
        known = []
        for loss in lost:
            place, home = (loss.home, loss.epoch), self.homes[loss.home]
            known.append((loss, self._columns_in(place, loss.serials)))
            assert self.is_live(place), "an epoch is lost once"
            if loss.serials is not None:
                for part in known[-1][1]:
                    for i in part.ids.tolist():
                        self.rows[i].places.update(dict.fromkeys(part.columns, LOST))
                continue
            if loss.reason.startswith("silent"):
                assert home.unit is None and self._gives_up(home) <= self.now, "a home is not given up early"
            if home.epoch == loss.epoch:
                home.unit = None
            self.lost_places.add(place)
        before, events = dict(self.live), len(self.events)
        ended = {i for i in self.rows if i not in before}
        missing = self._miss(before)
        puts = {ticket: each for ticket, each in self.waiting.items() if isinstance(each.command, cmd.AddRows)}
        tickets = [ticket for ticket, put in puts.items() if put.place in self.lost_places]
        self._feed("lose_homes", known, tickets=tickets)
        self._check_losses(lost, missing, before, ended, events)

    def _columns_in(self, place: Place, serials: bytes | None) -> list[LostColumns]:
        """The columns of live rows in a home, as a server's index knows them. ``serials``: of blocks, each of a row."""
        found: dict[tuple[str, ...], list[int]] = {}
        for i in self.live if serials is None else self.live.keys() & unpack_ids(serials).tolist():
            row = self.rows[i]
            if names := tuple(sorted(name for name, where in row.places.items() if where == place)):
                found.setdefault(names, []).append(i)
        return [LostColumns(np.array(ids, np.int64), names) for names, ids in found.items()]

    def _check_losses(
        self, lost: list[HomeLoss], missing: set[int], before: dict[int, Row], ended: set[int], events: int
    ) -> None:
        """``missing``: rows that a task cannot read; ``before``: that were live, and ``ended``: that were not."""
        new = self.events[events:]
        told = [event for event in new if isinstance(event, ev.HomeLost)]
        assert [(each.home, each.epoch) for each in told] == [(each.home, each.epoch) for each in lost]
        counts = _ended(new, "payload lost: ")
        remade = {i for i, row in before.items() if row.child is not None}
        assert counts["expired"] == len(remade)
        assert sum(each.groups_remade for each in told) == len({self.rows[i].group for i in remade})
        assert sum(each.rows_failed for each in told) == counts["failed"]
        assert set(counts) <= {"failed", "expired"}
        if not self._skips():
            uncovered = {i for i in missing if self._is_uncovered(self.rows[i])}
            assert not missing - uncovered & self.live.keys(), "a row that nobody can read lives"
        if not (self._trains() or self._skips()):
            assert counts.total() == len(self._groups(missing) & before.keys()), "other rows ended, too"
        over = self.status().over
        failed = missing - remade - self.live.keys()
        for i in failed:
            group = self.rows[i].group
            whole = not any(m in ended or self._trained(self.rows[m]) for m in group)
            intact = not any(self._is_put_lost(self.rows[m]) for m in group)
            assert not (whole and intact) or over, f"row {i} failed, and could have been made again"

    def _on_remade(self, remade: list[Replacement], ended: set[int]) -> None:
        pairs = [
            (child, parent, part.columns)
            for part in remade
            for parent, child in zip(part.parents.tolist(), part.children.tolist(), strict=True)
        ]
        parents = {parent for _, parent, _ in pairs}
        assert parents <= ended
        for child, i, columns in sorted(pairs):
            row, start = self.rows[i], child - (i - self.rows[i].group.start)
            assert child == len(self.rows), "ids are given out once, in order"
            assert i in self.live and row.child is None, "a row has one child, which comes as it ends"
            assert set(row.group) <= parents, "a group is made again as a whole"
            assert set(columns) == row.put and not self._is_put_lost(row), "from its put"
            row.child = child
            self.rows[child] = self.live[child] = Row(
                range(start, start + len(row.group)), set(columns), row.partition, row.priority, put=row.put,
                places={name: row.places[name] for name in columns}, parent=i,
            )  # fmt: skip

    def _miss(self, rows: dict[int, Row]) -> set[int]:
        """Note which of these rows cannot be read by a task that is not through with them, or by a step trained again."""
        both = [(i, task) for i in rows for task in self.tasks.values() if self._lacks(rows[i], task)]
        unread = [(i, task) for i, task in both if self._undone(rows[i], task)]
        missing = {i for i, task in unread if not self._may_skip(self.rows[i], task)}
        self._blurred |= len(missing) < len({i for i, _ in unread})
        steps = [task for task in self.tasks.values() if task.batch_rows is not None]
        again = {i for i, row in rows.items() for t in steps if self._is_uncovered(row) and self._lacks(row, t)}
        self._lost |= missing | again
        for i in missing & again:  # tasks skip it
            self._give_up(i)
        if missing:
            self._dissolve({i for i in missing if not self._trained(self.rows[i])})
        return missing

    def _give_up(self, i: int) -> None:
        """Nobody has a lease of this row any more."""
        tokens = set(self.rows[i].holder.values())
        self.rows[i].holder.clear()
        for token in tokens:
            self.leases[token].unsure = True
        self._end_leases(tokens)

    def _may_skip(self, row: Row, task: TaskSpec) -> bool:
        """True if steps may take a row without this task: what they need is there."""
        steps = [t for t in self.tasks.values() if t.batch_rows is not None and t.takes(row.partition)]
        return task.admits and any(set(t.needs) <= self.rows[m].columns for t in steps for m in row.group)

    def _lacks(self, row: Row, task: TaskSpec) -> bool:
        """True if a column that the task needs is lost."""
        return any(row.places.get(name) in self.lost_places for name in task.needs)

    def _is_put_lost(self, row: Row) -> bool:
        return any(row.places[name] in self.lost_places for name in row.put)

    def _trained(self, row: Row) -> bool:
        return any(task.name in row.done for task in self.tasks.values() if task.batch_rows is not None)

    def _is_uncovered(self, row: Row) -> bool:
        return bool(self._limits.checkpoints) and self._trained(row)

    # ---- what is known of rows and leases

    def _own_lease(self, session: int, command: Any) -> Lease:
        lease = self.leases[command.token]
        assert lease.sessions[command.rank] == session, f"{command} of another session than has the lease"
        assert command.token in self.open, f"{command} of a lease that had ended"
        return lease

    def _named(self, command: Any) -> list[int]:
        """Rows of a lease that a command names: all of its rank, or those at its index."""
        part = self.leases[command.token].ids[command.rank]
        return part if command.index is None else [part[at] for at in np.frombuffer(command.index, "<i4")]

    def _holds(self, token: int, i: int) -> bool:
        return self.rows[i].holder.get(self.leases[token].task) == token

    def _groups(self, ids: Any) -> set[int]:
        return {member for i in ids for member in self.rows[i].group}

    def _close(self, session: int) -> None:
        self.sessions.pop(session, None)
        for home in self.homes.values():
            if home.unit == session:
                home.unit, home.absent_since = None, self.now
        self.waiting = {ticket: request for ticket, request in self.waiting.items() if request.session != session}
        for token, lease in list(self.open.items()):
            if session in lease.sessions.values():
                lease.unsure = True
                if lease.world_size == 1:
                    self._close_lease(token)

    def _renew(self, token: int) -> None:
        lease = self.leases[token]
        lease.expires = self.now + self.tasks[lease.task].lease_s

    def _waits(self, token: int) -> bool:
        """True if all ranks of a lease wait for its next part."""
        asking = [request.command for request in self.waiting.values() if isinstance(request.command, cmd.LeaseRows)]
        return len({each.rank for each in asking if each.token == token}) == self.leases[token].world_size

    def _close_lease(self, token: int) -> None:
        self._release(token, self.open.pop(token).rows())

    def _release(self, token: int, ids: Iterable[int]) -> None:
        """Its holder has these rows of a lease no more."""
        for i in ids:
            if self._holds(token, i):
                del self.rows[i].holder[self.leases[token].task]

    def _end_leases(self, tokens: set[int]) -> None:
        """Of these leases, those are over whose rows are all through."""
        for token in tokens & self.open.keys():
            lease = self.open[token]
            if lease.world_size == 1 and not any(self._holds(token, i) for i in lease.ids[0]):
                del self.open[token]

    def _reopen(self, step: int, known: set[int]) -> None:
        """Steps from this one on are to be leased again, with the rows that they had. ``known``: rows that lived before."""
        trains = {task.name for task in self.tasks.values() if task.batch_rows is not None}
        self.acknowledged = {each for each in self.acknowledged if each < step}
        for row in [self.rows[i] for each, ids in self.steps.items() if each >= step for i in ids]:
            row.done -= trains
            row.holder = {task: token for task, token in row.holder.items() if task not in trains}
        for token in [token for token, lease in self.open.items() if lease.parts and lease.step >= step]:
            self._close_lease(token)
        self._dissolve({i for i in self._lost & known if not self._trained(self.rows[i])})

    def _dissolve(self, lost: Iterable[int]) -> None:
        """Forget steps that lack these rows, and later ones, unless a step after them was acknowledged: then only the former.
        Leases of steps may have ended."""
        if lost := set(lost):
            self._blurred |= bool(self.begun - self.steps.keys())
            self.parts.clear()
        groups, waiting = self._groups(lost), self.steps.keys() - self.acknowledged
        hit = {step for step in waiting if groups & set(self.steps[step])}
        gone = {step for step in hit if step < max(self.acknowledged | self.overtaken, default=-1)}
        self.overtaken |= gone
        first = min(hit - gone, default=1 << 62)
        for step in [step for step in waiting if step >= first or step in gone]:
            del self.steps[step]
        self.begun -= {step for step in self.begun if step >= first}
        for lease in self.open.values():
            lease.unsure |= self.tasks[lease.task].batch_rows is not None

    def _undone(self, row: Row, task: TaskSpec) -> bool:
        return task.takes(row.partition) and task.name not in row.done

    def _trains(self) -> bool:
        return any(task.batch_rows is not None for task in self.tasks.values())

    def _skips(self) -> bool:
        """True if a task gave up rows that go on without it."""
        return any(reason.startswith("skipped") for reason in self.audit().reasons)

    def _groups_whole(self, task: TaskSpec) -> bool:
        return task.sampler is not None and task.sampler.name == "whole_groups"

    def _ready(self, task: TaskSpec, partition: str | None) -> list[int]:
        """Rows that a task without steps could be given; none where a task gave some up, and which is not known."""
        rows = {} if self._skips() else self.live
        free = {i: row for i, row in rows.items() if self._undone(row, task) and task.name not in row.holder}
        of = {i: row for i, row in free.items() if partition in (None, row.partition)}
        return [i for i, row in of.items() if set(task.needs) <= row.columns]

    def _check_end(self, session: int, command: cmd.LeaseRows) -> None:
        task = self.tasks[command.task]
        if not (self.sessions[session].dismissed or task.admits or self._skips()):
            rest = [row for row in self.live.values() if command.partition in (None, row.partition)]
            assert not any(self._undone(row, task) for row in rest), "the end, and rows are left"

    # ---- what is checked now and then

    def check(self) -> None:
        """Audit and status say what is known of the rows, and no request waits that could be answered."""
        audit, status = self.audit(), self.status()
        assert audit.balanced
        assert (audit.put, audit.live) == (len(self.rows), len(self.live))
        assert audit.terminal == {state: self._terminal[state] for state in TERMINAL}
        assert (status.live, status.version) == (len(self.live), self.version)
        assert (status.session_count, status.parked_count) == (len(self.sessions), len(self.waiting))
        sure = not any(lease.unsure for lease in self.open.values())
        in_parts = [
            (lease.step, len(lease.step_rows()))
            for token, lease in self.open.items()
            if lease.parts and any(self._holds(token, i) for i in lease.rows())
        ]
        assert not sure or sorted(status.in_parts) == sorted(in_parts)
        for task in self.tasks.values():
            rows = [row for row in self.live.values() if task.takes(row.partition)]
            assert sum(status.rows[task.name].values()) == len(rows)
            held = sum(task.name in row.holder for row in rows)
            assert not sure or status.rows[task.name]["leased"] == held
        ends = [lease.expires for lease in self.open.values() if lease.world_size == 1 and not lease.unsure]
        due = min(
            [*ends, *self._absent_until(), *(request.deadline for request in self.waiting.values())], default=None
        )
        assert due is None or (self.next_deadline() or 0.0) <= due, "somebody would not be woken"
        live = {place for place in self.places if self.ledgers[0].state.homes.is_live(*place)}
        assert live == self.places - self.lost_places, "a lost epoch is refused for ever"
        self._check_trained_once()
        self._check_no_lost_wakeup(sure)

    def _check_trained_once(self) -> None:
        """Of each row and its children, one at most is in a step that was trained."""
        roots = [self._root(i) for step in self.acknowledged for i in self.steps[step]]
        assert len(roots) == len(set(roots)), "a row was trained twice"
        assert not any(self._root(i) in roots for i in self.live if not self._trained(self.rows[i])), "or will be"

    def _root(self, i: int) -> int:
        while (parent := self.rows[i].parent) is not None:
            i = parent
        return i

    def _check_no_lost_wakeup(self, sure: bool) -> None:
        """Asked anew in a copy, no request that waits is answered."""
        probe = copy.deepcopy(self.ledgers[0]) if self.waiting else None
        for ticket, (session, command, *_) in self.waiting.items():
            assert probe is not None
            probe.forget(ticket, self.now)
            if probe.drain().answers:  # those that it kept waiting go on, and may be asked no more
                probe = copy.deepcopy(self.ledgers[0])
                continue
            probe.apply(session, msgspec.structs.replace(command, timeout_s=0.0), self.now, -1)
            (reply,) = [answer for t, answer in probe.drain().answers if t == -1]
            assert isinstance(reply, DeadlineExceeded), f"{command} waits, but could have {reply!r}"
            task = self.tasks.get(getattr(command, "task", ""))
            if task is None or task.admits or task.batch_rows is not None or self._groups_whole(task):
                continue
            if sure and command.world_size == 1 and not command.at_least:
                assert not self._ready(task, command.partition), f"{command} waits, and rows are ready"


def _ended(events: Iterable[Any], reason: str = "") -> Counter[str]:
    """How many rows ended in each state, for a reason that begins so."""
    ended = [event for event in events if isinstance(event, ev.RowsEnded) and event.reason.startswith(reason)]
    return sum((Counter({event.state: event.count}) for event in ended), Counter[str]())


def _plain(effects: Effects) -> tuple[Any, ...]:
    """Effects in a form that can be compared."""
    answers = [(t, str(answer) if isinstance(answer, Exception) else answer) for t, answer in effects.answers]
    remade = [(part.parents.tolist(), part.children.tolist(), part.columns) for part in effects.remade]
    return answers, effects.events, [ids.tolist() for ids in effects.retired], remade, effects.homes_lost
