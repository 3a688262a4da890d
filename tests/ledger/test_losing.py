"""Rows whose payload is gone, at any moment of a run: counted, never trained, and whatever they leave behind can go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_checks import check_counters
from ledger_queue import REWARD, ROLLOUT, TRAIN, Queue
from schedules import COLUMN, TASKS, Feeder, Judge, Replica, Stage, Trainer, Worker, World, schedules, train_task

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger import unpack_ids
from asyncflow_sdk.ledger.rows import NONE

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"
LOST = "payload lost"


class Careful(Trainer):
    """Forgets what a step held when it is opened again."""

    def got(self, reply: Any) -> None:
        if isinstance(reply, cmd.Leased) and self.lost(self.given.get(reply.step, set())):
            del self.given[reply.step]
        super().got(reply)

    def lost(self, ids: set[int]) -> bool:
        return bool(self.reopened) and bool(ids)

    reopened = False


def lose(world: World, part: float) -> set[int]:
    """Some of the rows alive, at random. Returns them and their groups, as far as they ended."""
    ledger = world.ledger
    live = ledger.rows.live_ids()
    ids = np.array([i for i in live.tolist() if world.random.random() < part], np.int64)
    was = int(ledger.rows.ended[4])
    ledger.lose(ids, world.now, LOST)
    check_counters(ledger)
    assert not set(ids.tolist()) & set(ledger.rows.live_ids().tolist())
    assert int(ledger.rows.ended[4]) - was >= len(ids)
    return set(ids.tolist())


@schedules(60)
@given(
    seed=st.integers(0, 2**32),
    staleness=st.sampled_from([0, 1, 2, 4]),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 4),
    steps=st.integers(1, 6),
    mortality=st.sampled_from([0.0, 0.05]),
    tight=st.booleans(),
    disasters=st.integers(1, 4),
    part=st.sampled_from([0.05, 0.3, 1.0]),
)
def test_a_run_that_loses_payload_at_any_time_still_trains_every_step(
    seed: int, staleness: int, size: int, groups: int, steps: int, mortality: float, tight: bool, disasters: int, part: float
) -> None:  # fmt: skip
    batch = size * groups
    world = World(seed, limit=40_000 + 8_000 * steps * batch)
    capacity = batch if tight else 4 * batch
    limits = cmd.Configure(capacity_rows=capacity, max_staleness=staleness, steps=steps)
    world.set_up(limits, world.random.sample([*TASKS, train_task(batch)], 4))
    trainer = Careful(world, batch, staleness, mortality)
    workers: list[Worker] = [Feeder(world, size, size if tight else 2 * batch), trainer]
    workers += [Replica(world, "rollout", f"replica {i}", mortality) for i in range(2)]
    workers += [Stage(world, "reward", f"stage {i}", mortality) for i in range(2)]
    workers.append(Judge(world, "judge", "judge", mortality / 2))
    lost: set[int] = set()

    def disaster() -> None:
        trainer.reopened = True
        lost.update(lose(world, part))
        world._answer()
        if not world.ledger.ended:  # a last step was opened again: who had left comes back
            for worker in workers:
                if worker.over:
                    worker.over = False
                    worker.start()

    def soon(what: Callable[[], None]) -> None:
        world.later(world.random.uniform(0, 60), what)

    for _ in range(disasters):
        soon(disaster)
    world.run()

    # then every step was trained once, of rows that nobody lost before, and each row is accounted for
    assert all(worker.over for worker in workers), world.ledger.status()
    assert trainer.steps == list(range(steps))
    assert set(trainer.trained.values()) == {1}
    assert trainer.trained.total() == steps * batch
    audit = world.ledger.audit()
    assert audit.live == 0
    assert audit.balanced
    assert set(world.retired.values()) == {1}
    assert world.retired.total() == audit.put
    assert audit.reasons.get(f"failed: {LOST}", 0) >= len(lost)


def filled(queue: Queue, steps: int) -> tuple[int, int]:
    """A replica and a trainer, and so many full steps of 4 rows in 2 groups."""
    replica, trainer = queue.join("replica"), queue.join("trainer")
    queue.publish(0)
    queue.do(replica, cmd.Loaded(version=0))
    for _ in range(steps):
        queue.do(replica, cmd.Put(groups=2, group_size=2, columns={"prompt": COLUMN}))
        lease = queue.do(replica, cmd.Lease(task="rollout", count=4))
        queue.do(replica, cmd.Complete(token=lease.token, columns={"response": COLUMN}))
        lease = queue.do(replica, cmd.Lease(task="reward", count=4))
        queue.do(replica, cmd.Complete(token=lease.token, columns={"reward": COLUMN}))
    return replica, trainer


def lost(queue: Queue, ids: list[int]) -> None:
    queue.ledger.lose(np.array(ids, np.int64), queue.now, LOST)
    queue._take()


def test_a_full_step_that_lost_a_row_is_filled_again_and_its_lease_ends() -> None:
    # given two full steps, the first with its trainer
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    _, trainer = filled(queue, 2)
    step = queue.do(trainer, cmd.Lease(task="train", count=1))
    assert (step.step, unpack_ids(step.ids).tolist()) == (0, [0, 1, 2, 3])
    # when a row of the first is lost
    lost(queue, [1])
    # then its group failed, what is left of it comes first, and the second step is empty but for the rest
    assert queue.ledger.audit().reasons == {f"failed: {LOST}": 2}
    with pytest.raises(LeaseLost):
        queue.do(trainer, cmd.Complete(token=step.token, columns={}))
    step = queue.do(trainer, cmd.Lease(task="train", count=1))
    assert (step.step, unpack_ids(step.ids).tolist()) == (0, [2, 3, 4, 5])
    assert queue.ledger.steps is not None
    assert (queue.ledger.steps.window.step, queue.ledger.steps.window.free) == (1, 2)


def test_a_step_behind_one_that_is_trained_fails_whole() -> None:
    # given two full steps, of which the later is acknowledged
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    _, trainer = filled(queue, 2)
    first = queue.do(trainer, cmd.Lease(task="train", count=1))
    second = queue.do(trainer, cmd.Lease(task="train", count=1))
    queue.do(trainer, cmd.Complete(token=second.token, columns={}))
    # when a row of the earlier is lost
    lost(queue, [0])
    # then it cannot be filled again, and no step is trained twice
    audit = queue.ledger.audit()
    assert (audit.failed, audit.consumed, audit.live) == (4, 4, 0)
    with pytest.raises(LeaseLost):
        queue.do(trainer, cmd.Complete(token=first.token, columns={}))
    assert queue.ledger.steps is not None
    assert queue.ledger.steps.window.step == 2


def test_rows_lost_before_their_turn_fail_with_their_groups_wherever_they_are() -> None:
    # given rows that wait, that are leased, and that fill a step
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    replica, _ = filled(queue, 0)
    queue.do(replica, cmd.Put(groups=6, group_size=2, columns={"prompt": COLUMN}))
    held = queue.do(replica, cmd.Lease(task="rollout", count=4))
    done = queue.do(replica, cmd.Lease(task="rollout", count=2))
    queue.do(replica, cmd.Complete(token=done.token, columns={"response": COLUMN}))
    scored = queue.do(replica, cmd.Lease(task="reward", count=2))
    queue.do(replica, cmd.Complete(token=scored.token, columns={"reward": COLUMN}))
    assert (queue.ledger.rows.step[4:6] == 0).all()
    # when one of each is lost
    lost(queue, [0, 4, 10])
    # then three groups are gone, the rest goes on
    audit = queue.ledger.audit()
    assert (audit.failed, audit.live) == (6, 6)
    assert queue.ledger.leases[held.token].left == 2
    assert queue.ledger.steps is not None
    assert queue.ledger.steps.window.free == 4
    assert (queue.ledger.rows.step[queue.ledger.rows.live_ids()] == NONE).all()
