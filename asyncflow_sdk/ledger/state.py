"""What the ledger knows: sessions, tasks, leases, steps, versions, parked requests; and looking things up in it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import AsyncFlowError, SchemaError
from ..types import ColumnSpec
from ..types import events as ev
from . import commands as cmd
from .commands import TERMINAL, Ids, PolicySpec, Sampling, TaskSpec
from .lineage import Lineage
from .outside import Outside
from .ready import ReadyQueue
from .remembering import KeyedPuts, Letters
from .rows import APART, NONE, TASK_STATES, Rows
from .timers import Timers
from .versions import Announced, Kept, Replica
from .window import Window

CONSUMED, FILTERED, EXPIRED, FAILED, CANCELLED = range(1, 1 + len(TERMINAL))
MAX_COLUMNS = 64
MAX_NUMBER = 1 << 61  # of a version or a limit: sums of two fit int64


@dataclass
class Session:
    """One client. ``loaded``: the version its replica generates with; None before it has one. ``claimed``: that is a
    version 0 it brought itself, with which it has taken no prompts yet. ``leases``, ``parked``: tokens and tickets of what
    it has, in order. ``rank``: of the publisher; NONE if it is none. ``dismissed``: it is given nothing more. ``replica``: of
    one that takes versions. ``lost``: what of its leases has ended, and it has not been told; None: it has not asked to be."""

    id: int
    name: str
    loaded: int | None = None
    claimed: bool = False
    rank: int = NONE
    replica: Replica | None = None
    since: float = 0.0
    dismissed: bool = False
    leases: dict[int, Held] = field(default_factory=dict)
    parked: dict[int, None] = field(default_factory=dict)
    lost: list[Ids] | None = None


@dataclass
class Held:
    """A lease. ``left``: rows still to be completed. ``crew``: of a team's, who has which rows of it. ``stretch``: of the
    lineage, when it was given. ``newest``: version that its replica has loaded since, or that it was told its step trains."""

    token: int
    task: str
    session: int
    ids: Ids
    since: float
    expires: float
    left: int
    step: int = NONE
    crew: Crew | None = None
    stretch: int = 1
    newest: int = NONE

    @property
    def sessions(self) -> list[int]:
        """Those that hold it."""
        return [self.session] if self.crew is None else list(dict.fromkeys(self.crew.members))

    def part(self, rank: int) -> Ids:
        """The rows whose positions a client names."""
        return self.ids if self.crew is None else self.ids[self.crew.span(rank)]

    def held_by(self, session: int, rank: int) -> bool:
        if self.crew is None:
            return session == self.session
        return 0 <= rank < self.crew.size and session == self.crew.members[rank]

    def session_of(self, rank: int) -> int:
        return self.session if self.crew is None else self.crew.members[rank]

    @property
    def over(self) -> bool:
        """Whether nobody has anything left to say of it."""
        crew = self.crew
        alone = crew is None or not crew.shared or self.step != NONE
        return not self.left and (alone or crew is None or len(crew.done) == crew.size)


@dataclass
class Crew:
    """Who works on a team's lease. ``members``: the session of each rank. ``bounds``: shard s has the rows from
    bounds[s] to bounds[s + 1]. ``done``: ranks that are through with theirs. ``finished``: which rows were completed.
    ``seen``: by rank, which rows of its shard it has completed or given back. ``filtered``: by shard, positions to drop
    when a step is acknowledged by all."""

    team: str
    members: list[int]
    bounds: list[int]
    done: set[int] = field(default_factory=set)
    finished: Any = None
    seen: dict[int, Any] = field(default_factory=dict)
    filtered: dict[int, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def shared(self) -> bool:
        """Whether several ranks have the same shard."""
        return len(self.bounds) - 1 < self.size

    def shard(self, rank: int) -> int:
        return rank * (len(self.bounds) - 1) // self.size

    def span(self, rank: int) -> slice:
        shard = self.shard(rank)
        return slice(self.bounds[shard], self.bounds[shard + 1])


@dataclass
class Team:
    """Ranks that lease together. ``asking``: by rank and ticket, what waits for the others. ``leases``: outstanding."""

    asking: dict[int, dict[int, Waiter]] = field(default_factory=dict)
    leases: dict[int, Held] = field(default_factory=dict)


@dataclass
class Waiter:
    """A parked request. ``place``: what wakes it. ``expires``: its deadline."""

    ticket: int
    session: int
    command: Any
    place: str
    since: float
    expires: float


@dataclass
class Task:
    """A task, its ready rows and its ``undone`` ones (live, not completed), each by partition. ``counts``: live
    rows by their state in it. ``came`` and ``passed``: how often a row became ready for it, and was completed.
    ``waiting``, ``fit``: live rows that lack columns, and that are ready, by partition, where rows are taken singly.
    """

    spec: TaskSpec
    need: np.uint64
    sampling: Sampling = field(default_factory=Sampling)
    ready: dict[int, ReadyQueue] = field(default_factory=dict)
    undone: Counter[int] = field(default_factory=Counter)
    waiting: Counter[int] = field(default_factory=Counter)
    fit: Counter[int] = field(default_factory=Counter)
    turn: int = 0  # a lease that names no partition looks there first
    redo: dict[int, deque[Ids]] = field(default_factory=dict)  # admitted rows whose producer was lost
    counts: list[int] = field(default_factory=lambda: [0] * len(TASK_STATES))
    given: int = 0  # leases
    came: int = 0
    passed: int = 0
    leases: dict[int, Held] = field(default_factory=dict)  # by token, the oldest first
    teams: dict[str, Team] = field(default_factory=dict)

    def move(self, count: int, before: int, after: int) -> None:
        """``count`` live rows changed their state."""
        self.counts[before] -= count
        self.counts[after] += count


@dataclass
class Steps:
    """The task with batch_rows: the step being filled, and filled ones that wait for a trainer. ``whole``: with checkpoints,
    the rows of every filled step that none covers, in order."""

    task: Task
    window: Window
    ready: dict[int | None, ReadyQueue] = field(default_factory=dict)  # by deadline
    filling: list[Ids] = field(default_factory=list)
    closed: deque[tuple[int, Ids]] = field(default_factory=deque)
    whole: dict[int, Ids] = field(default_factory=dict)


@dataclass
class Rule:
    """The staleness policy, and what it says of itself: see ``StalenessPolicy``. ``least_rows``: for these steps."""

    spec: PolicySpec
    promise: str = ""
    bounded: bool = True
    least_rows: int = 1


@dataclass
class Effects:
    """What a command did: answers by ticket in order, events, and rows whose memory may go."""

    answers: list[tuple[int, cmd.Reply | AsyncFlowError]] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    retired: list[Ids] = field(default_factory=list)


class State:
    """All of the ledger's state. ``_now`` is ledger seconds, never falling. Of every attribute but the ``TRANSIENT``
    ones snapshots are made, whatever classes of this room, containers, arrays and numbers it consists of."""

    TRANSIENT = frozenset({"outside", "_handlers"})

    def __init__(self) -> None:
        self.rows = Rows()
        self.tasks: dict[str, Task] = {}
        self.steps: Steps | None = None
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, Held] = {}
        self.waiters: dict[str, dict[int, Waiter]] = {}  # place → ticket → request, first come first
        self.parked: dict[int, Waiter] = {}
        self._lease_ends = Timers(self.leases)
        self._request_ends = Timers(self.parked)
        self.versions: dict[int, Kept] = {}  # the newest ones, oldest first
        self.version = NONE
        self.version_since = 0.0
        self.lineage = Lineage()
        self.committed = NONE  # by quorum
        self.publisher: dict[int, int] = {}  # rank → session
        self.publisher_size = 0
        self.announced: Announced | None = None
        self.not_coming = (NONE, "")  # the last version that was announced and will not come, and why
        self.lost: dict[
            int, str
        ] = {}  # by rank that has not heard it yet, why what it published a part of will not come
        self.not_there = ""  # why the current version cannot be fetched
        self.replicas: dict[int, None] = {}  # sessions that take versions
        self.failing: dict[int, None] = {}  # those of them that could not fetch or load the last version they tried
        self.swapping: dict[int, float] = {}  # session → since when it may load, the longest first
        self.keep_versions = 2
        self.max_swapping = 0  # no limit
        self.quorum = 0  # none
        self.capacity_rows = 1 << 40
        self.capacity_bytes = MAX_NUMBER
        self.row_bytes = 0
        self.charged = 0  # bytes that live rows take or may take
        self.largest_row = 0  # bytes of the largest row that has ended
        self.max_staleness = 1
        self.rule = Rule(PolicySpec("wait"))
        self.policy_failed = ""  # why no further row can be selected
        self.last_steps: int | None = None
        self.checkpoints = False
        self.covered = 0  # steps before this one are final
        self.checkpoint = NONE  # the step that the newest checkpoint goes on with
        self.held = 0  # live rows that every task is through with, of steps that are not final
        self.holes: Ids = np.empty(0, np.int64)  # rows of such steps whose payload is gone
        self.partitions: dict[str, int] = {"": 0}
        self.group_sizes: dict[str, int] = {}  # of a partition's last put
        self.ended = False
        self.end_said = False  # by somebody, not because every step was filled
        self.ended_partitions: set[str] = set()
        self.put_total = 0
        self.reasons: Counter[str] = Counter()
        self.unselected = 0  # live rows that the steps take and have not taken yet
        self.kinds: dict[tuple[int, int], int] = {}  # live rows by their partition and the bit set of their columns
        self.schema: dict[str, ColumnSpec] = {}
        self._places: dict[str, int] = {}  # of a column's bit
        self._reselect = False
        self._stepped = False  # a step has closed, and nobody looked yet at what is late now
        self._excused: list[tuple[str, Ids]] = []  # rows of tasks that take whole groups, that ended unready
        self.ages: cmd.StepAges | None = None
        self.lengths_known = False  # of any response
        self.pace = [0, 0.0]  # tokens and seconds of responses that were generated whole
        self._keys = KeyedPuts()
        self.letters = Letters()
        self._next_session = 1
        self._next_token = 1
        self._dirty: set[str] = set()
        self._all_woken = False  # not for rows alone
        self._judging = False  # puts, not for room alone
        self._effects = Effects()
        self._now = 0.0
        self.outside = Outside()

    @property
    def now(self) -> float:
        """Ledger seconds at the last input."""
        return self._now

    def _task(self, name: str) -> Task:
        try:
            return self.tasks[name]
        except KeyError:
            known = ", ".join(sorted(self.tasks)) or "none yet"
            raise SchemaError(f"no task {name!r}; declared: {known}") from None

    def _name(self, session: int) -> str:
        return self.sessions[session].name if session in self.sessions else f"session {session}"

    def _bit(self, column: str) -> np.uint64:
        """The bit of a column, known or to come; ``_check_places`` came first."""
        return np.uint64(1 << self._places.setdefault(column, len(self._places)))

    def _mask(self, columns: Iterable[str]) -> int:
        """The bits of columns that are known."""
        mask = 0
        for name in columns:
            if name in self.schema:
                mask |= 1 << self._places[name]
        return mask

    def _check_places(self, columns: Iterable[str]) -> None:
        if self._places.keys() >= set(columns):
            return
        new = sorted(set(columns) - self._places.keys())
        if len(self._places) + len(new) > MAX_COLUMNS:
            raise SchemaError(f"a queue holds at most {MAX_COLUMNS} columns; {new[-1]!r} is one too many")

    def _check_columns(self, columns: cmd.Columns) -> None:
        for name, spec in columns.items():
            known = self.schema.get(name)
            if known is not None and known is not spec and known != spec:
                raise SchemaError(f"column {name!r} is {known}; it cannot take {spec}")
            if name in self.rows.measures and not spec.measurable:
                raise SchemaError(f"column {name!r} is measured by a sampler; {spec} has no number a row")
        self._check_places(columns)

    def _bits(self, columns: cmd.Columns) -> int:
        for name, spec in columns.items():
            if name not in self.schema:
                self.schema[name] = spec
                self._places.setdefault(name, len(self._places))
                self._judge_puts()  # one that says otherwise can be refused now
        return self._mask(columns)

    def _answer(self, ticket: int, reply: cmd.Reply | AsyncFlowError) -> None:
        self._effects.answers.append((ticket, reply))

    def _exhausted(self, task: Task, partition: str | None = None) -> bool:
        """Whether a task will get no further row, of one partition or of any."""
        if partition is not None:
            ended = self.ended or partition in self.ended_partitions
            return ended and not task.undone[self.partitions.get(partition, NONE)]
        ended = self.ended or self.ended_partitions.issuperset(task.spec.partitions)
        return ended and not any(task.undone.values())

    def _count_kinds(self, at: Ids, change: int) -> None:
        """Live rows with the columns they have came (``change`` 1) or went (-1)."""
        split = [(0, at)] if len(self.partitions) == 1 else self._by_partition(at + self.rows.base)
        for partition, ids in split:
            columns = self.rows.columns[at if ids is at else self.rows.at(ids)]
            if not len(columns):
                continue
            if len(columns) == 1 or (columns == columns[0]).all():  # as they nearly always are
                parts = [(int(columns[0]), len(columns))]
            else:
                kinds, counts = np.unique(columns, return_counts=True)
                parts = list(zip(kinds.tolist(), counts.tolist(), strict=True))
            for kind, count in parts:
                self._count_kind(partition, kind, change * count)

    def _count_kind(self, partition: int, kind: int, change: int) -> None:
        left = self.kinds.get((partition, kind), 0) + change
        if left:
            self.kinds[partition, kind] = left
        else:
            self.kinds.pop((partition, kind), None)

    def _supply_ended(self) -> bool:
        """Whether nothing more can be put that a step takes."""
        return self.ended or (
            self.steps is not None and self.ended_partitions.issuperset(self.steps.task.spec.partitions)
        )

    def _closed(self, partition: int) -> bool:
        """Whether nothing more can be put there."""
        return self.ended or any(self.partitions.get(name) == partition for name in self.ended_partitions)

    def _through(self, task: Task, ids: Ids) -> None:
        """Rows are through with a task: done, or ended."""
        for partition, part in self._by_partition(ids):
            task.undone[partition] -= len(part)
        self._dirty.add(f"task {task.spec.name}")
        if self._exhausted(task):
            self._dirty.add("version")

    def _by_partition(self, ids: Ids) -> list[tuple[int, Ids]]:
        """Rows apart by their partition, in order; none of an empty list."""
        if len(self.partitions) == 1 or not len(ids):
            return [(0, ids)] if len(ids) else []
        where = self.rows.partition[self.rows.at(ids)]
        if (where == where[0]).all():
            return [(int(where[0]), ids)]
        return [(int(partition), ids[where == partition]) for partition in np.unique(where)]

    def _takes(self, task: Task, partition: int) -> bool:
        names = task.spec.partitions
        return "*" in names or any(self.partitions.get(name) == partition for name in names)

    def _queue(self, task: Task, partition: int) -> ReadyQueue:
        """The ready rows of a task in one partition."""
        if partition not in task.ready:
            task.ready[partition] = ReadyQueue(self.rows, task.spec.name)
        return task.ready[partition]

    def _trained(self, at: Ids) -> Any:
        """Which rows, by place, the steps take."""
        assert self.steps is not None
        return self.rows.task(self.steps.task.spec.name, "state")[at] != APART

    def _park(self, waiter: Waiter) -> None:
        self.waiters.setdefault(waiter.place, {})[waiter.ticket] = waiter
        self.parked[waiter.ticket] = waiter
        self.sessions[waiter.session].parked[waiter.ticket] = None
        self._request_ends.add(waiter.ticket)
        if (place := _team(waiter.command)) is not None:
            team = self.tasks[place[0]].teams.setdefault(place[1], Team())
            team.asking.setdefault(waiter.command.rank, {})[waiter.ticket] = waiter

    def _forget_team(self, task: str, name: str) -> None:
        """A team that asks nothing and holds nothing need not be known."""
        team = self.tasks[task].teams[name]
        if not team.asking and not team.leases:
            del self.tasks[task].teams[name]

    def _unpark(self, waiter: Waiter) -> None:
        if (place := _team(waiter.command)) is not None:
            asking = self.tasks[place[0]].teams[place[1]].asking
            del asking[waiter.command.rank][waiter.ticket]
            if not asking[waiter.command.rank]:
                del asking[waiter.command.rank]
            self._forget_team(*place)
        del self.waiters[waiter.place][waiter.ticket], self.parked[waiter.ticket]
        del self.sessions[waiter.session].parked[waiter.ticket]
        self._dirty.add("put")  # the next in line may go

    def _hold(self, lease: Held) -> None:
        for leases in self._kept_in(lease):
            leases[lease.token] = lease
        self._lease_ends.add(lease.token)

    def _release(self, lease: Held, count: int) -> None:
        """Rows are no longer leased; without any a lease is over."""
        lease.left -= count
        if lease.over:
            self._drop(lease)

    def _drop(self, lease: Held) -> None:
        if lease.token not in self.leases:
            return
        for leases in self._kept_in(lease):
            del leases[lease.token]
        if lease.crew is not None:
            self._forget_team(lease.task, lease.crew.team)

    def _kept_in(self, lease: Held) -> list[dict[int, Held]]:
        task = self.tasks[lease.task]
        places = [self.leases, task.leases]
        places += [self.sessions[number].leases for number in lease.sessions if number in self.sessions]
        return places if lease.crew is None else [*places, task.teams.setdefault(lease.crew.team, Team()).leases]

    def _count_waiting(self, task: Task, ids: Ids) -> None:
        """Rows of a task got the columns they lacked, or ended without."""
        if not task.spec.grouped:
            for partition, part in self._by_partition(ids):
                task.waiting[partition] -= len(part)

    def _count_fit(self, task: Task, ids: Ids, sign: int) -> None:
        """Rows became ready (1), or are so no longer (-1)."""
        if not task.spec.grouped:
            for partition, part in self._by_partition(ids):
                task.fit[partition] += sign * len(part)

    def _measure(self, ids: Ids, measures: dict[str, bytes], pick: Any) -> None:
        """Rows got columns that samplers measure. ``pick``: which of the measures are theirs."""
        for column, values in measures.items():
            if column in self.rows.measures:
                self.rows.measures[column][self.rows.at(ids)] = np.frombuffer(values, "<f8")[pick]

    def _charge(self, ids: Ids, nbytes: int) -> None:
        """Rows got payload of ``nbytes`` in all."""
        if not nbytes or not len(ids):
            return
        at = self.rows.at(ids)
        share = -(-nbytes // len(ids))
        self.rows.nbytes[at] += share
        before = self.rows.charged[at]
        after = np.maximum(self.rows.nbytes[at], before)
        self.rows.charged[at] = after
        self.charged += int(after.sum()) - int(before.sum())

    def _reserve(self) -> int:
        """Bytes that a new row may come to take."""
        return self.row_bytes or self.largest_row

    def _judge_puts(self) -> None:
        """Every put that waits is looked at again, also behind one that goes on waiting."""
        self._dirty.add("put")
        self._judging = True

    def _wake_all(self) -> None:
        self._dirty.update(self.waiters)
        self._all_woken = True


def _team(command: cmd.Command) -> tuple[str, str] | None:
    """Task and name of the team that asks."""
    if not isinstance(command, cmd.Lease) or command.world_size == 1:
        return None
    return command.task, command.team
