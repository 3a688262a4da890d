"""Whole runs under random schedules: no deadlock, nothing too old, nothing lost and nothing trained twice.

Replicas lag, hang and die, rows finish in heavy-tailed order, stages filter and give back, payload is lost, trainers
die with a step in hand, roll back, and go on from checkpoints. ``CheckedLedger`` checks rows, steps and versions after
every command; the tests check how a run ends.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedules import (
    FOR_EVER,
    TASKS,
    Trainer,
    Worker,
    World,
    feed,
    follow,
    others,
    schedules,
    train_task,
    trained_rows,
    work,
)

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.types.reports import Audit
from asyncflow_sdk.types.tasks import PolicySpec, SamplerSpec

pytestmark = pytest.mark.fast
SEEDS = st.integers(0, 2**32)
STALENESS = st.sampled_from([0, 1, 2, 4])
SIZES = st.sampled_from([1, 2, 4])
MORTALITY = st.sampled_from([0.0, 0.05, 0.2])
POLICIES = st.sampled_from(["wait", "drop", "count"])
PARTS = st.sampled_from([None, None, 0, 1, 3])
"""Least rows of a part; None: whole steps."""


def in_parts(parts: int | None, batch: int) -> dict[str, Any]:
    """Fields of a trainer's requests."""
    return {} if parts is None else {"parts": True, "at_least": min(parts, batch)}


def late(audit: Audit, staleness: int) -> int:
    """Rows that expired because a step was filled without them."""
    return audit.reasons.get(f"expired: older than max_staleness {staleness} (policy 'drop')", 0)


@schedules(30)
@given(
    seed=SEEDS, staleness=STALENESS, size=SIZES, groups=st.integers(1, 4), steps=st.integers(1, 6),
    replicas=st.integers(1, 4), mortality=MORTALITY, tight=st.booleans(), policy=POLICIES,
    doubts=st.sampled_from([0.0, 0.0, 0.05, 0.2, 0.4]), keep=st.sampled_from([1, 2, 4]), parts=PARTS,
)  # fmt: skip
@example(  # its replica waits already when the acknowledgement of a step from before a rollback lets it begin
    seed=0, staleness=0, size=4, groups=2, steps=3, replicas=1, mortality=0.05, tight=False, policy="wait", doubts=0.4,
    keep=2, parts=None,
)  # fmt: skip
@example(  # it is rolled back to weights that the step which is leased again has trained already
    seed=6, staleness=0, size=1, groups=1, steps=6, replicas=1, mortality=0.2, tight=False, policy="wait", doubts=0.2,
    keep=2, parts=None,
)  # fmt: skip
@example(  # its replica reports the load of a version which was rolled back in the same instant
    seed=21805, staleness=1, size=1, groups=1, steps=4, replicas=2, mortality=0.0, tight=False, policy="count",
    doubts=0.2, keep=2, parts=None,
)  # fmt: skip
@example(  # it is rolled back to a version that is itself a rollback, and that has trained the step which it holds
    seed=4, staleness=0, size=2, groups=4, steps=3, replicas=2, mortality=0.2, tight=True, policy="wait", doubts=0.4,
    keep=2, parts=0,
)  # fmt: skip
def test_a_run_under_any_schedule_ends_with_every_row_accounted_for(
    seed: int, staleness: int, size: int, groups: int, steps: int, replicas: int, mortality: float, tight: bool,
    policy: str, doubts: float, keep: int, parts: int | None,
) -> None:  # fmt: skip
    batch = size * groups
    world = World(
        seed, *TASKS, train_task(batch, FOR_EVER / 4 if doubts else 50.0), max_staleness=staleness, steps=steps,
        staleness=PolicySpec(policy), capacity_rows=batch if tight else 4 * batch, keep_versions=keep,
    )  # fmt: skip
    trainer = Trainer(world, mortality, in_parts(parts, batch), doubts=doubts)
    others(world, size, size if tight else 2 * batch, replicas, mortality)

    audit = world.run()

    assert trainer.trained == list(range(steps)), "each step once, in order"
    assert trained_rows(audit) == steps * batch
    rolled_back = sum(count for why, count in audit.reasons.items() if why.endswith("was rolled back"))
    assert audit.expired == rolled_back + late(audit, staleness)
    assert doubts or late(audit, staleness) <= staleness * batch * steps, "what may be given up"
    assert world.version == max(trainer.made)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_drop_never_starves_and_gives_up_no_more_than_was_under_way(staleness: int) -> None:
    batch, steps = 8, 20
    rollout = msgspec.structs.replace(TASKS[0], lease_s=5000)
    world = World(
        staleness, rollout, TASKS[1], train_task(batch, FOR_EVER / 4), max_staleness=staleness, steps=steps,
        staleness=PolicySpec("drop"),
    )  # fmt: skip
    trainer = Trainer(world)
    Worker(world, "", partial(feed, size=2, most=2 * batch))
    for _ in range(3):
        Worker(world, "rollout", partial(work, straggles=0.3))
    Worker(world, "reward", partial(work, filters=0.1))

    audit = world.run()

    assert trainer.trained == list(range(steps))
    assert audit.expired <= staleness * batch * steps
    assert (audit.expired > 0) == (staleness > 0)  # with stragglers like these some are


