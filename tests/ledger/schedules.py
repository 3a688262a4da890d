"""Random schedules: a checked ledger, and workers that lag, hang, die and come back.

Every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

import heapq
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any

import numpy as np
import pytest
from checked_ledger import CheckedLedger
from hypothesis import HealthCheck, settings
from ledger_queue import TOKENS, packed, part, publishing

from asyncflow_sdk.errors import ConfigError, Ended, LeaseLost
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
FOR_EVER = 1e9
TASKS = (
    TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=60, max_attempts=4, admits=True),
    TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=30),
    TaskSpec(name="judge", needs=("response",), gives=("verdict",), lease_s=30),
)
Work = Generator[Any, Any, Any]
"""Yields a command, and gets its reply; or seconds, and goes on after them."""


def train_task(batch: int, lease_s: float = 50.0) -> TaskSpec:
    return TaskSpec(name="train", needs=("response", "reward"), batch_rows=batch, lease_s=lease_s)


def schedules(quick: int) -> Callable[[Any], Any]:
    """How many schedules a test tries."""
    limits = settings(max_examples=1500 if LONG else quick, deadline=None, suppress_health_check=list(HealthCheck))
    return lambda test: pytest.mark.timeout(3600 if LONG else 900)(limits(test))


class World(CheckedLedger):
    """Runs workers, each event at its time. ``limit``: of commands, in a run that ends."""

    def __init__(self, seed: int, limit: int, limits: cmd.Configure, tasks: Iterable[TaskSpec]) -> None:
        super().__init__(twin=False, initial_rows=16)
        self.random, self.limit, self._order = random.Random(seed), limit, 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._asked: dict[int, tuple[int, Callable[[Any], None]]] = {}  # ticket → session, what to do with the reply
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

    def some(self, count: int, share: float) -> list[int]:
        """About this share of the first numbers."""
        return [i for i in range(count) if self.random.random() < share]

    def call(self, session: int, command: Any, then: Callable[[Any], None]) -> None:
        self._asked[self.tickets + 1] = session, then
        self.ask(session, command)
        self._pass_on()

    def say(self, session: int, command: Any) -> Any:
        """The reply to a command that is answered at once."""
        reply = self.send(session, command)
        self._pass_on()
        return reply

    def die(self, session: int) -> None:
        self._asked = {ticket: asked for ticket, asked in self._asked.items() if asked[0] != session}
        super().die(session)
        self._pass_on()

    def lose_some(self, share: float) -> int:
        """Some rows lose their payload. Returns how many."""
        ids = [i for i in self.live if self.random.random() < share]
        self.lose(*ids)
        self._pass_on()
        assert not set(ids) & self.live.keys()
        for worker in self.workers:  # the last step may have been opened again
            if worker.over and not self.status().over:
                worker.over = False
                worker.start()
        return len(ids)

    def _pass_on(self) -> None:
        assert self.tickets < self.limit, f"no end in sight: {self.status()}"
        if self.tickets % 50 == 0:
            self.check()
        for ticket, reply in self.answers.items():
            _, then = self._asked.pop(ticket)
            self.later(0.0, lambda then=then, reply=reply: then(reply))
        self.answers.clear()

    def run(self) -> cmd.Audit:
        """Until every worker is told the end. Returns the audit, of a ledger without live rows."""
        while self._later or self._asked:
            at = self._later[0][0] if self._later else FOR_EVER
            deadline = self.next_deadline()
            if deadline is not None and deadline < at:
                assert deadline < FOR_EVER / 2, f"deadlock: {self.status()}"
                self.at(deadline)
                self._pass_on()
                continue
            self.now = max(self.now, at)
            heapq.heappop(self._later)[2]()
        assert all(worker.over for worker in self.workers), self.status()
        self.check()
        audit = self.audit()
        assert audit.live == 0
        return audit


class Gone(Exception):
    """Ends the work of a worker that died, or that was told the end."""


class Worker:
    """A session that does the ``work`` of a task, with ``options``. Dies now and then, and comes back."""

    def __init__(
        self, world: World, task: str, work: Callable[..., Work], mortality: float = 0.0, **options: Any
    ) -> None:
        self.world, self.task, self.mortality = world, task, mortality
        self.over, self.lives = False, 0  # a death begins another life, in which nothing happens
        self._work, self._options = work, options
        world.workers.append(self)
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.session = self.world.join(self.task)
        self.go(self._work(self, **self._options))

    def go(self, work: Work, after: float | None = None) -> None:
        """Do it beside what else is done, as long as this life lasts."""
        life = self.lives

        def resume(got: Any = None) -> None:
            if life != self.lives:
                return
            try:
                awaited = work.send(got)
            except (StopIteration, Gone):
                return
            if isinstance(awaited, float):
                self.world.later(awaited, resume)
            else:
                self.world.call(self.session, awaited, resume)

        if after is None:
            resume()
        else:
            self.world.later(after, resume)

    def say(self, command: Any) -> Any:
        return self.world.say(self.session, command)

    def die(self, share: float | None = None) -> None:
        """Perhaps."""
        if not self.over and self.world.random.random() < (self.mortality if share is None else share):
            self.lives += 1
            self.world.die(self.session)
            self.world.later(self.world.random.choice([0.1, 1.0, self.world.soon()]), self.start)
            raise Gone

    def ask(self, command: Any) -> Work:
        """The reply, unless it is the end, or it dies with it in hand."""
        reply = yield command
        if isinstance(reply, Ended):
            self.over = True
            raise Gone
        self.die()
        return reply

    def lease(self, at_least: int = 0) -> Work:
        count = max(self.world.random.randint(1, 6), at_least)
        lease = cmd.Lease(task=self.task, count=count, timeout_s=2 * FOR_EVER, at_least=at_least)
        return (yield from self.ask(lease))

    def complete(self, lease: cmd.Leased, at: list[int] | None, share: float) -> Work:
        """``share``: of the rows, that is filtered."""
        count = len(unpack_ids(lease.ids)) if at is None else len(at)
        gives = self.world.tasks[self.task].gives
        reply = yield cmd.Complete(
            token=lease.token,
            columns=dict.fromkeys(gives, TOKENS),
            index=None if at is None else packed(*at),
            filtered=packed(*self.world.some(count, share)),
            measures={name: self.world.lengths(count) for name in gives},
            rank=lease.rank,
        )
        assert isinstance(reply, cmd.Completed | LeaseLost), reply
        return reply


def one(command: Any) -> Work:
    yield command


def feed(worker: Worker, size: int, most: int) -> Work:
    """Put what is wanted, at most ``most`` rows at a time, in groups of ``size``."""
    world = worker.world
    while True:
        wanted = yield from worker.ask(cmd.Wanted(timeout_s=2 * FOR_EVER))
        groups = max(1, min(wanted.count, most) // size)
        yield from worker.ask(cmd.Put(
            groups=groups, group_size=size, columns={"prompt": TOKENS}, timeout_s=2 * FOR_EVER,
            priority=world.random.choice((0, 0, 1, -1)), measures={"prompt": world.lengths(groups)},
        ))  # fmt: skip
        yield world.soon()


def generate(worker: Worker, eager: bool = False, straggles: float = 0.0) -> Work:
    """Each row ends by itself, in any order. Load new weights when told, or (eager) when it likes. ``straggles``: how often
    it takes a hundred times as long."""
    world = worker.world
    while True:
        reply = yield from worker.lease()
        if isinstance(reply, cmd.LoadFirst):
            yield world.soon()
            yield cmd.Loaded(version=world.version)
            continue
        times = 100 if world.random.random() < straggles else 1
        hangs = world.random.random() < 0.03
        for at in range(hangs, len(unpack_ids(reply.ids))):
            worker.go(worker.complete(reply, [at], 0.0), after=times * world.soon())
        if eager and world.version >= 0:
            worker.go(one(cmd.Loaded(version=world.version)))
        yield times * world.soon()


def score(worker: Worker, filters: float, at_least: int = 0) -> Work:
    """Give a column: in parts, filtering some groups, giving some back."""
    world = worker.world

    def give(lease: cmd.Leased, at: list[int]) -> Work:
        if world.random.random() < 0.1:
            yield cmd.GiveBack(token=lease.token, index=packed(*at))
        else:
            yield from worker.complete(lease, at, filters)

    while True:
        lease = yield from worker.lease(at_least)
        count = len(unpack_ids(lease.ids))
        cut = world.random.randint(0, count)
        for at in (list(range(cut)), list(range(cut, count))):
            if at:
                worker.go(give(lease, at), after=world.soon())
        yield world.soon()


def train_as_rank(worker: Worker, rank: int, size: int, shards: int) -> Work:
    """Be one of ``size`` ranks that train a step in ``shards``: take its shard, publish (rank 0), acknowledge. Die with a
    shard in hand, or while it waits, perhaps unseen."""
    world = worker.world

    def publish(version: int) -> None:
        """By a session of its own."""
        session = world.join("publisher")
        *_, reply, _ = [world.say(session, command) for command in [*publishing(version)[:3], cmd.Leave()]]
        assert isinstance(reply, cmd.Published | ConfigError), reply

    def end() -> Work:
        yield from ()
        if world.random.random() < 0.8:
            worker.die(1.0)
        elif not worker.over:  # it hangs, and is started again all the same
            worker.lives += 1
            world.later(world.soon(), worker.start)
            raise Gone

    if rank == 0 and world.version < 0:
        publish(0)
    while True:
        if world.random.random() < worker.mortality / 2:
            worker.go(end(), after=world.soon())
        lease = yield from worker.ask(cmd.Lease(
            task="train", count=1, timeout_s=2 * FOR_EVER, team="job", rank=rank, world_size=size, shards=shards,
        ))  # fmt: skip
        chance = world.random.random()
        if chance < 0.1:
            worker.go(one(cmd.Renew(token=lease.token, rank=rank)), after=world.soon())
        yield world.soon()
        if chance > 0.95:
            yield cmd.GiveBack(token=lease.token, rank=rank)
            continue
        if rank == 0:
            publish(lease.version + 1)
        if world.random.random() < worker.mortality / 2:
            yield from end()
        yield from worker.complete(lease, None, 0.2)


class Trainer(Worker):
    """Trains, publishes and acknowledges step after step; rolls back before, between or after these, or dies there.

    Weights are the tuple of steps that they were trained with. So what descends from what can be seen, and how old the
    rows of a step are. ``doubts``: how often it rolls back. ``limit``: of the staleness."""

    def __init__(self, world: World, limit: int, mortality: float = 0.0, doubts: float = 0.0) -> None:
        self.limit, self.doubts = limit, doubts
        self.made: dict[int, tuple[int, ...]] = {}  # version → weights
        self.weights: tuple[int, ...] = ()
        self.kept: tuple[int, ...] | None = None  # weights that outlive its death
        self.full: set[int] = set()  # steps that may hold rows of versions given up
        self.trained: list[int] = []
        self.rollbacks = self.expired = 0
        super().__init__(world, "train", type(self).life, mortality)

    def life(self) -> Work:
        self.say(cmd.OpenPublisher())
        if self.world.version < 0:
            self.publish(0)
        self.weights = self.made[self.world.version] if self.kept is None else self.kept
        self.kept = None
        while True:
            lease = yield from self.lease()
            seen = self.rollbacks
            if lease.step not in self.weights:  # else it is in the version that was published before its trainer died
                self.judge(lease)
            self.perhaps_roll_back()  # the step is dropped then, or trained anew
            if self.rollbacks > seen and self.world.random.random() < 0.5:
                yield cmd.GiveBack(token=lease.token)
                continue
            yield self.world.soon()
            before = self.weights
            if self.rollbacks == seen and lease.step not in self.weights:
                self.weights = (*self.weights, lease.step)
                self.publish(lease.version + 1)
            self.perhaps_roll_back()
            try:
                self.die()
            except Gone:
                if self.rollbacks == seen and self.world.random.random() < 0.5:
                    self.kept = before
                raise
            if isinstance((yield from self.complete(lease, None, 0.2)), cmd.Completed):
                self.trained.append(lease.step)
                self.perhaps_roll_back()

    def publish(self, version: int) -> None:
        for command in (cmd.Announce(version=version), cmd.Publish(version=version, part=part(version))):
            reply = self.say(command)
            assert isinstance(reply, cmd.Published), reply
        self.made[version] = self.weights

    def perhaps_roll_back(self) -> None:
        if self.world.random.random() >= self.doubts:
            return
        status = self.world.status()
        to = self.world.random.choice([each.version for each in status.versions] + [max(status.version - 1, 0)])
        reply = self.say(cmd.Rollback(version=to))
        if isinstance(reply, cmd.RolledBack):
            assert self.say(cmd.Restored(version=reply.version)) == cmd.Done()
            self.full |= set(range(status.step))
            self.weights = self.made[reply.version] = self.made[to]
            self.rollbacks += 1
            self.expired += reply.expired

    def judge(self, lease: cmd.Leased) -> None:
        """The rows were made by weights that these descend from, in few steps."""
        for i in unpack_ids(lease.ids).tolist():
            version = self.world.rows[i].version
            if version is not None and lease.step not in self.full:
                made = self.made[version]
                assert self.weights[: len(made)] == made, "a row of weights that were given up"
                assert len(self.weights) - len(made) <= self.limit, "staleness"


class CheckpointedTrainer(Trainer):
    """Makes a checkpoint every so often, of which it keeps some, and goes on from the newest one when it has died.
    ``unsound``: how often that one turns out to be damaged. It dies a few times at most: without a checkpoint, it begins anew."""

    def __init__(self, world: World, limit: int, mortality: float, every: int, keep: int, unsound: float) -> None:
        self.every, self.keep, self.unsound = every, keep, unsound
        self.points: list[tuple[int, int, tuple[int, ...]]] = []  # step, version, weights
        self.dropped: dict[int, list[int]] = {}
        super().__init__(world, limit, mortality)

    def die(self, share: float | None = None) -> None:
        if self.lives <= 12:
            super().die(share)

    def life(self) -> Work:
        self.say(cmd.OpenPublisher())
        covered = self.say(cmd.GetCut()).covered
        if self.points and self.points[-1][0] > covered and self.world.random.random() < self.unsound:
            self.points.pop()
        assert self.points or not covered, "a checkpoint covers steps, and there is none"
        step, version, self.weights = self.points[-1] if self.points else (0, -1, ())
        resumed = self.say(cmd.Resume(step=step, version=version))
        assert isinstance(resumed, cmd.Resumed), resumed
        if resumed.publish or self.world.version < 0:
            self.publish(max(resumed.version, 0))
        try:
            while True:
                lease = yield from self.lease()
                yield from self.train(lease)
        except Gone:
            if self.over:
                self.checkpoint(covers=len(self.weights))
            raise

    def train(self, lease: cmd.Leased) -> Work:
        assert lease.step == len(self.weights), "steps come in order"
        yield self.world.soon()
        self.weights = (*self.weights, lease.step)
        self.die()
        self.publish(lease.version + 1)
        self.die()
        dropped = self.dropped.setdefault(lease.step, self.world.some(len(unpack_ids(lease.ids)), 0.2))
        reply = self.say(cmd.Complete(token=lease.token, columns={}, filtered=packed(*dropped)))
        assert isinstance(reply, cmd.Completed), reply
        self.die()
        if len(self.weights) % self.every == 0:
            self.points.append((len(self.weights), lease.version + 1, self.weights))
            self.die()
            self.points = self.points[-self.keep :]
            self.checkpoint(covers=self.points[0][0] if len(self.points) == self.keep else 0)
            self.die()

    def checkpoint(self, covers: int) -> None:
        assert self.say(cmd.Checkpoint(step=len(self.weights), covers=covers)) == cmd.Done()


def others(world: World, size: int, most: int, replicas: int, mortality: float, at_least: int = 0) -> None:
    """All who work beside a trainer: a feeder of groups of ``size``, ``most`` rows at a time, replicas, stages, a judge."""
    Worker(world, "", feed, size=size, most=most)
    for number in range(replicas):
        Worker(world, "rollout", generate, mortality, eager=number % 2 == 1)
    for _ in range(2):
        Worker(world, "reward", score, mortality, filters=0.1)
    Worker(world, "judge", score, mortality / 2, filters=0.02, at_least=at_least)


def filtered(audit: cmd.Audit) -> Counter[str]:
    """Rows by how they ended, those that a trainer dropped among the consumed."""
    dropped = audit.reasons.get("filtered: no gradient in the step", 0)
    return Counter(audit.terminal) + Counter(consumed=dropped) - Counter(filtered=dropped)
