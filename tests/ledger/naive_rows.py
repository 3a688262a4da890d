"""What a naive ledger knows and what happens in it by itself: dicts, lists and loops over every row.

Written from DESIGN.md §5. Nothing is counted or kept sorted: what is ready, free or admitted is worked out anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd


@dataclass
class Row:
    group: tuple[int, ...]
    columns: set[str]
    priority: int
    state: dict[str, str]  # task -> open, leased, done or apart (it never sees the row)
    partition: str = ""
    nbytes: int = 0
    charge: int = 0  # what it counts against the queue's bytes
    token: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    version: int | None = None
    deadline: int | None = None
    newest: int | None = None  # version its replica had loaded when it completed the row
    step: int | None = None
    fate: str | None = None  # how a row of a step that no checkpoint covers will end, if not consumed
    ended: str | None = None


@dataclass
class Crew:
    """The ranks of a team's lease: their sessions, and the rows of each."""

    team: str
    members: list[int]
    rows: list[list[int]]
    shared: bool
    done: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    seen: dict[int, set[int]] = field(default_factory=dict)
    dropped: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    void: bool = False


@dataclass
class Lease:
    task: str
    session: int
    ids: list[int]
    expires: float
    crew: Crew | None = None
    newest: int = -1  # version its replica has loaded since
    turns: int = 0  # of the versions, before it was given

    def part(self, rank: int) -> list[int]:
        return self.ids if self.crew is None else self.crew.rows[rank]


@dataclass
class Parked:
    ticket: int
    session: int
    command: Any
    deadline: float