@schedules(15)
@given(
    seed=SEEDS, staleness=STALENESS, size=SIZES, groups=st.integers(1, 4), steps=st.integers(1, 6),
    mortality=st.sampled_from([0.0, 0.05]), tight=st.booleans(), disasters=st.integers(1, 4),
    share=st.sampled_from([0.05, 0.3, 1.0]), parts=PARTS,
)  # fmt: skip
@example(  # a step is leased in parts, and a row that is in none of them is lost between two of them
    seed=4130, staleness=2, size=1, groups=2, steps=5, mortality=0.05, tight=False, disasters=3, share=0.05, parts=0,
)  # fmt: skip
def test_a_run_that_loses_payload_at_any_time_still_trains_every_step(
    seed: int, staleness: int, size: int, groups: int, steps: int, mortality: float, tight: bool, disasters: int,
    share: float, parts: int | None,
) -> None:  # fmt: skip
    batch, lost = size * groups, []
    world = World(
        seed, *TASKS, train_task(batch), max_staleness=staleness, steps=steps,
        capacity_rows=batch if tight else 4 * batch,
    )  # fmt: skip
    trainer = Trainer(world, mortality, in_parts(parts, batch), forgets=False)
    others(world, size, size if tight else 2 * batch, 2, mortality)
    for _ in range(disasters):
        world.later(world.random.uniform(0, 60), lambda: lost.append(world.lose_some(share)))

    audit = world.run()

    assert trainer.trained == list(range(len(trainer.trained) if world.cut_short else steps))
    assert audit.reasons.get("failed: payload lost", 0) >= sum(lost)


@schedules(25)
@given(
    seed=SEEDS, staleness=STALENESS, size=SIZES, groups=st.integers(1, 4), steps=st.integers(1, 6),
    mortality=st.sampled_from([0.0, 0.05]), tight=st.booleans(), disasters=st.integers(1, 12), homes=st.integers(1, 3),
    silence=st.sampled_from([0.0, 1.0, 20.0]), parts=PARTS, policy=POLICIES,
)  # fmt: skip
def test_a_run_whose_homes_are_lost_at_any_time_still_trains_every_step(
    seed: int, staleness: int, size: int, groups: int, steps: int, mortality: float, tight: bool, disasters: int,
    homes: int, silence: float, parts: int | None, policy: str,
) -> None:  # fmt: skip
    batch = size * groups
    world = World(
        seed, *TASKS, train_task(batch), max_staleness=staleness, steps=steps, staleness=PolicySpec(policy),
        capacity_rows=batch if tight else 4 * batch, home_silence_s=silence,
    )  # fmt: skip
    for name in "abc"[:homes]:
        world.open_home(name)
    trainer = Trainer(world, mortality, in_parts(parts, batch), forgets=False)
    others(world, size, size if tight else 2 * batch, 2, mortality)
    for _ in range(disasters):
        world.later(world.random.uniform(0, 60), lambda: world.strike(world.random.randint(1, homes)))

    audit = world.run()

    assert trainer.trained == list(range(len(trainer.trained) if world.cut_short else steps))
    assert trained_rows(audit) <= steps * batch, "rows that were trained and not judged yet may have failed"


