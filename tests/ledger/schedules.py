"""A world of random schedules: a checked ledger, its clock, and workers that lag, hang, die and come back.

Every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from checked_ledger import CheckedLedger
from hypothesis import HealthCheck, settings
from ledger_queue import packed, part

from asyncflow_sdk.errors import ConfigError, Ended, LeaseLost
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec
from asyncflow_sdk.types.reports import Audit

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
COLUMN = ColumnSpec("ragged", "int64")
FOR_EVER = 1e9
TASKS = (
    TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=60, max_attempts=4, admits=True),
    TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=30),
    TaskSpec(name="judge", needs=("response",), gives=("verdict",), lease_s=30),
)


def train_task(batch: int, lease_s: float = 50.0) -> TaskSpec:
    return TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=lease_s)


def schedules(quick: int) -> Callable[[Any], Any]:
    """How many schedules a test tries."""
    limits = settings(max_examples=1500 if LONG else quick, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: pytest.mark.timeout(3600 if LONG else 900)(limits(test))


class World:
    """Time, the ledger, and the calls whose replies are still to come. ``limit``: of commands, in a run that ends."""

    def __init__(self, seed: int, limit: int, limits: cmd.Configure, tasks: Iterable[TaskSpec]) -> None:
        self.random = random.Random(seed)
        self.ledger = CheckedLedger(twin=False, initial_rows=16)
        self.now, self.commands, self.limit, self._order = 0.0, 0, limit, 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: dict[int, tuple[int, Callable[[Any], None]]] = {}
        self.workers: list[Worker] = []
        admin = self.join("admin")
        for command in [limits, *(cmd.Declare(task=task) for task in tasks)]:
            assert self.say(admin, command) == cmd.Done()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._later, (self.now + seconds, self._order, what))

    def soon(self) -> float:
        """Seconds with a heavy tail."""
        return min(0.2 * self.random.paretovariate(1.1), 40.0)

    def lengths(self, count: int) -> bytes:
        """Measures, as a server reads them from payload."""
        return np.array([self.random.paretovariate(1.1) for _ in range(count)], "<f8").tobytes()

    def call(self, session: int, command: cmd.Command, then: Callable[[Any], None]) -> None:
        self.commands += 1
        assert self.commands < self.limit, f"no end in sight: {self.ledger.status()}"
        self._asked[self.commands] = session, then
        self._answer(self.ledger.apply(session, command, self.now, self.commands))

    def say(self, session: int, command: cmd.Command) -> Any:
        """A command that is answered at once."""
        self.commands += 1
        effects = self.ledger.apply(session, command, self.now, -self.commands)
        (reply,) = [answer for ticket, answer in effects.answers if ticket < 0]
        effects.answers = [answer for answer in effects.answers if answer[0] > 0]
        self._answer(effects)
        return reply

    def join(self, name: str) -> int:
        return int(self.say(0, cmd.OpenSession(name=name)).session)

    def die(self, session: int) -> None:
        self._asked = {ticket: asked for ticket, asked in self._asked.items() if asked[0] != session}
        self._answer(self.ledger.session_died(session, self.now, "killed"))

    def hang(self, session: int) -> None:
        """The session hangs for ever: its replies are read by nobody."""
        for ticket, asked in self._asked.items():
            if asked[0] == session:
                self._asked[ticket] = session, lambda reply: None

    def lose(self, share: float) -> int:
        """Some rows lose their payload. Returns how many."""
        ids = [i for i in self.ledger.live if self.random.random() < share]
        self._answer(self.ledger.lose(ids, self.now, "payload lost"))
        assert not set(ids) & self.ledger.live.keys()
        for worker in self.workers:  # the last step may have been opened again
            if worker.over and not self.ledger.status().over:
                worker.over = False
                worker.start()
        return len(ids)

    def _answer(self, effects: Any) -> None:
        if self.commands % 50 == 0:
            self.ledger.check()
        for ticket, reply in effects.answers:
            _, then = self._asked.pop(ticket)
            self.later(0.0, lambda then=then, reply=reply: then(reply))

    def run(self) -> Audit:
        """Until every worker is told the end. Returns the audit, of a ledger without live rows."""
        while self._later or self._asked:
            at = self._later[0][0] if self._later else FOR_EVER
            deadline = self.ledger.next_deadline()
            if deadline is not None and deadline < at:
                self.now = deadline
                assert self.now < FOR_EVER / 2, f"deadlock: {self.ledger.status()}"
                self._answer(self.ledger.tick(self.now))
                continue
            self.now = max(self.now, at)
            heapq.heappop(self._later)[2]()
        assert all(worker.over for worker in self.workers), self.ledger.status()
        self.ledger.check()
        audit = self.ledger.audit()
        assert audit.live == 0
        return audit


class Worker:
    """A session that asks a task for rows and works on them. Dies now and then, and comes back."""

    at_least = 0

    def __init__(self, world: World, task: str, name: str, mortality: float = 0.0) -> None:
        self.world, self.task, self.name, self.mortality = world, task, name, mortality
        self.life, self.over = 0, False
        world.workers.append(self)
        self.start()

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.ask()

    def say(self, command: Any) -> Any:
        return self.world.say(self.session, command)

    def call(self, command: cmd.Command, then: Callable[[Any], None]) -> None:
        life = self.life
        self.world.call(self.session, command, lambda reply: then(reply) if life == self.life else None)

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        life = self.life
        self.world.later(seconds, lambda: what() if life == self.life else None)

    def dies(self, share: float) -> bool:
        if self.over or self.world.random.random() >= share:
            return False
        self.life += 1
        self.world.die(self.session)
        self.world.later(self.world.random.choice([0.1, 1.0, self.world.soon()]), self.start)
        return True

    def ask(self) -> None:
        count = max(self.world.random.randint(1, 6), self.at_least)
        lease = cmd.LeaseRows(task=self.task, count=count, timeout_s=2 * FOR_EVER, at_least=self.at_least)
        self.call(lease, self.got)

    def got(self, reply: Any) -> None:
        if isinstance(reply, Ended):
            self.over = True
        elif not self.dies(self.mortality):
            self.work(reply)

    def work(self, reply: Any) -> None:
        raise NotImplementedError

    def complete(self, lease: cmd.Leased, gives: tuple[str, ...], at: list[int] | None, share: float) -> None:
        """``share``: of the rows, that is filtered."""
        count = len(unpack_ids(lease.ids)) if at is None else len(at)
        command = cmd.Complete(
            token=lease.token,
            columns=dict.fromkeys(gives, COLUMN),
            index=None if at is None else packed(*at),
            filtered=packed(*(i for i in range(count) if self.world.random.random() < share)),
            measures={name: self.world.lengths(count) for name in gives},
            rank=lease.rank,
        )
        self.call(command, self.completed)

    def completed(self, reply: Any) -> None:
        assert isinstance(reply, cmd.Completed | LeaseLost), reply


class Feeder(Worker):
    """Puts what is wanted, at most ``most`` rows at a time."""

    def __init__(self, world: World, size: int, most: int) -> None:
        self.size, self.most = size, most
        super().__init__(world, "", "feeder")

    def ask(self) -> None:
        self.call(cmd.AwaitRowsWanted(timeout_s=2 * FOR_EVER), self.got)

    def work(self, reply: Any) -> None:
        if not isinstance(reply, cmd.RowsWanted):
            self.later(self.world.soon(), self.ask)
            return
        groups = max(1, min(reply.count, self.most) // self.size)
        put = cmd.AddRows(
            groups=groups, group_size=self.size, columns={"prompt": COLUMN}, timeout_s=2 * FOR_EVER,
            priority=self.world.random.choice((0, 0, 1, -1)), measures={"prompt": self.world.lengths(groups)},
        )  # fmt: skip
        self.call(put, self.got)


class Replica(Worker):
    """Generates: each row ends by itself, in any order. Loads new weights when told, or (eager) when it likes.
    ``straggles``: how often it takes a hundred times as long."""

    eager, straggles = False, 0.0

    def work(self, reply: Any) -> None:
        if isinstance(reply, cmd.LoadFirst):
            self.later(self.world.soon(), lambda: self.load(self.ask))
            return
        times = 100 if self.world.random.random() < self.straggles else 1
        hangs = self.world.random.random() < 0.03
        for at in range(hangs, len(unpack_ids(reply.ids))):
            self.later(times * self.world.soon(), lambda at=at: self.complete(reply, ("response",), [at], 0.0))
        if self.eager and self.world.ledger.version >= 0:
            self.load(lambda: None)
        self.later(times * self.world.soon(), self.ask)

    def load(self, then: Callable[[], None]) -> None:
        self.call(cmd.ReportLoaded(version=self.world.ledger.version), lambda reply: then())


class Stage(Worker):
    """Gives a column: in parts, filtering some groups, giving some back."""

    def __init__(
        self, world: World, task: str, gives: str, mortality: float, filters: float, at_least: int = 0
    ) -> None:
        self.gives, self.filters, self.at_least = gives, filters, at_least
        super().__init__(world, task, task, mortality)

    def work(self, reply: Any) -> None:
        count = len(unpack_ids(reply.ids))
        cut = self.world.random.randint(0, count)
        for share in (list(range(cut)), list(range(cut, count))):
            if share:
                self.later(self.world.soon(), lambda share=share: self.part(reply, share))
        self.later(self.world.soon(), self.ask)

    def part(self, lease: cmd.Leased, at: list[int]) -> None:
        if self.world.random.random() < 0.1:
            self.call(cmd.GiveBack(token=lease.token, index=packed(*at)), lambda reply: None)
        else:
            self.complete(lease, (self.gives,), at, self.filters)


class Trainer(Worker):
    """Trains, publishes and acknowledges step after step; rolls back before, between or after these, or dies there.

    Weights are the tuple of steps that they were trained with. So what descends from what can be seen, and how old the
    rows of a step are. ``doubts``: how often it rolls back. ``limit``: of the staleness."""

    def __init__(self, world: World, limit: int, mortality: float, doubts: float = 0.0) -> None:
        self.limit, self.doubts = limit, doubts
        self.made: dict[int, tuple[int, ...]] = {}  # version → weights
        self.weights: tuple[int, ...] = ()
        self.kept: tuple[int, ...] | None = None  # weights that outlive its death
        self.full: set[int] = set()  # steps that may hold rows of versions given up
        self.trained: list[int] = []
        self.rollbacks = self.expired = self.seen = 0
        super().__init__(world, "train", "trainer", mortality)

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.say(cmd.OpenPublisher())
        if self.world.ledger.version < 0:
            self.publish(0)
        self.weights = self.made[self.world.ledger.version] if self.kept is None else self.kept
        self.kept = None
        self.ask()

    def publish(self, version: int) -> None:
        for command in (cmd.Announce(version=version), cmd.Publish(version=version, part=part(version))):
            reply = self.say(command)
            assert isinstance(reply, cmd.PublishReply), reply
        self.made[version] = self.weights

    def perhaps_roll_back(self) -> None:
        if self.world.random.random() >= self.doubts:
            return
        status = self.world.ledger.status()
        to = self.world.random.choice([each.version for each in status.versions] + [max(status.version - 1, 0)])
        reply = self.say(cmd.Rollback(version=to))
        if isinstance(reply, cmd.RollbackDone):
            assert self.say(cmd.ReportRestored(version=reply.version)) == cmd.Done()
            self.full |= set(range(status.step))
            self.weights = self.made[reply.version] = self.made[to]
            self.rollbacks += 1
            self.expired += reply.expired

    def work(self, lease: Any) -> None:
        self.seen = self.rollbacks
        if lease.step not in self.weights:  # else it is in the version that was published before its trainer died
            self.judge(lease)
        self.perhaps_roll_back()  # the step is dropped then, or trained anew
        if self.rollbacks > self.seen and self.world.random.random() < 0.5:
            self.call(cmd.GiveBack(token=lease.token), lambda reply: self.ask())
        else:
            self.later(self.world.soon(), lambda: self.train(lease))

    def judge(self, lease: cmd.Leased) -> None:
        """The rows were made by weights that these descend from, in few steps."""
        for i in unpack_ids(lease.ids).tolist():
            version = self.world.ledger.rows[i].version
            if version is not None and lease.step not in self.full:
                made = self.made[version]
                assert self.weights[: len(made)] == made, "a row of weights that were given up"
                assert len(self.weights) - len(made) <= self.limit, "staleness"

    def train(self, lease: cmd.Leased) -> None:
        before = self.weights
        if self.rollbacks == self.seen and lease.step not in self.weights:
            self.weights = (*self.weights, lease.step)
            self.publish(lease.version + 1)
        self.perhaps_roll_back()
        if self.dies(self.mortality):
            if self.rollbacks == self.seen and self.world.random.random() < 0.5:
                self.kept = before
            return
        self.complete(lease, (), None, 0.2)
        self.acknowledging = lease.step

    def completed(self, reply: Any) -> None:
        super().completed(reply)
        if isinstance(reply, cmd.Completed):
            self.trained.append(self.acknowledging)
            self.perhaps_roll_back()
        self.ask()


class CheckpointedTrainer(Trainer):
    """Makes a checkpoint every so often, of which it keeps some, and goes on from the newest one when it has died.
    ``unsound``: how often that one turns out to be damaged."""

    deaths = 12
    """At most: without a checkpoint, every one of them begins anew."""

    def __init__(self, world: World, limit: int, mortality: float, every: int, keep: int, unsound: float) -> None:
        self.every, self.keep, self.unsound = every, keep, unsound
        self.points: list[tuple[int, int, tuple[int, ...]]] = []  # step, version, weights
        self.dropped: dict[int, list[int]] = {}
        super().__init__(world, limit, mortality)

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.say(cmd.OpenPublisher())
        covered = self.say(cmd.GetTrainingPosition()).covered
        if self.points and self.points[-1][0] > covered and self.world.random.random() < self.unsound:
            self.points.pop()
        assert self.points or not covered, "a checkpoint covers steps, and there is none"
        step, version, self.weights = self.points[-1] if self.points else (0, -1, ())
        resumed = self.say(cmd.Resume(step=step, version=version))
        assert isinstance(resumed, cmd.Resumed), resumed
        if resumed.publish:
            self.publish(resumed.version)
        elif self.world.ledger.version < 0:
            self.publish(0)
        self.ask()

    def dies(self, share: float) -> bool:
        return self.life <= self.deaths and super().dies(share)

    def got(self, reply: Any) -> None:
        if isinstance(reply, Ended):
            step = len(self.weights)
            assert self.say(cmd.AddCheckpoint(step=step, covers=step)) == cmd.Done()
        super().got(reply)

    def work(self, lease: Any) -> None:
        assert lease.step == len(self.weights), "steps come in order"
        self.later(self.world.soon(), lambda: self.train(lease))

    def train(self, lease: cmd.Leased) -> None:
        self.weights = (*self.weights, lease.step)
        if self.dies(self.mortality):
            return
        self.publish(lease.version + 1)
        if self.dies(self.mortality):
            return
        rows = range(len(unpack_ids(lease.ids)))
        drop = self.dropped.setdefault(lease.step, [i for i in rows if self.world.random.random() < 0.2])
        reply = self.say(cmd.Complete(token=lease.token, columns={}, filtered=packed(*drop)))
        assert isinstance(reply, cmd.Completed), reply
        if not self.dies(self.mortality) and not self.checkpoint(lease):
            self.ask()

    def checkpoint(self, lease: cmd.Leased) -> bool:
        """Returns True if it dies."""
        step = lease.step + 1
        if step % self.every:
            return False
        self.points.append((step, lease.version + 1, self.weights))
        if self.dies(self.mortality):
            return True
        self.points = self.points[-self.keep :]
        covers = self.points[0][0] if len(self.points) == self.keep else 0
        assert self.say(cmd.AddCheckpoint(step=step, covers=covers)) == cmd.Done()
        return self.dies(self.mortality)


class Rank(Worker):
    """One of ``size`` ranks that train a step in ``shards``: takes its shard, publishes (rank 0), acknowledges. Dies with a
    shard in hand, or while it waits, perhaps unseen."""

    def __init__(self, world: World, rank: int, size: int, shards: int, mortality: float) -> None:
        self.rank, self.size, self.shards = rank, size, shards
        self.acknowledged: list[int] = []
        super().__init__(world, "train", f"rank {rank}", mortality)

    def start(self) -> None:
        super().start()
        if self.rank == 0 and self.world.ledger.version < 0:
            self.publish(0)

    def publish(self, version: int) -> Any:
        """By a session of its own."""
        session = self.world.join("publisher")
        commands = [
            cmd.OpenPublisher(),
            cmd.Announce(version=version),
            cmd.Publish(version=version, part=part(version)),
        ]
        *_, reply = [self.world.say(session, command) for command in commands]
        self.world.say(session, cmd.CloseSession())
        assert isinstance(reply, cmd.PublishReply | ConfigError), reply

    def ask(self) -> None:
        lease = cmd.LeaseRows(
            task="train", count=1, timeout_s=2 * FOR_EVER, group="job", rank=self.rank, world_size=self.size,
            shards=self.shards,
        )  # fmt: skip
        self.call(lease, self.got)
        if self.world.random.random() < self.mortality / 2:
            self.later(self.world.soon(), self.end)

    def end(self) -> None:
        if self.world.random.random() < 0.8:
            self.dies(1.0)
        elif not self.over:  # it is restarted all the same
            self.life += 1
            self.world.hang(self.session)
            self.world.later(self.world.soon(), self.start)

    def work(self, reply: Any) -> None:
        assert isinstance(reply, cmd.Leased), reply
        chance = self.world.random.random()
        if chance < 0.1:
            renew = cmd.Renew(token=reply.token, rank=self.rank)
            self.later(self.world.soon(), lambda: self.call(renew, lambda said: None))
        if chance > 0.95:
            back = cmd.GiveBack(token=reply.token, rank=self.rank)
            self.later(self.world.soon(), lambda: self.call(back, lambda said: self.ask()))
        else:
            self.later(self.world.soon(), lambda: self.train(reply))

    def train(self, lease: cmd.Leased) -> None:
        if self.rank == 0:
            self.publish(lease.version + 1)
        if self.world.random.random() < self.mortality / 2:
            self.end()
        else:
            self.complete(lease, (), None, 0.2)

    def completed(self, reply: Any) -> None:
        super().completed(reply)
        self.ask()


def others(world: World, size: int, most: int, replicas: int, mortality: float, at_least: int = 0) -> None:
    """All who work beside a trainer: a feeder of groups of ``size``, ``most`` rows at a time, replicas, stages, a judge."""
    Feeder(world, size, most)
    for number in range(replicas):
        Replica(world, "rollout", f"replica {number}", mortality).eager = number % 2 == 1
    for _ in range(2):
        Stage(world, "reward", "reward", mortality, filters=0.1)
    Stage(world, "judge", "verdict", mortality / 2, filters=0.02, at_least=at_least)


def filtered(audit: Audit) -> Counter[str]:
    """Rows by how they ended, those that a trainer dropped among the consumed."""
    dropped = audit.reasons.get("filtered: no gradient in the step", 0)
    return Counter(audit.terminal) + Counter(consumed=dropped) - Counter(filtered=dropped)
