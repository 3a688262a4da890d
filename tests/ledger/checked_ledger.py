"""A ledger that is checked from outside after every input: by its replies, events, audit and status.

The model below knows of a row only what commands and replies say of it. It checks what must hold whatever the ledger
chooses: rows end once, columns are written once, a row has one holder at a time and is completed once by each task,
steps are whole and in order, no trained token is too old, versions rise, groups stay together, and a request waits
only while nothing can be given. Like a server's index, it knows the home of each column of each row."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, WriteOnceError
from asyncflow_sdk.ledger import TERMINAL, Effects, Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.state import LedgerState
from asyncflow_sdk.ledger.state.context import HomeLoss, LostColumns
from asyncflow_sdk.ledger.state.tasks import APART, DONE, LEASED
from asyncflow_sdk.queue import snapshot
from asyncflow_sdk.queue.recovery import digest_of
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.spans import steps_of

Place = tuple[int, int]
"""A home and its epoch."""
SERVER: Place = (0, 0)
LOST: Place = (-1, 0)
"""Of columns in a lost home, or in a lost block of a live one."""


@dataclass
class Row:
    group: range
    partition: str
    priority: int
    places: dict[str, Place]  # of each column that it has
    done: set[str] = field(default_factory=set)  # tasks that completed it
    holder: dict[str, int] = field(default_factory=dict)  # task → token of the lease that has it
    version: int | None = None  # loaded by the replica that completed it, when it leased it
    versions: set[int] = field(default_factory=set)  # loaded by each replica that leased it
    origin: tuple[str, int] = ("", -1)  # key of its put, and number of its group there


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
    step: int
    version: int
    group: str
    world_size: int
    shards: int
    expires: float = 0.0
    sessions: dict[int, int] = field(default_factory=dict)  # by rank
    ids: dict[int, list[int]] = field(default_factory=dict)  # by rank
    parts: dict[int, list[list[int]]] = field(default_factory=dict)  # rank → rows of each part; none of a whole lease
    done: set[int] = field(default_factory=set)  # ranks that acknowledged a step
    unsure: bool = False  # something happened that may have ended it
    last: bool = False  # it has all parts of its step

    def rows(self) -> list[int]:
        return [i for rank in sorted(self.ids) for i in self.ids[rank]]

    def of_shards(self, ids: dict[int, Any]) -> list[Any]:
        """Of each shard, what its first rank has."""
        return [ids[rank] for rank in sorted(ids)[:: self.world_size // self.shards]]

    def step_rows(self) -> list[int]:
        return [i for ids in self.of_shards(self.ids) for i in ids]


@dataclass
class Step:
    """One that was leased, whole or in parts, and not dissolved since."""

    rows: list[int] = field(default_factory=list)  # once it was leased whole
    parts: list[list[list[int]]] = field(default_factory=list)  # rows of each shard of each part
    acknowledged: bool = False
    overtaken: bool = False  # it ended, as it lost rows after a later one was acknowledged


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
    """A ledger with its clock, made with ``options``. ``twin``: a second ledger gets every input as from a journal, without
    failed commands and reports, and must do the same; now and then it is recovered from a snapshot."""

    def __init__(self, *, twin: bool = True, **options: Any) -> None:
        self._new = partial(Ledger, **options)
        self.ledgers = [self._new() for _ in range(1 + twin)]
        first = self.ledgers[0]
        self._recorded = first.state.context.log
        self._recorded.begin()
        self.audit, self.status, self.next_deadline = first.audit, first.status, first.next_deadline
        self.now, self.tickets = 0.0, 0
        self.answers: dict[int, Any] = {}  # by ticket
        self.events: list[Any] = []
        self.ended: list[int] = []  # rows
        self.tasks: dict[str, TaskSpec] = {}
        self.step_task = ""  # the one with steps
        self.sessions: dict[int, Client] = {}
        self.rows: dict[int, Row] = {}  # all there ever were
        self.live: dict[int, Row] = {}
        self.leases: dict[int, Lease] = {}  # by token, all there ever were
        self.open: dict[int, Lease] = {}  # those that may hold rows
        self.waiting: dict[int, Request] = {}  # by ticket
        self.steps: dict[int, Step] = {}
        self.version = -1
        self.homes: dict[int, Home] = {}
        self.places: set[Place] = {SERVER}  # that are live
        self._limits = cmd.Configure(max_staleness=1, max_swapping=0, quorum=0, home_silence_s=60.0)
        self._parts: dict[int, set[cmd.VersionPart]] = {}  # version → what was published of it
        self._bytes: dict[int, tuple[cmd.VersionPart, ...]] = {}  # of each version that was fetched
        self._ended_partitions: set[str | None] = set()
        self._lost: set[int] = set()  # rows without payload
        self._rewound = False  # a rollback or a resume may end leases of replicas
        self._blurred = False  # payload was lost while a step was in parts: which steps were dissolved is not known

    # ---- inputs

    def ask(self, session: int, command: Any) -> int:
        """Send a command. Return its ticket; ``answers`` has the reply or the error, unless the request waits."""
        self.tickets += 1
        if isinstance(command, cmd.Declare):  # with the types that a snapshot has, too
            command = msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=cmd.Declare)
        first = self.ledgers[0]
        first.apply(session, command, self.now, self.tickets)
        effects = first.drain()
        own = dict(effects.answers).get(self.tickets)
        if isinstance(own, AsyncFlowError) and not isinstance(own, DeadlineExceeded):
            self._check_error(session, command, own, effects)
            self.answers[self.tickets] = own
            self._recorded.take()
            return self.tickets
        self._replay("apply", session, command, self.now, self.tickets)
        if isinstance(command, cmd.Publish):
            self._parts.setdefault(command.version, set()).add(command.part)
        if isinstance(command, cmd.LeaseRows):
            for lease in self.open.values() if command.world_size > 1 else ():
                # a newer process of a rank ends the lease of an older one
                lease.unsure |= lease.task == command.task and lease.sessions.get(command.rank, session) < session
            if command.most:
                self.sessions[session].in_vain = True  # unless it is given some
            if own is None and command.token in self.open:
                self._renew(command.token)
        deadline = self.now + getattr(command, "timeout_s", 0.0)
        assert own is not None or deadline > self.now, "it waits without a deadline"
        self.waiting[self.tickets] = Request(session, command, deadline, self.place_of_write(command))
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
        assert all(due > now for due in self._silent_until().values()), "a home is silent for too long, and not lost"

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
        live = sorted(self.places)
        away = not isinstance(command, cmd.AddRows) or self.tickets % 4 == 0
        return live[self.tickets % len(live)] if away else SERVER

    def most_staleness(self) -> float:
        """Of any token."""
        policy = self._limits.staleness
        return math.inf if policy is not None and policy.name == "count" else self._limits.max_staleness or 0

    def live_homes(self) -> dict[int, Home]:
        return {number: home for number, home in self.homes.items() if (number, home.epoch) in self.places}

    def _silent_until(self) -> dict[int, float]:
        """When each live home without a unit is given up."""
        silence_s = self._limits.home_silence_s or 0.0
        return {n: home.absent_since + silence_s for n, home in self.live_homes().items() if home.unit is None}

    def _feed(self, method: str, *arguments: Any, **more: Any) -> None:
        getattr(self.ledgers[0], method)(*arguments, now=self.now, **more)
        self._replay(method, *arguments, now=self.now, **more)
        self._observe(self.ledgers[0].drain())

    def _replay(self, method: str, *arguments: Any, **more: Any) -> None:
        """The twin gets the input, and what samplers and policies answered the first ledger."""
        recorded = self._recorded.take()
        for twin in self.ledgers[1:]:
            twin.state.context.log.replay(recorded)
            getattr(twin, method)(*arguments, **more)
            assert twin.state.context.log.replay(None), "a replay asks samplers and policies less often"

    def _recover(self, ledger: Ledger) -> Ledger:
        """The ledger of a server that is started again."""
        parts, recovered = ledger.parts(), self._new()
        state = snapshot.encode({name: snapshot.attributes(part) for name, part in parts.items()}, parts)
        for name, attributes in snapshot.decode(state, recovered.parts()).items():
            vars(recovered.parts()[name]).update(attributes)
        return recovered

    # ---- what is checked of every input

    def _check_error(self, session: int, command: Any, error: AsyncFlowError, effects: Effects) -> None:
        assert effects == Effects(answers=[(self.tickets, error)]), f"{command} failed, and yet something happened"
        if isinstance(command, cmd.EvictHome):
            assert (command.home, command.epoch) not in self.places - {SERVER}, "a live home is not evicted"
        states = [(ledger.audit(), ledger.status()) for ledger in self.ledgers]
        assert states[0] == states[-1], f"{command} failed, and yet changed something"
        lease, rank = self.leases.get(getattr(command, "token", -1)), getattr(command, "rank", 0)
        if isinstance(error, LeaseLost) and session in self.sessions and not getattr(lease, "unsure", True):
            known = lease.sessions.get(rank) == session and rank not in lease.done
            held = any(self._holds(command.token, i) for i in lease.ids.get(rank, ()))
            assert not (known and held), f"{command} lost a lease that it holds: {error}"
        if isinstance(error, WriteOnceError):
            written = {name for i in lease.ids[rank] for name in self.rows[i].places}
            assert written & command.columns.keys(), f"nothing is written twice: {error}"
        if isinstance(error, Ended) and isinstance(command, cmd.LeaseRows):
            self._check_end(session, command)

    def _observe(self, effects: Effects, first: int = 0) -> None:
        """``first``: the ticket whose answer comes before the others."""
        _recount(self.ledgers[0].state)
        for twin in self.ledgers[1:]:
            assert _plain(effects) == _plain(twin.drain()), "a command that failed has changed what happens"
            assert self.next_deadline() == twin.next_deadline()
        if self.tickets % 8 == 0:
            self.ledgers[1:] = [self._recover(twin) for twin in self.ledgers[1:]]
        for version in [event.version for event in effects.events if isinstance(event, ev.Published)]:
            assert version > self.version, "versions rise"
            self.version = version
        ids = [i for part in effects.retired for i in part.tolist()]
        for ticket, reply in effects.answers:  # rows that are put may end at once
            if isinstance(reply, cmd.PutDone) and not reply.again:
                self._on_put(self.waiting[ticket], reply)
        assert set(ids) <= self.live.keys(), "a row ended twice"
        for i in ids:
            del self.live[i]
        acknowledging = [self.waiting[t].command for t, reply in effects.answers if isinstance(reply, cmd.Completed)]
        for token in self._holders(ids) & self.open.keys() - {command.token for command in acknowledging}:
            if self.leases[token].parts:  # a step in parts is void without a delivered row
                self._close_lease(token)
        for ticket, reply in sorted(effects.answers, key=lambda answer: answer[0] != first):
            request = self.waiting.pop(ticket)  # answered once, and only if it was asked
            self._on_reply(request, reply, ids, effects.events)
        self._retire(ids, effects)
        self.answers |= effects.answers
        self.events += effects.events
        self.ended += ids
        self.open = {token: lease for token, lease in self.open.items() if lease.world_size > 1 or self._held(token)}
        if effects.homes_lost:
            self._lose_homes(effects.homes_lost)

    def _retire(self, ids: list[int], effects: Effects) -> None:
        states = _ended(effects.events)
        assert states.total() == len(ids) == len(set(ids)), "every row that ends is in one event, and in one alone"
        if not self.step_task and len(states) == 1 and "consumed" not in states:
            assert not self._groups(ids) & self.live.keys(), "a group ends as a whole"
        if set(states) == {"consumed"} and not self._skips():
            lacks = [t for t in self.tasks.values() if not t.admits for i in ids if self._undone(self.rows[i], t)]
            assert not lacks, "consumed before every task was through with it"
        for i in ids:
            self.rows[i].holder.clear()

    # ---- replies

    def _on_reply(self, request: Request, reply: Any, ended: list[int], events: list[Any]) -> None:
        """``ended``: rows that ended by the same input, and ``events``."""
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
                assert command.ended or not reply.lost
                for other in meant:
                    self.sessions[other].dismissed = True
                    if command.ended and other != session:
                        self._close(other)
            case cmd.Configure(), cmd.Done():
                given = {name: value for name, value in msgspec.structs.asdict(command).items() if value is not None}
                self._limits = msgspec.structs.replace(self._limits, **given)
            case cmd.Declare(), cmd.Done():
                if self.tasks.setdefault(command.task.name, command.task) is command.task:
                    self.step_task = self.step_task if command.task.batch_rows is None else command.task.name
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
                own = client.loaded == 0 == reply.version  # its engine began with other weights of that name
                assert own or client.loaded != reply.version <= self.version
                client.in_vain = True
            case cmd.LeaseRows(), Ended():
                self._check_end(session, command)
            case cmd.Renew(), cmd.Done():
                self._own_lease(session, command)
                self._renew(command.token)
            case cmd.GiveBack(), cmd.Done():
                lease = self._own_lease(session, command)
                whole = lease.step >= 0  # a step goes back as a whole
                self._release(command.token, lease.rows() if whole else self._named(command))
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
            case cmd.ReportLoaded(own=True), cmd.Done() if self.version >= 0:
                pass  # it loads the published version first
            case cmd.ReportLoaded(), cmd.Done():
                client.loaded, client.swapping, client.in_vain = command.version, False, False
                for lease in self.open.values() if self._rewound else ():
                    lease.unsure |= session in lease.sessions.values()
            case cmd.Retire(), cmd.Done():
                client.loaded, client.swapping = None, False
            case cmd.Rollback(), cmd.RollbackDone():
                assert reply.version == self.version
                pinned = any(self.rows[i].partition for i in ended)  # these may have ended, too
                assert pinned or reply.expired == _ended(events, "version ")["expired"], "as many expired as it says"
                self._rewound = True
            case cmd.Resume(), cmd.Resumed():
                assert reply.step == command.step
                self._rewound = True
                self._reopen(command.step, self.live.keys() | set(ended))

    def _on_put(self, request: Request, reply: cmd.PutDone) -> None:
        command, place = request.command, request.place
        assert place in self.places, "a put without payload"
        numbers = unpack_ids(reply.groups).tolist() or range(command.groups)
        assert reply.first == len(self.rows), "ids are given out once, in order"
        assert reply.count == len(numbers) * command.group_size
        for i in range(reply.first, reply.first + reply.count):
            start = i - (i - reply.first) % command.group_size
            group = range(start, start + command.group_size)
            places = dict.fromkeys(command.columns, place)
            origin = (command.key, numbers[(i - reply.first) // command.group_size])
            self.rows[i] = self.live[i] = Row(group, command.partition, command.priority, places, origin=origin)

    def _on_leased(self, session: int, command: cmd.LeaseRows, reply: cmd.Leased) -> None:
        task, ids = self.tasks[reply.task], unpack_ids(reply.ids).tolist()
        if task.admits:
            self.sessions[session].in_vain = False
        lease = self.leases.get(reply.token)
        if lease is None:
            assert reply.token > max(self.leases, default=0), "fencing tokens rise"
            assert not getattr(command, "token", 0), "a part of another lease"
            lease = Lease(task.name, reply.step, reply.version, command.group, reply.world_size, reply.shards)
            self.leases[reply.token] = self.open[reply.token] = lease
            self._renew(reply.token)
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
            assert set(task.needs) <= row.places.keys(), f"row {i} lacks a column that {task.name} needs"
            assert not _lacks(row, task), f"row {i} is leased, and {task.name} cannot read it"
            assert task.name not in row.done, f"row {i} comes again"
            holder = row.holder.get(task.name, reply.token)
            assert holder == reply.token or self.leases[holder].unsure, f"row {i} is leased already"
            row.holder[task.name] = reply.token
            if reply.step >= 0 and row.version is not None:
                made = steps_of(np.array(sorted(row.versions)), reply.version_step_offsets).max()
                assert reply.step - made <= self.most_staleness(), "a token is too old"
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
            asked = [each.command for each in self.waiting.values() if isinstance(each.command, cmd.AwaitRowsWanted)]
            ending = not reply.partition and not all(command.more for command in asked)
            assert len(ids) >= command.at_least or ended or ending or self.status().over
            left = [self.live[i].priority for i in self._ready(task, reply.partition)]
            assert max(left, default=-(1 << 40)) <= min(self.rows[i].priority for i in ids), "higher priorities first"

    def _on_part(self, task: TaskSpec, command: cmd.LeaseRows, reply: Any, lease: Lease, ids: list[int]) -> None:
        mine, step = lease.parts.setdefault(reply.rank, []), self._step(reply.step)
        assert (reply.part, reply.step, reply.version) == (len(mine), lease.step, lease.version)
        assert command.token in (0, reply.token)
        mine.append(ids)
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
        left = task.batch_rows - sum(task.name in self.rows[i].done for i in step.rows)
        lease.last = reply.last
        assert self._blurred or reply.last == (len(lease.step_rows()) == left)
        assert self._blurred or len(rows) >= command.at_least or reply.last or reply.part < len(known)
        step.parts = [*known[: reply.part], part, *known[reply.part + 1 :]]
        if reply.last:
            self._on_step(task, reply, lease.step_rows())

    def _known_parts(self, step: Step) -> list[list[list[int]]]:
        """The parts of a step, without rows that have ended since."""
        parts = [[[i for i in shard if i in self.live] for shard in part] for part in step.parts]
        return [part for part in parts if any(part)]

    def _step(self, number: int) -> Step:
        """One that is leased, perhaps anew."""
        following = next(number for number in itertools.count() if number not in self.steps)
        assert number in self.steps or number == following or self._blurred, "steps come in order"
        step = self.steps.setdefault(number, Step())
        assert not step.acknowledged, "a step is trained once"
        assert not step.overtaken or self._blurred, "a step that was overtaken has ended"
        return step

    def _on_step(self, task: TaskSpec, reply: cmd.Leased, ids: list[int]) -> None:
        step = self._step(reply.step)
        if step.rows and not self._blurred:
            left = [i for i in step.rows if task.name not in self.rows[i].done]
            assert sorted(left) == sorted(ids), "a step comes again with the rows that are left of it"
        else:
            assert self._blurred or len(set(ids)) == len(ids) == task.batch_rows, "a step is whole"
            others = {i for other in self.steps.values() for i in other.rows}
            assert self._blurred or not others & set(ids), "a row is in one step"
            step.rows = ids
        for earlier in [] if self._blurred else [self.steps.get(number, Step()) for number in range(reply.step)]:
            rows = earlier.rows or [i for part in self._known_parts(earlier) for shard in part for i in shard]
            held = any(task.name in self.rows[i].holder for i in rows)
            assert held or earlier.acknowledged or earlier.overtaken, "the oldest step comes first"

    def _on_completed(self, session: int, command: cmd.Complete, reply: cmd.Completed, place: Place) -> None:
        lease = self._own_lease(session, command)
        task, named = self.tasks[lease.task], self._named(command)
        revoked, again = set(unpack_ids(reply.revoked).tolist()), set(unpack_ids(reply.again).tolist())
        assert revoked | again <= set(named)
        assert all(task.name in self.rows[i].done for i in again)
        if command.filtered and not self.step_task:
            dropped = {named[at] for at in np.frombuffer(command.filtered, "<i4")} - revoked - again
            assert not self._groups(dropped) & self.live.keys(), "a group is filtered as a whole"
        if lease.parts:
            assert lease.last, "a step is acknowledged before it is delivered whole"
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
            assert not row.places.keys() & command.columns.keys(), f"a column of row {i} is written twice"
            assert lease.world_size > 1 or task.name not in row.done, f"row {i} is completed twice"
            row.places.update(dict.fromkeys(command.columns, place))
            row.done.add(task.name)
            row.holder.pop(task.name, None)
            if task.admits:
                row.version = lease.version
        if task.batch_rows is not None:
            step = self.steps[lease.step]
            step.acknowledged = all(task.name in self.rows[i].done for i in step.rows)
            if not lease.parts or (step.acknowledged and not self._limits.checkpoints):
                step.parts = []  # without parts, it may be acknowledged in part

    # ---- homes

    def _on_home_opened(self, session: int, command: cmd.OpenHome, reply: cmd.HomeOpened) -> None:
        named = {n: home for n, home in self.homes.items() if home.name == command.offer.name}
        same = {n: home for n, home in self.live_homes().items() if home.identity == command.offer.identity}
        number, home = next(iter((same or named).items()), (len(self.homes) + 1, Home(command.offer.name, "", 0)))
        assert same or number not in self.live_homes() or home.unit in (None, session), "another unit has it"
        assert (reply.home, reply.epoch) == (number, home.epoch + (not same))
        assert all(other.unit != session or n == number for n, other in self.homes.items()), "a unit serves one home"
        self.homes[number] = Home(home.name, command.offer.identity, reply.epoch, session)
        self.places.add((number, reply.epoch))

    def _lose_homes(self, lost: list[HomeLoss]) -> None:
        """Answer lost homes and blocks as a server does, and check what becomes of the rows."""
        known = [(loss, self._lose_place(loss)) for loss in lost]
        before, seen = dict(self.live), len(self.events)
        missing = self._miss(before)  # a task cannot read these
        stranded = {ticket: each.command for ticket, each in self.waiting.items() if each.place not in self.places}
        tickets = [ticket for ticket, command in stranded.items() if isinstance(command, cmd.AddRows)]
        self._feed("lose_homes", known, tickets=tickets)

        told = [event for event in self.events[seen:] if isinstance(event, ev.HomeLost)]
        assert [(each.home, each.epoch) for each in told] == [(each.home, each.epoch) for each in lost]
        counts = _ended(self.events[seen:], "payload lost: ")
        assert set(counts) <= {"failed"}
        assert sum(each.rows_failed for each in told) == counts["failed"]
        if not self._skips():
            uncovered = {i for i in missing if self._is_uncovered(self.rows[i])}
            assert not missing - uncovered & self.live.keys(), "a row that nobody can read lives"
        if not self.step_task and not self._skips():
            assert counts.total() == len(self._groups(missing) & before.keys()), "other rows ended, too"

    def _lose_place(self, loss: HomeLoss) -> list[LostColumns]:
        """Return the columns of live rows in a lost home, as a server's index knows them."""
        place, found = (loss.home, loss.epoch), dict[tuple[str, ...], list[int]]()
        assert place in self.places, "an epoch is lost once"
        for i in self.live:
            places = self.live[i].places
            if names := tuple(sorted(name for name, where in places.items() if where == place)):
                found.setdefault(names, []).append(i)
                places.update(dict.fromkeys(names, LOST))
        if loss.reason.startswith("silent"):
            assert self._silent_until().get(loss.home, math.inf) <= self.now, "a home is not given up early"
        if self.homes[loss.home].epoch == loss.epoch:
            self.homes[loss.home].unit = None
        self.places.remove(place)
        return [LostColumns(np.array(ids, np.int64), names) for names, ids in found.items()]

    def _miss(self, rows: dict[int, Row]) -> set[int]:
        """Note which of these rows cannot be read by a task that is not through with them, or by a step trained again."""
        lacks = [(i, task) for i in rows for task in self.tasks.values() if _lacks(rows[i], task)]
        unread = [(i, task) for i, task in lacks if self._undone(rows[i], task)]
        missing = {i for i, task in unread if task.name in rows[i].holder or not self._may_skip(rows[i], task)}
        self._blurred |= len(missing) < len({i for i, _ in unread})
        again = {i for i, task in lacks if task.name == self.step_task and self._is_uncovered(rows[i])}
        skipped = {i for i in missing if self._is_uncovered(rows[i])}  # by all tasks
        self._lost |= (missing - skipped) | again
        for row in [rows[i] for i in skipped]:
            for token in row.holder.values():
                self.leases[token].unsure = True
            row.holder.clear()
        if missing:
            self._dissolve({i for i in missing if not self._trained(rows[i])})
        return missing

    def _may_skip(self, row: Row, task: TaskSpec) -> bool:
        """True if steps may take a row without this task: what they need is there."""
        step = self.tasks.get(self.step_task)
        if step is None or not (task.admits and step.takes(row.partition)):
            return False
        return any(set(step.needs) <= self.rows[member].places.keys() for member in row.group)

    def _trained(self, row: Row) -> bool:
        return self.step_task in row.done

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

    def _held(self, token: int) -> bool:
        """True if any row is held under this lease."""
        return any(self._holds(token, i) for i in self.leases[token].rows())

    def _holders(self, ids: Iterable[int]) -> set[int]:
        """The leases that hold these rows."""
        return {token for i in ids for token in self.rows[i].holder.values()}

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

    def _reopen(self, first: int, known: set[int]) -> None:
        """Steps from this one on are to be leased again, with the rows that they had. ``known``: rows that lived before."""
        for token in [token for token, lease in self.open.items() if lease.step >= first]:
            self._close_lease(token)
        for step in [step for number, step in self.steps.items() if number >= first]:
            step.acknowledged = False
            for i in step.rows:
                self.rows[i].done.discard(self.step_task)
        self._dissolve({i for i in self._lost & known if not self._trained(self.rows[i])})

    def _dissolve(self, lost: Iterable[int]) -> None:
        """Forget steps that lack these rows, and later ones, unless a step after them was acknowledged: then only the former.
        Leases of steps may have ended."""
        groups = self._groups(lost)
        waiting = {number: step for number, step in self.steps.items() if not (step.acknowledged or step.overtaken)}
        hit = {number for number, step in waiting.items() if groups & set(step.rows)}
        gone = {number for number in hit if any(later > number for later in self.steps.keys() - waiting.keys())}
        first = min(hit - gone, default=1 << 62)
        if groups:
            self._blurred |= not all(step.rows for step in waiting.values())
            for step in self.steps.values():
                step.parts = []
        for number in waiting:
            if number in gone:
                self.steps[number] = Step(overtaken=True)
            elif number >= first:
                del self.steps[number]
        for lease in self.open.values():
            lease.unsure |= lease.step >= 0

    def _undone(self, row: Row, task: TaskSpec) -> bool:
        return task.takes(row.partition) and task.name not in row.done

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
        return [i for i, row in of.items() if set(task.needs) <= row.places.keys()]

    def _suspects(self, session: int, task: TaskSpec) -> bool:
        """True if a session holds rows of a task with suspects, and gets no more until they are done."""
        suspects = self.ledgers[0].state.tasks[task.name].suspects.tolist()
        holders = [row.holder[task.name] for row in self.live.values() if task.name in row.holder]
        return any(session in self.leases[token].sessions.values() for token in holders) and any(
            i in self.live and self._undone(self.live[i], task) for i in suspects
        )

    def _check_end(self, session: int, command: cmd.LeaseRows) -> None:
        task = self.tasks[command.task]
        if not (self.sessions[session].dismissed or task.admits or self._skips()):
            rest = [row for row in self.live.values() if command.partition in (None, row.partition)]
            assert not any(self._undone(row, task) for row in rest), "the end, and rows are left"

    # ---- what is checked now and then

    def check(self) -> None:
        """Audit and status say what is known of the rows, and no request waits that could be answered."""
        before = digest_of(self.ledgers[0])
        audit, status = self.audit(), self.status()
        assert digest_of(self.ledgers[0]) == before, "a report changes nothing: a journal does not know of it"
        assert audit.balanced
        assert (audit.put, audit.live) == (len(self.rows), len(self.live))
        assert audit.terminal == dict.fromkeys(TERMINAL, 0) | _ended(self.events)
        assert (status.live, status.version) == (len(self.live), self.version)
        assert (status.session_count, status.parked_count) == (len(self.sessions), len(self.waiting))
        sure = not any(lease.unsure for lease in self.open.values())
        parts = {token: lease for token, lease in self.open.items() if lease.parts and self._held(token)}
        in_parts = sorted((lease.step, len(lease.step_rows())) for lease in parts.values())
        assert not sure or sorted(status.in_parts) == in_parts
        for task in self.tasks.values():
            rows = [row for row in self.live.values() if task.takes(row.partition)]
            assert sum(status.rows[task.name].values()) == len(rows)
            held = sum(task.name in row.holder for row in rows)
            assert not sure or status.rows[task.name]["leased"] == held
        ends = [lease.expires for lease in self.open.values() if lease.world_size == 1 and not lease.unsure]
        ends += [*self._silent_until().values(), *(request.deadline for request in self.waiting.values())]
        assert (self.next_deadline() or 0.0) <= min(ends, default=math.inf), "somebody would not be woken"
        places = {SERVER} | {(n, epoch) for n, home in self.homes.items() for epoch in range(1, home.epoch + 1)}
        live = {place for place in places if self.ledgers[0].state.homes.is_live(*place)}
        assert live == self.places, "a lost epoch is refused for ever"
        self._check_trained_once()
        self._check_no_lost_wakeup(sure)

    def _check_trained_once(self) -> None:
        """No group of a put with a key is trained twice, however often it was put again."""
        trained = {i for step in self.steps.values() if step.acknowledged for i in step.rows}
        groups = Counter(self.rows[i].origin for i in trained if self.rows[i].group.start == i)
        assert not [origin for origin, count in groups.items() if origin[0] and count > 1], "trained twice"
        again = {row.origin for row in self.live.values() if not self._trained(row)} & groups.keys()
        assert not [origin for origin in again if origin[0]], f"groups {again} may be trained twice"

    def _check_no_lost_wakeup(self, sure: bool) -> None:
        """Asked anew in a copy, no request that waits is answered."""
        probe = copy.deepcopy(self.ledgers[0]) if self.waiting else None
        for ticket, (session, command, *_) in self.waiting.items():
            assert probe is not None
            probe.forget(ticket, self.now)
            if probe.drain().answers:  # those that it kept waiting go on, and may be asked no more
                probe = copy.deepcopy(self.ledgers[0])
                continue
            probe.apply(session, command, self.now, -1)
            replies = dict(probe.drain().answers)
            assert -1 not in replies, f"{command} waits, but could have {replies[-1]!r}"
            probe.forget(-1, self.now)
            task = self.tasks.get(getattr(command, "task", ""))
            if task is None or task.admits or task.batch_rows is not None or self._groups_whole(task):
                continue
            if sure and command.world_size == 1 and not command.at_least and not self._suspects(session, task):
                assert not self._ready(task, command.partition), f"{command} waits, and rows are ready"


