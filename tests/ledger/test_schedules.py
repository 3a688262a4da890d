"""Whole runs under random schedules: no deadlock, nothing too old, nothing lost and nothing trained twice.

Replicas lag, hang and die, rows finish in heavy-tailed order, stages filter and give back, trainers die with a
step in hand, and filter at the acknowledgement. Every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

import heapq
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_checks import check_counters, check_no_lost_wakeup, check_rule
from ledger_queue import publishing

from asyncflow_sdk.errors import Ended, LeaseLost
from asyncflow_sdk.ledger import Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec
from asyncflow_sdk.ledger.rows import Rows
from asyncflow_sdk.types import ColumnSpec

ANY_POLICY = st.sampled_from(["wait", "drop", "count"])
LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
COLUMN = ColumnSpec("ragged", "int64")
FOR_EVER = 1e9
TASKS = (
    TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=60, max_attempts=4, admits=True),
    TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=30),
    TaskSpec(name="judge", needs=("response",), gives=("verdict",), lease_s=30),
)


class World:
    """Time, the ledger, and who is told what."""

    def __init__(self, seed: int, limit: int) -> None:
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.ledger.rows = Rows(16)
        self.now = 0.0
        self.commands = 0
        self.limit = limit
        self._order = 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: dict[int, tuple[int, Callable[[Any], None]]] = {}
        self.retired: Counter[int] = Counter()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._later, (self.now + seconds, self._order, what))

    def lengths(self, count: int) -> bytes:
        """Measures, as a server reads them from payload."""
        return np.array([self.random.paretovariate(1.1) for _ in range(count)], "<f8").tobytes()

    def soon(self) -> float:
        """Seconds with a heavy tail."""
        return min(0.2 * self.random.paretovariate(1.1), 40.0)

    def call(self, session: int, command: cmd.Command, then: Callable[[Any], None]) -> None:
        self.commands += 1
        assert self.commands < self.limit, f"no end in sight: {self.ledger.status()}"
        ticket = self.commands
        self._asked[ticket] = session, then
        self.ledger.apply(session, command, self.now, ticket)
        self._answer()

    def join(self, name: str) -> int:
        self.ledger.apply(0, cmd.Join(name=name), self.now, 0)
        ((_, joined),) = self.ledger.drain().answers
        assert isinstance(joined, cmd.Joined)
        return joined.session

    def die(self, session: int) -> None:
        self._asked = {ticket: asked for ticket, asked in self._asked.items() if asked[0] != session}
        self.ledger.session_died(session, self.now, "killed")
        self._answer()

    def forget(self, session: int) -> None:
        """A session hangs for ever: nobody will hear its answers."""
        self._asked = {
            ticket: (asked[0], lambda reply: None) if asked[0] == session else asked
            for ticket, asked in self._asked.items()
        }

    def _answer(self) -> None:
        effects = self.ledger.drain()
        for ids in effects.retired:
            self.retired.update(ids.tolist())
        check_rule(self.ledger)
        if self.commands % 11 == 0:
            check_counters(self.ledger)
        if self.commands % 61 == 0:
            check_no_lost_wakeup(self.ledger)
        for ticket, reply in effects.answers:
            _, then = self._asked.pop(ticket)  # once, and only what was asked
            self.later(0.0, lambda then=then, reply=reply: then(reply))

    def run(self) -> None:
        while self._later or self._asked:
            at = self._later[0][0] if self._later else FOR_EVER
            deadline = self.ledger.next_deadline()
            if deadline is not None and deadline < at:
                self.now = deadline
                assert self.now < FOR_EVER / 2, f"deadlock: {self.ledger.status()}"
                self.ledger.tick(self.now)
                self._answer()
                continue
            self.now = max(self.now, at)
            heapq.heappop(self._later)[2]()


class Worker(ABC):
    """One session that asks a task for rows and works on them. Dies now and then, and comes back."""

    def __init__(self, world: World, task: str, name: str, mortality: float) -> None:
        self.world, self.task, self.name, self.mortality = world, task, name, mortality
        self.life = 0
        self.over = False
        self.start()

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.ask()

    def call(self, command: cmd.Command, then: Callable[[Any], None]) -> None:
        life = self.life
        self.world.call(self.session, command, lambda reply: then(reply) if life == self.life else None)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        life = self.life
        self.world.later(seconds, lambda: what() if life == self.life else None)

    at_least = 0

    def ask(self) -> None:
        count = max(self.world.random.randint(1, 6), self.at_least)
        lease = cmd.Lease(task=self.task, count=count, timeout_s=2 * FOR_EVER, at_least=self.at_least)
        self.call(lease, self.got)

    def got(self, reply: Any) -> None:
        if isinstance(reply, Ended):
            self.over = True
        elif self.world.random.random() < self.mortality:
            self.life += 1
            self.world.die(self.session)
            self.world.later(self.world.soon(), self.start)
        else:
            self.work(reply)

    @abstractmethod
    def work(self, reply: Any) -> None:
        """What is done about an answer that is no end; it asks again, now or later."""

    def complete(self, lease: cmd.Leased, gives: tuple[str, ...], at: list[int] | None, drop: list[int]) -> None:
        count = len(cmd.unpack_ids(lease.ids)) if at is None else len(at)
        command = cmd.Complete(
            token=lease.token,
            columns=dict.fromkeys(gives, COLUMN),
            index=None if at is None else np.array(at, "<i4").tobytes(),
            filtered=np.array(drop, "<i4").tobytes(),
            measures={name: self.world.lengths(count) for name in gives},
            rank=lease.rank,
        )
        self.call(command, self.completed)

    def completed(self, reply: Any) -> None:
        assert isinstance(reply, cmd.Completed | LeaseLost), reply


class Replica(Worker):
    """Generates: each row ends by itself, in any order. Loads new weights when told, or (eager) when it likes."""

    eager = False

    def work(self, reply: Any) -> None:
        if isinstance(reply, cmd.LoadFirst):
            self.later(self.world.soon(), self.load)
            return
        count = len(cmd.unpack_ids(reply.ids))
        hangs = self.world.random.random() < 0.03
        for at in range(0 if not hangs else 1, count):
            self.later(self.world.soon(), lambda at=at: self.complete(reply, ("response",), [at], []))
        if self.eager and self.world.ledger.version >= 0:
            self.call(cmd.Loaded(version=self.world.ledger.version), lambda reply: None)
        self.later(self.world.soon(), self.ask)

    def load(self) -> None:
        self.call(cmd.Loaded(version=self.world.ledger.version), lambda reply: self.ask())


class Stage(Worker):
    """Scores rows: in parts, filtering some groups, giving some back."""

    gives = "reward"
    filters = 0.1

    def work(self, reply: Any) -> None:
        count = len(cmd.unpack_ids(reply.ids))
        cut = self.world.random.randint(0, count)
        for part in (list(range(cut)), list(range(cut, count))):
            if part:
                self.later(self.world.soon(), lambda part=part: self.part(reply, part))
        self.later(self.world.soon(), self.ask)

    def part(self, lease: cmd.Leased, at: list[int]) -> None:
        if self.world.random.random() < 0.1:
            back = cmd.GiveBack(token=lease.token, index=np.array(at, "<i4").tobytes(), blame=False)
            self.call(back, lambda reply: None)
        else:
            drop = [i for i in range(len(at)) if self.world.random.random() < self.filters]
            self.complete(lease, (self.gives,), at, drop)


class Judge(Stage):
    """A side task: nothing waits for its column but the end of the rows."""

    gives = "verdict"
    filters = 0.02


def publish(world: World, version: int, then: Callable[[Any], None]) -> None:
    """By a session of its own. ``then`` hears what its publish was answered."""
    session = world.join("publisher")
    for command in [*publishing(version), cmd.Leave()]:
        world.call(session, command, then if isinstance(command, cmd.Publish) else lambda reply: None)


class Trainer(Worker):
    def __init__(self, world: World, batch: int, limit: int, mortality: float) -> None:
        self.batch, self.limit = batch, limit
        self.given: dict[int, set[int]] = {}
        self.trained: Counter[int] = Counter()
        self.steps: list[int] = []
        super().__init__(world, "train", "trainer", mortality)

    def start(self) -> None:
        if self.world.ledger.version < 0:
            self.publish(0, lambda reply: None)
        super().start()

    def publish(self, version: int, then: Callable[[Any], None]) -> None:
        life = self.life
        publish(self.world, version, lambda reply: then(reply) if life == self.life else None)

    def got(self, reply: Any) -> None:
        if isinstance(reply, cmd.Leased):
            ids = cmd.unpack_ids(reply.ids)
            rows = self.world.ledger.rows
            assert len(set(ids.tolist())) == len(ids) == self.batch
            assert set(Counter(cmd.unpack_ids(reply.groups).tolist()).values()) == set(
                rows.size[rows.at(ids)].tolist()
            )
            made = [self.world.ledger.lineage.step(version) for version in rows.version[rows.at(ids)].tolist()]
            assert reply.step - min(made) <= self.limit, "staleness"
            assert self.given.setdefault(reply.step, set(ids.tolist())) == set(ids.tolist()), "the same step, whole"
        super().got(reply)

    def work(self, reply: Any) -> None:
        drop = [at for at in range(self.batch) if self.world.random.random() < 0.2]
        self.later(
            self.world.soon(),
            lambda: self.publish(reply.version + 1, lambda said: self.acknowledge(said, reply, drop)),
        )

    def acknowledge(self, said: Any, lease: cmd.Leased, drop: list[int]) -> None:
        assert isinstance(said, cmd.Published), said  # also when it was before it died with the step
        if self.world.random.random() < self.mortality / 2:
            self.life += 1
            self.world.die(self.session)
            self.world.later(1.0, self.start)
            return
        self.complete(lease, (), None, drop)

    def completed(self, reply: Any) -> None:
        super().completed(reply)
        if isinstance(reply, cmd.Completed):
            assert not reply.revoked
            step = len(self.steps)
            self.steps.append(step)
            self.trained.update(self.given[step])
        self.ask()


class Feeder(Worker):
    """Puts what is wanted, as much at a time as the queue's capacity lets it."""

    def __init__(self, world: World, size: int, most: int) -> None:
        self.size, self.most = size, most
        super().__init__(world, "", "feeder", 0.0)

    def ask(self) -> None:
        self.call(cmd.Wanted(timeout_s=2 * FOR_EVER), self.got)

    priorities = (0,)

    def work(self, reply: Any) -> None:
        if isinstance(reply, cmd.RowsWanted):
            groups = max(1, min(reply.count, self.most) // self.size)
            put = cmd.Put(
                groups=groups,
                group_size=self.size,
                columns={"prompt": COLUMN},
                timeout_s=2 * FOR_EVER,
                priority=self.world.random.choice(self.priorities),
                measures={"prompt": self.world.lengths(groups)},
            )
            self.call(put, self.got)
        else:
            self.later(self.world.soon(), self.ask)


def most_staleness(policy: str, max_staleness: int) -> int:
    """Of any token."""
    return 1 << 30 if policy == "count" else max_staleness


@pytest.mark.timeout(3600 if LONG else 300)
@settings(max_examples=1500 if LONG else 100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 4),
    steps=st.integers(1, 6),
    replicas=st.integers(1, 4),
    mortality=st.sampled_from([0.0, 0.05, 0.2]),
    tight=st.booleans(),
    policy=ANY_POLICY,
)
def test_a_run_under_any_schedule_ends_with_every_row_accounted_for(
    seed: int, staleness: int, size: int, groups: int, steps: int, replicas: int, mortality: float, tight: bool,
    policy: str,
) -> None:  # fmt: skip
    batch = size * groups
    capacity = batch if tight else 4 * batch
    world = World(seed, limit=20_000 + 4_000 * steps * batch)
    admin = world.join("admin")
    done: list[Any] = []
    limits = cmd.Configure(capacity_rows=capacity, max_staleness=staleness, steps=steps, staleness=PolicySpec(policy))
    world.call(admin, limits, done.append)
    train = TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=50)
    for task in world.random.sample([*TASKS, train], 4):
        world.call(admin, cmd.Declare(task=task), done.append)

    trainer = Trainer(world, batch, most_staleness(policy, staleness), mortality)
    workers: list[Worker] = [Feeder(world, size, size if tight else 2 * batch), trainer]
    for i in range(replicas):
        replica = Replica(world, "rollout", f"replica {i}", mortality)
        replica.eager = i % 2 == 1
        workers.append(replica)
    workers += [Stage(world, "reward", f"stage {i}", mortality) for i in range(2)]
    workers.append(Judge(world, "judge", "judge", mortality / 2))
    world.run()

    assert all(worker.over for worker in workers), world.ledger.status()
    assert trainer.steps == list(range(steps))
    assert set(trainer.trained.values()) == {1}, "a row was trained twice"
    assert trainer.trained.total() == steps * batch
    check_counters(world.ledger)
    audit = world.ledger.audit()
    assert audit.live == 0
    assert audit.balanced
    assert set(world.retired.values()) == {1}
    assert world.retired.total() == audit.put
    assert audit.consumed + audit.reasons.get("filtered: no gradient in the step", 0) == steps * batch
    assert audit.expired <= (staleness * batch * steps if policy == "drop" else 0), "what may be given up"


