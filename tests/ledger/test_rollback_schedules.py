"""Rollbacks under any schedule: a trainer that really has weights shows that the staleness rule holds, whatever they are
rolled back to. Weights are the list of steps they were trained with, so what descends from what can be seen."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from ledger_checks import check_counters
from ledger_queue import part
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

from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec


class Trainer(Worker):
    """Trains, publishes and acknowledges step after step; and rolls back before, between or after these, or dies there."""

    def __init__(self, world: World, limit: int, batch: int, mortality: float, doubts: float) -> None:
        self.limit, self.batch, self.doubts = limit, batch, doubts
        self.made: dict[int, tuple[int, ...]] = {}  # version → the steps it was trained with
        self.weights: tuple[int, ...] = ()
        self.full_before: set[int] = set()  # steps that were full at a rollback
        self.trained: list[int] = []
        self.rollbacks = self.expired = self.seen = 0
        self.own: tuple[int, ...] | None = None  # weights that it has kept
        super().__init__(world, "train", "trainer", mortality)

    def start(self) -> None:
        self.life += 1
        self.session = self.world.join(self.name)
        self.say(cmd.OpenPublisher())
        if self.world.ledger.version < 0:
            self.publish(0)
        current = self.made[self.world.ledger.version]
        self.weights = (
            current if self.own is None else self.own
        )  # it begins with what is current, or what it has kept
        self.own = None
        self.ask()

    def publish(self, version: int) -> None:
        for command in (cmd.Announce(version=version), cmd.Publish(version=version, part=part(version))):
            reply = self.say(command)
            assert isinstance(reply, cmd.Published), reply
        self.made[version] = self.weights

    def perhaps_roll_back(self) -> None:
        ledger = self.world.ledger
        if self.world.random.random() >= self.doubts:
            return
        steps = ledger.steps
        assert steps is not None
        full = {step for step, _ in steps.closed} | {lease.step for lease in steps.task.leases.values()}
        to = self.world.random.choice([*ledger.versions, max(ledger.version - 1, 0)])
        reply = self.say(cmd.Rollback(version=to))
        if isinstance(reply, cmd.RolledBack):
            assert isinstance(self.say(cmd.Restored(version=reply.version)), cmd.Done)
            self.full_before |= full
            self.weights = self.made[reply.version] = self.made[to]
            self.rollbacks += 1
            self.expired += reply.expired

    def work(self, lease: Any) -> None:
        self.seen = self.rollbacks
        if lease.step not in self.weights:  # else it is in what was published before its trainer died
            self.judge(lease)
        self.perhaps_roll_back()  # the step is dropped then, or trained anew
        if self.rolled_since() and self.world.random.random() < 0.5:
            self.call(cmd.GiveBack(token=lease.token), lambda reply: self.ask())
            return
        self.later(self.world.soon(), lambda: self.train(lease))

    def rolled_since(self) -> bool:
        return self.rollbacks > self.seen

    def train(self, lease: Any) -> None:
        before = self.weights
        if not self.rolled_since() and lease.step not in self.weights:  # else there is nothing to be trained
            self.weights = (*self.weights, lease.step)
            self.publish(lease.version + 1)
        self.perhaps_roll_back()
        if self.world.random.random() < self.mortality:
            self.life += 1
            if not self.rolled_since() and self.world.random.random() < 0.5:
                self.own = before  # of before it published this step
            self.world.die(self.session)
            self.world.later(1.0, self.start)
            return
        done = cmd.Complete(token=lease.token, columns={})
        self.call(done, lambda reply: self.completed_step(reply, lease))

    def completed_step(self, reply: Any, lease: Any) -> None:
        assert isinstance(reply, cmd.Completed), reply
        self.trained.append(lease.step)
        self.perhaps_roll_back()
        self.ask()

    def judge(self, lease: Any) -> None:
        """A step is of rows that weights made from which the trainer's descend, in few steps."""
        rows, now = self.world.ledger.rows, self.weights
        assert len(set(cmd.unpack_ids(lease.ids).tolist())) == self.batch
        for row in rows.at(cmd.unpack_ids(lease.ids)).tolist():
            first, last = self.made[int(rows.version[row])], self.made[int(rows.newest[row])]
            if lease.step in self.full_before:
                continue  # its rows may be of weights given up
            assert now[: len(first)] == first, "of weights that were given up"
            assert now[: len(last)] == last, "ended by weights that were given up"
            assert len(now) - len(first) <= self.limit, "staleness"


@schedules(60)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    steps=st.integers(2, 7),
    replicas=st.integers(1, 4),
    mortality=st.sampled_from([0.0, 0.05, 0.2]),
    doubts=st.sampled_from([0.05, 0.2, 0.4]),
    keep=st.sampled_from([1, 2, 4]),
    policy=ANY_POLICY,
)
@example(  # its replica waits already when the acknowledgement of a step from before a rollback lets it begin
    seed=0, staleness=0, size=4, groups=2, steps=3, replicas=1, mortality=0.05, doubts=0.4, keep=2,
    policy="wait",
)  # fmt: skip
@example(  # it is rolled back to weights that the step which is leased again has trained already
    seed=6, staleness=0, size=1, groups=1, steps=6, replicas=1, mortality=0.2, doubts=0.2, keep=2, policy="wait",
)  # fmt: skip
def test_a_run_that_is_rolled_back_at_any_time_trains_no_row_that_is_too_old_or_given_up(
    seed: int, staleness: int, size: int, groups: int, steps: int, replicas: int, mortality: float, doubts: float,
    keep: int, policy: str,
) -> None:  # fmt: skip
    batch = size * groups
    world = World(seed, limit=60_000 + 12_000 * steps * batch)
    limits = cmd.Configure(
        capacity_rows=4 * batch, max_staleness=staleness, steps=steps, keep_versions=keep,
        staleness=PolicySpec(policy),
    )  # fmt: skip
    world.set_up(limits, [*TASKS, train_task(batch, FOR_EVER / 4)])

    trainer = Trainer(world, most_staleness(policy, staleness), batch, mortality, doubts)
    workers = [trainer, *others(world, size, 2 * batch, replicas, mortality)]
    world.run()

    assert all(worker.over for worker in workers), world.ledger.status()
    assert trainer.trained == list(range(steps)), "each step once, in order"
    check_counters(world.ledger)
    audit = world.ledger.audit()
    assert audit.balanced
    assert audit.live == 0
    late = audit.reasons.get(f"expired: older than max_staleness {staleness} (policy 'drop')", 0)
    assert audit.expired == trainer.expired + late
    assert world.ledger.version == max(trainer.made)