def _recount(state: LedgerState) -> None:
    """Compare the counters of tasks with their arrays."""
    at = state.rows.at(state.rows.live_ids())
    where, states = state.rows.partition[at], [task.state[at] for task in state.tasks]
    for task, each in zip(state.tasks, states, strict=True):
        for number, counts in task.by_partition.items():
            assert counts == np.bincount(each[where == number], minlength=APART)[:APART].tolist(), task.place
        assert sum(task.counts) == (each != APART).sum(), task.place
        assert sum(grant.left for grant in task.leases.values()) == task.counts[LEASED], task.place
    assert (sum(each < DONE for each in states) == state.rows.todo[at]).all()


def _ended(events: Iterable[Any], reason: str = "") -> Counter[str]:
    """How many rows ended in each state, for a reason that begins so."""
    counts: Counter[str] = Counter()
    for event in events:
        if isinstance(event, ev.RowsEnded) and event.reason.startswith(reason):
            counts[event.state] += event.count
    return counts


def _lacks(row: Row, task: TaskSpec) -> bool:
    """True if a column that the task needs is lost."""
    return any(row.places.get(name) == LOST for name in task.needs)


def _plain(effects: Effects) -> bytes:
    """Effects in a form that can be compared."""
    effects = replace(effects, over=dict.fromkeys(effects.over))  # a snapshot gives numbers of commands other types
    return msgspec.msgpack.encode(
        effects, enc_hook=lambda each: each.tolist() if isinstance(each, np.ndarray) else repr(each)
    )