class NaiveRows:
    def __init__(self) -> None:
        self.now = 0.0
        self.rows: dict[int, Row] = {}
        self.tasks: dict[str, TaskSpec] = {}
        self.loaded: dict[int, int | None] = {}  # by session
        self.dismissed: set[int] = set()  # sessions that are given nothing more
        self.names: dict[int, str] = {}
        self.leases: dict[int, Lease] = {}
        self.dealt: dict[int, dict[int, cmd.Leased]] = {}  # token -> rank -> what a team was told
        self.parked: list[Parked] = []
        self.schema: dict[str, Any] = {}
        self.named_columns: set[str] = set()
        self.keys: dict[str, tuple[cmd.Put, cmd.PutDone]] = {}
        self.capacity: float = float("inf")
        self.max_staleness = 1
        self.policy = "wait"
        self.steps: int | None = None
        self.step = 0
        self.stopped = False
        self.ended = False
        self.published: list[Any] = []  # versions, as they became current
        self.trains = {-1: -1}  # version → step that trains it
        self.ended_partitions: set[str] = set()
        self.last_group_size: dict[str, int] = {}  # by partition
        self.capacity_bytes: float = float("inf")
        self.row_bytes = 0
        self.checkpoints = False
        self.covered = 0
        self.listening: dict[
            int, set[int]
        ] = {}  # by session that wants to hear which of its leased rows ended: those untold
        self.became_ready: dict[int, int] = {}  # first id of a group -> when it became ready for the step

    # ---- what can be seen by looking at the rows

    def live(self) -> dict[int, Row]:
        return {i: row for i, row in self.rows.items() if row.ended is None}

    def train(self) -> TaskSpec | None:
        return next((t for t in self.tasks.values() if t.batch_rows is not None), None)

    def rollouts(self) -> list[TaskSpec]:
        return [t for t in self.tasks.values() if t.admits]

    @property
    def version(self) -> int:
        return self.published[-1].version if self.published else -1

    @property
    def finished(self) -> bool:
        return self.stopped or (self.steps is not None and self.step >= self.steps)

    @property
    def free(self) -> int:
        train = self.train()
        assert train is not None
        assert train.batch_rows is not None
        return train.batch_rows - sum(row.step == self.step for row in self.live().values())

    def trained(self, row: Row) -> bool:
        train = self.train()
        return train is not None and row.state[train.name] != "apart"

    @property
    def unselected(self) -> int:
        return sum(row.step is None and self.trained(row) for row in self.live().values())

    @property
    def charged(self) -> int:
        return sum(row.charge for row in self.live().values())

    def reserve(self) -> int:
        ended = [row.nbytes for row in self.rows.values() if row.ended is not None]
        return self.row_bytes or max(ended, default=0)

    def charge(self, ids: list[int], nbytes: int) -> None:
        for i in ids if nbytes else ():
            row = self.rows[i]
            row.nbytes += -(-nbytes // len(ids))
            row.charge = max(row.charge, row.nbytes)

    @property
    def slots(self) -> int | None:
        """Rows that this step and all later ones can still take."""
        train = self.train()
        if self.steps is None or train is None:
            return 0 if self.stopped else None
        return 0 if self.finished else self.free + (self.steps - 1 - self.step) * (train.batch_rows or 0)

    def load(self, j: int) -> int:
        """L_j of the staleness rule."""
        rows = self.live().values()
        return sum(r.step is None and r.deadline is not None and r.deadline <= j for r in rows)

    def horizon(self) -> int:
        deadlines = [r.deadline for r in self.live().values() if r.deadline is not None]
        return max([self.step + self.max_staleness, *deadlines])

    def slack(self, j: int) -> int:
        train = self.train()
        assert train is not None
        return self.free + (j - self.step) * (train.batch_rows or 0) - self.load(j)

    def invariant_h(self) -> bool:
        if self.train() is None or self.policy != "wait":
            return True
        return all(self.slack(j) >= 0 for j in range(self.step, self.horizon() + 1)) and not self.load(self.step - 1)

    def may_admit(self, count: int, loaded: int) -> bool:
        deadline = loaded + self.max_staleness
        if (deadline < self.step and self.policy != "count") or self.finished:
            return False
        under_way = self.load(self.horizon())
        if self.slots is not None and under_way + count > self.slots:
            return False
        if self.policy != "wait":  # so many steps past this one, all of them together
            until = self.trains[self.version] + self.max_staleness if self.policy == "count" else deadline
            batch = (self.train() or TaskSpec(name="", needs=())).batch_rows or 0
            return under_way + count <= self.free + (until - self.step) * batch
        return all(self.slack(j) >= count for j in range(deadline, max(deadline, self.horizon()) + 1))

    def may_select(self, count: int, deadline: int | None) -> bool:
        if self.finished or count > self.free:
            return False
        if self.policy != "wait":
            return self.policy == "count" or deadline is None or deadline >= self.step
        end = self.horizon() + 1 if deadline is None else deadline
        return all(self.slack(j) >= count for j in range(self.step, end))

    def has_needs(self, row: Row, task: TaskSpec) -> bool:
        return set(task.needs) <= row.columns

    def is_ready(self, i: int, task: TaskSpec) -> bool:
        row = self.rows[i]
        if row.ended is not None or row.state[task.name] != "open" or (task.batch_rows and row.step is not None):
            return False
        if task.admits or task.batch_rows:
            return all(self.has_needs(self.rows[m], task) for m in row.group)
        if task.sampler is not None and task.sampler.name == "whole_groups":
            members = [self.rows[m] for m in row.group]
            return all(self.has_needs(m, task) or m.ended is not None for m in members)
        return self.has_needs(row, task)

    def ready(self, task: TaskSpec, partition: str | None = None) -> list[int]:
        live = self.live().items()
        return [i for i, row in live if partition in (None, row.partition) and self.is_ready(i, task)]

    def shown_state(self, i: int, task: TaskSpec) -> str:
        row = self.rows[i]
        if row.state[task.name] != "open":
            return row.state[task.name]
        if task.batch_rows and row.step is not None:
            return "selected"
        return "ready" if self.is_ready(i, task) else "waiting"

    def held(self, token: int) -> list[int]:
        lease = self.leases[token]
        live = self.live()
        return [i for i in lease.ids if i in live and live[i].token.get(lease.task) == token]

    def exhausted(self, task: TaskSpec, partition: str | None = None) -> bool:
        named = {*task.partitions} if partition is None else {partition}
        if not self.ended and not named <= self.ended_partitions:
            return False
        rows = [row for row in self.live().values() if partition in (None, row.partition)]
        return all(row.state[task.name] in ("done", "apart") for row in rows)

    def where_of(self, task: TaskSpec) -> set[str]:
        """The partitions that a task takes, of those that any task names; "*" for all others."""
        named = {"*", *task.partitions, *(p for t in self.tasks.values() for p in t.partitions)}
        return {partition for partition in named if task.takes(partition)}

    def passes(self, partition: str, task: TaskSpec) -> bool:
        """Whether a row gets through every task of a partition if it is put with all that none of them gives."""
        left = [t for t in (*self.tasks.values(), task) if t.takes(partition)]
        has = {c for t in left for c in t.needs} - {c for t in left for c in t.gives}
        while able := [t for t in left if set(t.needs) <= has and not set(t.gives) & has]:
            left.remove(able[0])
            has |= set(able[0].gives)
        return not left

    # ---- what happens by itself

    def drop(self, session: int, blame: bool) -> None:
        """A session left, or its process died."""
        self.listening.pop(session, None)
        if session in self.loaded:
            self.parked = [p for p in self.parked if p.session != session]
            for token, lease in self.leases.items():
                if lease.crew is None:
                    if lease.session == session:
                        self._return(token, self.held(token), blame)
                elif any(s == session and r not in lease.crew.done for r, s in enumerate(lease.crew.members)):
                    self.void(token, blame)
            del self.loaded[session]

    def expire(self) -> None:
        for token, lease in list(self.leases.items()):
            if lease.expires <= self.now and lease.crew is None:
                self._return(token, self.held(token), blame=True)
            elif lease.expires <= self.now and self.open_crew(token):
                self.void(token, blame=True)

    def void(self, token: int, blame: bool) -> None:
        """A team's lease goes back, all that is left of it."""
        crew = self.leases[token].crew
        assert crew is not None
        if self.open_crew(token):
            self._return(token, self.held(token), blame)
            crew.void = True

    def open_crew(self, token: int) -> bool:
        """Whether a team's lease is not over."""
        crew = self.leases[token].crew
        if crew is None or crew.void:
            return False
        step = self.tasks[self.leases[token].task].batch_rows is not None
        return bool(self.held(token)) or (crew.shared and not step and len(crew.done) < len(crew.members))

    def take_over(self, session: int, command: Any) -> None:
        """A request of a rank waits: what earlier sessions hold under its name is void."""
        if isinstance(command, cmd.Lease) and command.world_size > 1:
            for token in self.under(command):
                crew = self.leases[token].crew
                if crew is not None and crew.members[command.rank] != session:
                    self.void(token, blame=True)

    def under(self, c: cmd.Lease) -> list[int]:
        """Tokens of leases that sessions hold under a rank, and have not done with."""
        return [
            token
            for token, lease in self.leases.items()
            if lease.crew is not None
            and (lease.task, lease.crew.team) == (c.task, c.team)
            and self.open_crew(token)
            and c.rank < len(lease.crew.members)
            and c.rank not in lease.crew.done
        ]

    def settle(self) -> None:
        """Ready groups join steps, earliest deadline first, then first come; rows that are through end."""
        self._skip()
        while self._consume() or self._select_one() or self._evict() or self._cancel_leftover():
            pass

    def _skip(self) -> None:
        """Groups that the step can take as they came need no rollout."""
        train = self.train()
        for rollout in self.rollouts() if train is not None else []:
            for i, row in self.live().items():
                begun = row.deadline is None and self.shown_state(i, train) not in ("waiting", "apart")
                if begun and row.state[rollout.name] != "apart":
                    self._done(i, rollout)

    def through(self, row: Row) -> bool:
        """Whether every task is through with a row."""
        return all(s in ("done", "apart") for s in row.state.values())

    def may_train_again(self, row: Row) -> bool:
        """Whether a row of a full step lives on, whatever is said of it."""
        return self.checkpoints and row.step is not None and row.step >= self.covered

    def kept_back(self) -> int:
        """Rows that live only because their step may be trained again."""
        return sum(self.through(row) and self.may_train_again(row) for row in self.live().values())

    def _consume(self) -> bool:
        through = [
            i
            for i, row in self.live().items()
            if self.through(row)
            and any(not t.gives and t.takes(row.partition) for t in self.tasks.values())
            and not self.may_train_again(row)
        ]
        for i in through:
            self.end(i, "consumed")
        return bool(through)

    def end(self, i: int, how: str) -> None:
        """A row ends. Whoever has it leased, and wants to, will hear of it."""
        self.rows[i].ended = how
        for task, state in self.rows[i].state.items():
            if state == "leased":
                lease = self.leases[self.rows[i].token[task]]
                for session in [lease.session] if lease.crew is None else lease.crew.members:
                    if session in self.listening:
                        self.listening[session].add(i)

    def drop_trained(self, i: int) -> None:
        """A row of a step is acknowledged as one that was of no use."""
        if self.may_train_again(self.rows[i]):
            self.rows[i].fate = "filtered"
        else:
            self.end(i, "filtered")

    def _select_one(self) -> bool:
        train = self.train()
        if train is None or self.finished:
            return False
        firsts = sorted({self.rows[i].group[0] for i in self.ready(train)})
        for first in firsts:
            self.became_ready.setdefault(first, len(self.became_ready))

        def turn(first: int) -> tuple[Any, ...]:
            deadline = self.rows[first].deadline
            return deadline is None, deadline, -self.rows[first].priority, self.became_ready[first]

        for first in sorted(firsts, key=turn):
            group = self.rows[first].group
            if self.may_select(len(group), self.rows[first].deadline):
                for i in group:
                    self.rows[i].step = self.step
                if not self.free:
                    self.step += 1
                    if self.finished:
                        self.ended = True
                        self._cancel(filling=False)
                return True
        return False

    def _evict(self) -> bool:
        """Rows that no step may take any more."""
        if self.train() is None or self.finished or self.policy == "count":
            return False
        live = self.live().items()
        late = [i for i, r in live if r.step is None and r.deadline is not None and r.deadline < self.step]
        for i in late:
            self._end_group(i, "expired")
        assert not late or self.policy == "drop"
        return bool(late)

    def supply_ended(self) -> bool:
        train = self.train()
        return self.ended or (train is not None and {*train.partitions} <= self.ended_partitions)

    def _cancel_leftover(self) -> bool:
        if self.train() is None or not self.supply_ended() or self.finished or self.unselected >= self.free:
            return False
        self._cancel(filling=True)
        self.stopped = True
        return True

    def _cancel(self, filling: bool) -> None:
        for i, row in self.live().items():
            if self.trained(row) and (row.step is None or (filling and row.step == self.step)):
                self.end(i, "cancelled")

    def _done(self, i: int, task: TaskSpec) -> None:
        self.rows[i].state[task.name] = "done"
        self.rows[i].token.pop(task.name, None)

    def _end_group(self, i: int, how: str) -> None:
        """A group succeeds or fails as a whole; but what is in a full step belongs to its trainer."""
        for m in self.rows[i].group:
            row = self.rows[m]
            if row.ended is None and (row.step is None or (row.step == self.step and not self.finished)):
                self.end(m, how)

    def _return(self, token: int, ids: list[int], blame: bool) -> None:
        lease = self.leases[token]
        task, held = self.tasks[lease.task], self.held(token)
        back = held if task.batch_rows is not None else [i for i in ids if i in held]
        for i in back:
            self.rows[i].state[task.name] = "open"
            del self.rows[i].token[task.name]
            if task.batch_rows is None:
                self.rows[i].attempts[task.name] = self.rows[i].attempts.get(task.name, 0) + blame
        for i in back:
            if self.rows[i].attempts.get(task.name, 0) >= task.max_attempts:
                self._end_group(i, "failed")
                if self.rows[i].ended is None:  # its trainer has it: only this task goes without it
                    self._done(i, task)
        if task.admits:
            for i in back:
                if not self.trained(self.rows[i]) and self.rows[i].state[task.name] == "open":
                    self.rows[i].version = None
            for group in {self.rows[i].group for i in back}:
                states = {(self.rows[m].state[task.name], self.shown_state(m, self.train())) for m in group}
                if states == {("open", "waiting")}:  # nobody has begun it
                    for m in group:
                        self.rows[m].version = self.rows[m].newest = self.rows[m].deadline = None
