"""What the ledger's knowledge consists of: sessions, leases, teams, parked requests, tasks, steps; and what a command did."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import AsyncFlowError
from ..types import events as ev
from . import commands as cmd
from .commands import Ids, PolicySpec, Sampling, TaskSpec
from .ready import ReadyQueue
from .rows import NONE, TASK_STATES
from .versions import Replica
from .window import Window


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
class Preparation:
    """What a client does since ``since`` before its first request for rows of ``task``, in words."""

    task: str
    what: str
    since: float


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

    def left_of(self, session: int) -> int:
        """Rows that one of those that hold it has still to do something with."""
        crew = self.crew
        if crew is None:
            return self.left
        ranks = [rank for rank, member in enumerate(crew.members) if member == session and rank not in crew.done]
        spans = [(rank, crew.span(rank)) for rank in ranks]
        return sum(span.stop - span.start - int(np.sum(crew.seen.get(rank, 0))) for rank, span in spans)

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