@schedules(15)
@given(
    seed=SEEDS, staleness=STALENESS, size=SIZES, groups=st.integers(1, 3), steps=st.integers(2, 9),
    replicas=st.integers(1, 4), mortality=MORTALITY, deaths=st.sampled_from([0.05, 0.15, 0.3]),
    every=st.sampled_from([1, 2, 3, 50]), keep=st.sampled_from([1, 2]), unsound=st.sampled_from([0.0, 0.3]),
    quorum=st.sampled_from([0, 0, 1]), policy=POLICIES, parts=PARTS,
)  # fmt: skip
def test_a_trainer_that_dies_at_any_time_trains_each_step_once_in_what_survives(
    seed: int, staleness: int, size: int, groups: int, steps: int, replicas: int, mortality: float, deaths: float,
    every: int, keep: int, unsound: float, quorum: int, policy: str, parts: int | None,
) -> None:  # fmt: skip
    batch = size * groups
    world = World(
        seed, *TASKS, train_task(batch, FOR_EVER / 4), max_staleness=staleness, steps=steps, checkpoints=True,
        staleness=PolicySpec(policy), capacity_rows=4 * batch, quorum=quorum,
    )  # fmt: skip
    trainer = Trainer(world, deaths, in_parts(parts, batch), every=every, keep=keep, unsound=unsound)
    others(world, size, 2 * batch, replicas, mortality)

    audit = world.run()

    assert trainer.weights == tuple(range(steps)), "each step once, in order"
    dropped = sum(map(len, trainer.dropped.values()))
    assert audit.consumed == steps * batch - dropped
    assert audit.reasons.get("filtered: no gradient, as in a group with equal rewards", 0) == dropped


def sampled(world_seed: int, task: TaskSpec, *names: str) -> TaskSpec:
    """A task with one of these samplers, "" for none."""
    options: dict[str, dict[str, Any]] = {
        "whole_groups": {},
        "shuffled": {"seed": 5, "window": 1 + world_seed % 9},
        "length_bucketed": {"column": task.needs[0], "window": 1 + world_seed % 9},
        "by_column": {"column": task.needs[0]},
        "token_balanced": {"column": task.needs[0]},
    }
    name = names[world_seed % len(names)]
    return msgspec.structs.replace(task, sampler=SamplerSpec(name, options[name]) if name else None)


@example(  # a sampler chose a row of low priority first, which had lost a lease
    seed=5833159, staleness=0, size=1, groups=1, steps=4, ranks=(4, 4), mortality=0.2, tight=False, policy="wait",
    parts=1,
)  # fmt: skip
@schedules(15)
@given(
    seed=SEEDS, staleness=STALENESS, size=SIZES, groups=st.integers(1, 4), steps=st.integers(1, 5),
    ranks=st.sampled_from([(2, 2), (2, 1), (3, 3), (4, 2), (4, 4)]), mortality=MORTALITY, tight=st.booleans(),
    policy=POLICIES, parts=PARTS,
)  # fmt: skip
def test_a_team_ends_a_run_with_every_row_accounted_for_under_any_schedule(
    seed: int, staleness: int, size: int, groups: int, steps: int, ranks: tuple[int, int], mortality: float, tight: bool,
    policy: str, parts: int | None,
) -> None:  # fmt: skip
    batch = max(size * groups, size * -(-ranks[1] // size))
    rollout, reward, judge = TASKS
    judge = sampled(seed // 5, judge, "", "whole_groups", "token_balanced")
    tasks = [
        sampled(seed, rollout, "", "shuffled", "length_bucketed"),
        sampled(seed // 3, reward, "", "shuffled", "length_bucketed", "by_column"),
        judge,
        sampled(seed // 7, train_task(batch), "", "token_balanced"),
    ]
    world = World(
        seed, *tasks, max_staleness=staleness, steps=steps, staleness=PolicySpec(policy),
        capacity_rows=batch if tight else 4 * batch,
    )  # fmt: skip
    team = {"count": 1, "group": "job", "world_size": ranks[0], "shards": ranks[1], **in_parts(parts, batch)}
    for rank in range(1, ranks[0]):  # they wait for a version
        Worker(world, "train", follow, mortality, {**team, "rank": rank})
    Trainer(world, mortality, team)
    at_least = 0 if tight or judge.sampler else world.random.randint(0, batch)
    others(world, size, size if tight else 2 * batch, 3, mortality, at_least)

    audit = world.run()

    assert [n for n, step in sorted(world.steps.items()) if step.acknowledged] == list(range(steps)), "each step once"
    assert not world.status().lease_count
    assert trained_rows(audit) == steps * batch