class Straggler(Replica):
    """Takes a hundred times as long as others, now and then."""

    def work(self, reply: Any) -> None:
        soon = self.world.soon
        if self.world.random.random() < 0.3:
            self.world.soon = lambda: 100 * soon()  # type: ignore[method-assign]
        try:
            super().work(reply)
        finally:
            self.world.soon = soon  # type: ignore[method-assign]


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_drop_never_starves_and_gives_up_no_more_than_was_under_way(seed: int, staleness: int) -> None:
    batch, steps = 8, 25
    world = World(seed, limit=1_000_000)
    admin = world.join("admin")
    limits = cmd.Configure(max_staleness=staleness, steps=steps, staleness=PolicySpec("drop"))
    train = TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=FOR_EVER / 4)
    rollout = msgspec.structs.replace(TASKS[0], lease_s=5000)
    for command in [limits, *(cmd.Declare(task=task) for task in [rollout, TASKS[1], train])]:
        world.call(admin, command, lambda reply: None)
    trainer = Trainer(world, batch, staleness, 0.0)
    Feeder(world, 2, 2 * batch)
    for number in range(3):
        Straggler(world, "rollout", f"replica {number}", 0.0)
    Stage(world, "reward", "stage", 0.0)
    world.run()

    audit = world.ledger.audit()
    assert trainer.steps == list(range(steps))
    assert audit.balanced
    assert audit.expired <= staleness * batch * steps
    assert (audit.expired > 0) == (staleness > 0)  # with stragglers like these some are
