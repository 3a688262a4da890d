"""Random schedules: a checked ledger, and workers that lag, hang, die and come back.

Every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from checked_ledger import SERVER, Place
from hypothesis import HealthCheck, settings
from ledger_queue import TOKENS, Queue, packed, publishing

from asyncflow_sdk.errors import ConfigError, Ended, LeaseLost
from asyncflow_sdk.interfaces.store import HomeOffer
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import Audit

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


class World(Queue):
    """Runs workers, each event at its time."""

    def __init__(self, seed: int, *tasks: TaskSpec, **limits: Any) -> None:
        self.random = random.Random(seed)
        super().__init__(*tasks, options={"initial_rows": 16, "twin": False}, **limits)
        self._order = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self.asked: dict[int, Callable[[Any], None]] = {}  # ticket → what to do with the reply
        self.workers: list[Worker] = []

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self.now + seconds, next(self._order), what))

    def soon(self) -> float:
        """Seconds with a heavy tail."""
        return min(0.2 * self.random.paretovariate(1.1), 40.0)

    def lengths(self, count: int) -> bytes:
        """Measures, as a server reads them from payload."""
        return np.array([self.random.paretovariate(1.1) for _ in range(count)], "<f8").tobytes()

    def some(self, count: int, share: float) -> list[int]:
        """About this share of the first numbers."""
        return [i for i in range(count) if self.random.random() < share]

    def lose_some(self, share: float) -> int:
        """Some rows lose their payload. Returns how many."""
        ids = [i for i in self.live if self.random.random() < share]
        self.lose(*ids)
        assert not set(ids) & self.live.keys()
        return len(ids)

    def place_of_write(self, command: Any) -> Place:
        return self.random.choice(sorted(self.places)) if len(self.places) > 1 else SERVER

    def open_home(self, name: str, identity: str = "") -> None:
        home = cmd.OpenHome(offer=HomeOffer(store="hosts", name=name, identity=identity or name))
        opened = self.send(self.join(f"unit {name}"), home)
        assert isinstance(opened, cmd.HomeOpened | ConfigError), opened  # another unit may have it

    def strike(self, number: int) -> None:
        """Kill the unit of a home, to come back in time, late, with other contents or never; or evict the home."""
        home = self.homes[number]
        what = self.random.choice(["in time", "late", "wiped", "never", "evicted"])
        if number not in self.live_homes():
            return
        if what == "evicted":
            self.do(self.admin, cmd.EvictHome(home=number, epoch=home.epoch))
        elif home.unit is not None:
            self.die(home.unit)
        back = {"in time": 0.5, "late": 1.5, "wiped": 0.5, "evicted": 0.0}
        if what in back:
            identity = f"{home.name} after {self.now}" if what == "wiped" else home.identity
            self.later(back[what] * (self._limits.home_silence_s or 0.0), lambda: self.open_home(home.name, identity))

    @property
    def cut_short(self) -> bool:
        """True if rows of steps were lost when no more could be put."""
        return any(
            isinstance(each, ev.Note) and "training ends with fewer steps" in each.text for each in self.events
        )

    def run(self) -> Audit:
        """Until every worker is told the end. Returns the audit, of a ledger without live rows."""
        checked = 0
        while self._later or self.waiting or self.answers:
            assert self.tickets < 1_000_000, f"no end in sight: {self.status()}"
            if self.tickets >= checked + 50:
                checked = self.tickets
                self.check()
            for ticket, reply in self.answers.items():
                self.later(0.0, partial(self.asked.pop(ticket), reply))
            self.answers.clear()
            at = self._later[0][0] if self._later else FOR_EVER
            deadline = self.next_deadline()
            if deadline is not None and deadline <= at:
                assert deadline < FOR_EVER / 2, f"deadlock: {self.status()}"
                self.at(deadline)
            else:
                self.now = max(self.now, at)
                heapq.heappop(self._later)[2]()
        assert all(worker.over for worker in self.workers), self.status()
        self.check()
        audit = self.audit()
        assert audit.live == 0
        return audit


class Gone(Exception):
    """Ends the work of a worker that died, or was told the end."""


@dataclass
class Worker:
    """A session that does the ``work`` of a task. Dies now and then, and comes back."""

    world: World
    task: str
    work: Callable[[Any], Work]
    mortality: float = 0.0
    request: dict[str, Any] = field(default_factory=dict)  # fields of its requests for rows
    over: bool = False
    lives: int = 0  # a death begins another life, in which nothing happens

    def __post_init__(self) -> None:
        self.world.workers.append(self)
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.session = self.world.join(self.task)
        self.go(self.work(self))

    def go(self, work: Work, after: float = 0.0) -> None:
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
                self.world.asked[self.world.ask(self.session, awaited)] = resume

        self.world.later(after, resume)

    def say(self, command: Any) -> Any:
        """The reply to a command that is answered at once."""
        return self.world.send(self.session, command)

    def die(self, share: float | None = None, unseen: float = 0.0) -> None:
        """Perhaps. ``unseen``: how often its session stays, as of a process that hangs."""
        if not self.over and self.world.random.random() < (self.mortality if share is None else share):
            self.lives += 1
            if self.world.random.random() >= unseen:
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

    def lease(self) -> Work:
        count = max(self.world.random.randint(1, 6), self.request.get("at_least", 0))
        request = cmd.LeaseRows(task=self.task, timeout_s=2 * FOR_EVER, **{"count": count, **self.request})
        lease = yield from self.ask(request)
        ids = [lease.ids] if isinstance(lease, cmd.LeasedPart) else []
        while isinstance(lease, cmd.LeasedPart) and not lease.last:
            yield self.world.soon()
            self.between_parts()
            lease = yield from self.ask(msgspec.structs.replace(request, token=lease.token))
            if isinstance(lease, LeaseLost):
                return (yield from self.lease())
            ids.append(lease.ids)
        return msgspec.structs.replace(lease, ids=b"".join(ids)) if ids else lease

    def between_parts(self) -> None:
        """What is done before the next part of a step is asked for."""
        self.die()

    def complete(self, lease: cmd.Leased, at: list[int], filtered: list[int]) -> Work:
        """``at``: which rows of the lease; ``filtered``: which of these."""
        gives = self.world.tasks[self.task].gives
        reply = yield cmd.Complete(
            token=lease.token,
            columns=dict.fromkeys(gives, TOKENS),
            index=packed(*at) if gives else None,
            filtered=packed(*filtered),
            measures={name: self.world.lengths(len(at)) for name in gives},
            rank=lease.rank,
        )
        assert isinstance(reply, cmd.Completed | LeaseLost), reply
        return reply


def one(command: Any) -> Work:
    yield command


def feed(worker: Worker, size: int, most: int) -> Work:
    """Put what is wanted, at most ``most`` rows at a time, in groups of ``size``, and lost rows again."""
    world, position = worker.world, 0
    while True:
        wanted = yield from worker.ask(cmd.AwaitRowsWanted(timeout_s=2 * FOR_EVER, prefix="k-"))
        for key, groups in (wanted.lost or {f"k-{position}": max(1, min(wanted.count, most) // size)}).items():
            yield cmd.AddRows(
                groups=groups, group_size=size, columns={"prompt": TOKENS}, timeout_s=2 * FOR_EVER, key=key,
                priority=world.random.choice((0, 0, 1, -1)), measures={"prompt": world.lengths(groups)},
            )  # fmt: skip
        position += not wanted.lost
        yield world.soon()


def work(worker: Worker, eager: bool = False, straggles: float = 0.0, filters: float | None = None) -> Work:
    """Complete rows in parts, in any order. A replica (without ``filters``): one by one, and not all; loads new weights
    when told, or (eager) at will. A stage filters and returns some. ``straggles``: share of turns 100 times as long."""
    world = worker.world

    def end(lease: cmd.Leased, at: list[int]) -> Work:
        if filters is not None and world.random.random() < 0.1:
            yield cmd.GiveBack(token=lease.token, index=packed(*at))
        else:
            yield from worker.complete(lease, at, world.some(len(at), filters or 0.0))

    while True:
        lease = yield from worker.lease()
        if isinstance(lease, cmd.LoadFirst):
            yield world.soon()
            yield cmd.ReportLoaded(version=world.version)
            continue
        times = 100 if world.random.random() < straggles else 1
        rows = list(range(len(unpack_ids(lease.ids))))
        hangs, size = (
            (world.random.random() < 0.03, 1) if filters is None else (0, world.random.randint(1, len(rows)))
        )
        for start in range(hangs, len(rows), size):
            worker.go(end(lease, rows[start : start + size]), after=times * world.soon())
        if eager and world.version >= 0:
            worker.go(one(cmd.ReportLoaded(version=world.version)))
        yield times * world.soon()


def follow(worker: Worker) -> Work:
    """Be a rank that trains and leaves publishing to the first. Dies with a shard in hand, or while it waits, perhaps unseen."""
    world = worker.world

    def end() -> Work:
        yield world.soon()
        worker.die(1.0, unseen=0.2)

    while True:
        if world.random.random() < worker.mortality / 2:
            worker.go(end())
        lease = yield from worker.lease()
        chance = world.random.random()
        if chance < 0.1:
            worker.go(one(cmd.Renew(token=lease.token, rank=lease.rank)), after=world.soon())
        yield world.soon()
        if chance > 0.95:
            yield cmd.GiveBack(token=lease.token, rank=lease.rank)
            continue
        worker.die(worker.mortality / 2, unseen=0.2)
        rows = list(range(len(unpack_ids(lease.ids))))
        yield from worker.complete(lease, rows, world.some(len(rows), 0.2))


@dataclass(kw_only=True)
class Trainer(Worker):
    """Trains, publishes and acknowledges step after step; rolls back before, between or after these, or dies there.

    Weights are the tuple of steps that they were trained with. So what descends from what can be seen, and how old the
    rows of a step are. By its ``request`` it may be the first of a team of ranks, or take its steps in parts. With
    checkpoints, it goes on from the newest when it has died."""

    task: str = "train"
    work: Callable[[Any], Work] = field(default=lambda trainer: trainer.life())
    doubts: float = 0.0  # how often it rolls back
    every: int = 0  # it makes a checkpoint after so many steps
    keep: int = 1  # checkpoints
    unsound: float = 0.0  # how often the newest checkpoint turns out to be damaged
    # Without checkpoints, half of its deaths lose the update of a published step. Rows made by it must then not come into
    # a step that is filled anew.
    forgets: bool = True
    made: dict[int, tuple[int, ...]] = field(default_factory=dict)  # version → weights
    weights: tuple[int, ...] = ()
    kept: tuple[int, ...] | None = None  # weights that outlive its death
    full: set[int] = field(default_factory=set)  # steps that may hold rows of versions given up
    trained: list[int] = field(default_factory=list)
    dropped: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # of each step
    points: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)  # step, version, weights
    rollbacks: int = 0
    seen: int = 0  # rollbacks when it asked for its step

    def die(self, share: float | None = None, unseen: float = 0.0) -> None:
        if not self.every or self.lives <= 12:  # without a checkpoint, it begins anew
            super().die(share, unseen)

    def lease(self) -> Work:
        self.seen = self.rollbacks
        return (yield from super().lease())

    def between_parts(self) -> None:
        self.die()
        self.perhaps_roll_back()

    def life(self) -> Work:
        self.say(cmd.OpenPublisher())
        if self.every:
            self.resume()
        else:
            if self.world.version < 0:
                self.publish(0)
            self.weights = self.made[self.world.version] if self.kept is None else self.kept
            self.kept = None
        try:
            while True:
                lease = yield from self.lease()
                yield from self.train(lease)
        except Gone:
            if self.over and self.every:
                self.checkpoint(covers=len(self.weights))
            raise

    def resume(self) -> None:
        covered = self.say(cmd.GetTrainingPosition()).covered
        if self.points and self.points[-1][0] > covered and self.world.random.random() < self.unsound:
            self.points.pop()
        assert self.points or not covered, "a checkpoint covers steps, and there is none"
        step, version, self.weights = self.points[-1] if self.points else (0, -1, ())
        resumed = self.say(cmd.Resume(step=step, version=version))
        assert isinstance(resumed, cmd.Resumed), resumed
        if resumed.publish or self.world.version < 0:
            self.publish(max(resumed.version, 0))

    def train(self, lease: cmd.Leased) -> Work:
        seen, before = self.seen, self.weights
        if lease.step not in self.weights:  # else it is in the version that was published before its trainer died
            self.judge(lease)
        self.perhaps_roll_back()  # the step is dropped then, or trained anew
        if self.rollbacks > seen and self.world.random.random() < 0.5:
            yield cmd.GiveBack(token=lease.token)
            return
        yield self.world.soon()
        if self.rollbacks == seen and lease.step not in self.weights:
            self.weights = (*self.weights, lease.step)
            self.die()
            self.publish(lease.version + 1)
        self.perhaps_roll_back()
        try:
            self.die()
        except Gone:
            if self.forgets and self.rollbacks == seen and self.world.random.random() < 0.5:
                self.kept = before
            raise
        rows = list(range(len(unpack_ids(lease.ids))))
        dropped = self.dropped.setdefault((lease.step, len(rows)), self.world.some(len(rows), 0.2))
        if isinstance((yield from self.complete(lease, rows, dropped)), cmd.Completed):
            self.trained.append(lease.step)
            self.die()
            self.perhaps_roll_back()
        if self.every and len(self.weights) % self.every == 0:
            self.points.append((len(self.weights), lease.version + 1, self.weights))
            self.die()
            self.points = self.points[-self.keep :]
            self.checkpoint(covers=self.points[0][0] if len(self.points) == self.keep else 0)
            self.die()

    def judge(self, lease: cmd.Leased) -> None:
        """The rows were made by weights that these descend from, in few steps."""
        assert not self.every or lease.step == len(self.weights), "steps come in order"
        for i in [] if self.every or lease.step in self.full else unpack_ids(lease.ids).tolist():
            version = self.world.rows[i].version
            if version is not None:
                made = self.made[version]
                assert self.weights[: len(made)] == made, "a row of weights that were given up"
                assert len(self.weights) - len(made) <= self.world.most_staleness(), "staleness"

    def publish(self, version: int) -> None:
        for command in publishing(version)[1:3]:
            reply = self.say(command)
            assert isinstance(reply, cmd.PublishReply), reply
        self.made[version] = self.weights

    def perhaps_roll_back(self) -> None:
        if self.world.random.random() >= self.doubts:
            return
        status = self.world.status()
        to = self.world.random.choice([each.version for each in status.versions] + [max(status.version - 1, 0)])
        reply = self.say(cmd.Rollback(version=to))
        if isinstance(reply, cmd.RollbackDone):
            assert self.say(cmd.ReportRestored(version=reply.version)) == cmd.Done()
            self.full |= set(range(status.step))
            self.weights = self.made[reply.version] = self.made[to]
            self.rollbacks += 1

    def checkpoint(self, covers: int) -> None:
        assert self.say(cmd.AddCheckpoint(step=len(self.weights), covers=covers)) == cmd.Done()


def others(world: World, size: int, most: int, replicas: int, mortality: float, at_least: int = 0) -> None:
    """All who work beside a trainer: a feeder of groups of ``size``, ``most`` rows at a time, replicas, stages, a judge."""
    Worker(world, "", partial(feed, size=size, most=most))
    for number in range(replicas):
        Worker(world, "rollout", partial(work, eager=number % 2 == 1), mortality)
    for _ in range(2):
        Worker(world, "reward", partial(work, filters=0.1), mortality)
    Worker(world, "judge", partial(work, filters=0.02), mortality / 2, {"at_least": at_least})


def trained_rows(audit: Audit) -> int:
    """Rows that were in a step, also those that a trainer dropped."""
    return audit.consumed + audit.reasons.get("filtered: no gradient, as in a group with equal rewards", 0)
