"""Whole runs under random schedules: no deadlock, nothing too old, nothing lost and nothing trained twice.

Replicas lag, hang and die, rows finish in heavy-tailed order, stages filter and give back, trainers die with a
step in hand, and filter at the acknowledgement. Every request waits without limit, so a lost wake-up is a deadlock.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_checks import check_counters
from schedules import (
    ANY_POLICY,
    FOR_EVER,
    TASKS,
    Feeder,
    Replica,
    Stage,
    Trainer,
    World,
    most_staleness,
    others,
    schedules,
    train_task,
)

from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger.commands import PolicySpec


@schedules(100)
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
    limits = cmd.Configure(capacity_rows=capacity, max_staleness=staleness, steps=steps, staleness=PolicySpec(policy))
    world.set_up(limits, world.random.sample([*TASKS, train_task(batch)], 4))

    trainer = Trainer(world, batch, most_staleness(policy, staleness), mortality)
    workers = [trainer, *others(world, size, size if tight else 2 * batch, replicas, mortality)]
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
    limits = cmd.Configure(max_staleness=staleness, steps=steps, staleness=PolicySpec("drop"))
    rollout = msgspec.structs.replace(TASKS[0], lease_s=5000)
    world.set_up(limits, [rollout, TASKS[1], train_task(batch, FOR_EVER / 4)])
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
