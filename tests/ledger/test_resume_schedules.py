"""Trainers that die at any moment and go on from a checkpoint, under any schedule: what they were trained with, in the end,
is every step once, with the rows it always had, and none of them too old. Weights are the list of steps in them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from ledger_checks import check_counters
from ledger_queue import packed, part
from schedules import (
    ANY_POLICY,
    FOR_EVER,
    TASKS,
    Worker,
    World,
    most_staleness,
    others,
    schedules,
    train_task,
)

from asyncflow_sdk.errors import Ended
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger import unpack_ids
from asyncflow_sdk.ledger.commands import PolicySpec

MOST = 12
"""Deaths: without a checkpoint, every one of them begins anew."""


class Trainer(Worker):
    """Trains, publishes, acknowledges, and every so often makes a checkpoint, of which it keeps some; dies between any two
    of these. ``unsound``: how often the newest checkpoint turns out to be damaged."""

    def __init__(self, world: World, limit: int, every: int, keep: int, mortality: float, unsound: float) -> None:
        self.limit, self.every, self.keep, self.unsound = limit, every, keep, unsound
        self.weights: tuple[int, ...] = ()
        self.given: dict[int, list[int]] = {}
        self.dropped: dict[int, list[int]] = {}
        self.points: list[tuple[int, int, tuple[int, ...]]] = []  # step, version, weights
        self.resumed = self.again = 0
        super().__init__(world, "train", "trainer", mortality)

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.say(cmd.OpenPublisher())
        covered = self.world.ledger.covered
        if self.points and self.points[-1][0] > covered and self.world.random.random() < self.unsound:
            self.points.pop()
        if covered:
            assert self.points, "a checkpoint covers steps, and there is none"
        step, version, self.weights = self.points[-1] if self.points else (0, -1, ())
        reply = self.say(cmd.Resume(step=step, version=version))
        assert isinstance(reply, cmd.Resumed), reply
        assert (reply.step, len(self.weights)) == (step, step)
        self.resumed, self.again = self.resumed + 1, self.again + reply.again
        if reply.publish:
            self.publish(reply.version)
        elif self.world.ledger.version < 0:
            self.publish(0)
        self.ask()

    def publish(self, version: int) -> None:
        for command in (cmd.Announce(version=version), cmd.Publish(version=version, part=part(version))):
            reply = self.say(command)
            assert isinstance(reply, cmd.Published), reply
        assert self.world.ledger.lineage.step(version) == len(self.weights), "a version is trained at its step"

    def dies(self) -> bool:
        if self.resumed > MOST or self.world.random.random() >= self.mortality:
            return False
        self.life += 1
        self.world.die(self.session)
        self.world.later(self.world.random.choice([0.1, 1.0, 30.0]), self.start)
        return True

    def got(self, reply: Any) -> None:
        if isinstance(reply, Ended):
            step = len(self.weights)
            assert self.say(cmd.Checkpoint(step=step, covers=step)) == cmd.Done()
        super().got(reply)

    def work(self, lease: Any) -> None:
        assert lease.step == len(self.weights), "steps come in order"
        ids = unpack_ids(lease.ids).tolist()
        assert self.given.setdefault(lease.step, ids) == ids, "a step is leased again whole, with the same rows"
        ledger = self.world.ledger
        at = ledger.rows.at(unpack_ids(lease.ids))
        for version in {*ledger.rows.version[at].tolist(), *ledger.rows.newest[at].tolist()}:
            assert 0 <= lease.step - ledger.lineage.step(version) <= self.limit, "staleness"
        self.later(self.world.soon(), lambda: self.train(lease))

    def train(self, lease: Any) -> None:
        self.weights = (*self.weights, lease.step)
        if self.dies():
            return
        self.publish(lease.version + 1)
        if self.dies():
            return
        count = len(unpack_ids(lease.ids))
        drop = self.dropped.setdefault(lease.step, [i for i in range(count) if self.world.random.random() < 0.2])
        reply = self.say(cmd.Complete(token=lease.token, columns={}, filtered=packed(*drop)))
        assert isinstance(reply, cmd.Completed), reply
        if self.dies():
            return
        step = lease.step + 1
        if step % self.every == 0:
            self.points.append((step, lease.version + 1, self.weights))
            if self.dies():
                return
            self.points = self.points[-self.keep :]
            covers = self.points[0][0] if len(self.points) == self.keep else 0
            assert self.say(cmd.Checkpoint(step=step, covers=covers)) == cmd.Done()
            if self.dies():
                return
        self.ask()


@schedules(80)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    steps=st.integers(2, 9),
    replicas=st.integers(1, 4),
    mortality=st.sampled_from([0.0, 0.05, 0.2]),
    deaths=st.sampled_from([0.05, 0.15, 0.3]),
    every=st.sampled_from([1, 2, 3, 50]),
    keep=st.sampled_from([1, 2]),
    unsound=st.sampled_from([0.0, 0.3]),
    quorum=st.sampled_from([0, 0, 1]),
    policy=ANY_POLICY,
)
def test_a_trainer_that_dies_at_any_time_trains_each_step_once_in_what_survives(
    seed: int, staleness: int, size: int, groups: int, steps: int, replicas: int, mortality: float, deaths: float,
    every: int, keep: int, unsound: float, quorum: int, policy: str,
) -> None:  # fmt: skip
    batch = size * groups
    world = World(seed, limit=100_000 + 40_000 * steps * batch)
    limits = cmd.Configure(
        capacity_rows=4 * batch, max_staleness=staleness, steps=steps, checkpoints=True, quorum=quorum,
        staleness=PolicySpec(policy),
    )  # fmt: skip
    world.set_up(limits, [*TASKS, train_task(batch, FOR_EVER / 4)])

    trainer = Trainer(world, most_staleness(policy, staleness), every, keep, deaths, unsound)
    workers = [trainer, *others(world, size, 2 * batch, replicas, mortality)]
    world.run()

    assert all(worker.over for worker in workers), world.ledger.status()
    assert trainer.weights == tuple(range(steps)), "each step once, in order"
    check_counters(world.ledger)
    audit = world.ledger.audit()
    assert audit.balanced
    assert audit.live == 0
    assert set(world.retired.values()) <= {1}, "a row ended twice"
    rows = [row for step in range(steps) for row in trainer.given[step]]
    assert len(set(rows)) == steps * batch
    dropped = sum(map(len, trainer.dropped.values()))
    assert (audit.consumed, audit.reasons.get("filtered: no gradient in the step", 0)) == (
        steps * batch - dropped,
        dropped,
    )
