"""A world of random schedules: a ledger, its clock, and workers that lag, hang, die and come back."""

from __future__ import annotations

import heapq
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from ledger_checks import check_counters, check_no_lost_wakeup, check_rule
from ledger_queue import publishing

from asyncflow_sdk.errors import Ended, LeaseLost
from asyncflow_sdk.ledger import Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
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

    def say(self, session: int, command: cmd.Command) -> Any:
        """Something that is answered at once."""
        self.commands += 1
        self.ledger.apply(session, command, self.now, -self.commands)
        effects = self.ledger._effects
        (heard,) = (reply for ticket, reply in effects.answers if ticket == -self.commands)
        effects.answers = [each for each in effects.answers if each[0] != -self.commands]
        self._answer()
        return heard

    def set_up(self, limits: cmd.Configure, tasks: Iterable[TaskSpec]) -> None:
        admin = self.join("admin")
        for command in [limits, *(cmd.Declare(task=task) for task in tasks)]:
            self.call(admin, command, lambda reply: None)

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

    def say(self, command: Any) -> Any:
        """Something that is answered at once."""
        return self.world.say(self.session, command)

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


def others(world: World, size: int, most: int, replicas: int, mortality: float) -> list[Worker]:
    """All who work beside a trainer: who puts groups of ``size``, ``most`` rows at a time, replicas, stages and a judge."""
    workers: list[Worker] = [Feeder(world, size, most)]
    for number in range(replicas):
        replica = Replica(world, "rollout", f"replica {number}", mortality)
        replica.eager = number % 2 == 1
        workers.append(replica)
    workers += [Stage(world, "reward", f"stage {number}", mortality) for number in range(2)]
    return [*workers, Judge(world, "judge", "judge", mortality / 2)]


def train_task(batch: int, lease_s: float = 50.0) -> TaskSpec:
    return TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=lease_s)


def schedules(quick: int) -> Callable[[Any], Any]:
    """How many a test looks at."""
    limits = settings(max_examples=1500 if LONG else quick, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: pytest.mark.timeout(3600 if LONG else 900)(limits(test))
