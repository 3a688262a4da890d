"""Rows whose payload is gone: counted, never trained, and whatever they leave behind can go on."""

from __future__ import annotations

import pytest
from ledger_queue import REWARD, ROLLOUT, TOKENS, TRAIN, Queue

from asyncflow_sdk.errors import LeaseLost
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast

LOST = "payload lost"


def filled(queue: Queue, steps: int) -> tuple[int, int]:
    """A replica and a trainer, and so many full steps of 4 rows in 2 groups."""
    replica, trainer = queue.join("replica"), queue.join("trainer")
    queue.publish(0)
    queue.do(replica, cmd.ReportLoaded(version=0))
    for _ in range(steps):
        queue.do(replica, cmd.AddRows(groups=2, group_size=2, columns={"prompt": TOKENS}))
        lease = queue.do(replica, cmd.LeaseRows(task="rollout", count=4))
        queue.do(replica, cmd.Complete(token=lease.token, columns={"response": TOKENS}))
        lease = queue.do(replica, cmd.LeaseRows(task="reward", count=4))
        queue.do(replica, cmd.Complete(token=lease.token, columns={"reward": TOKENS}))
    return replica, trainer


def test_a_full_step_that_lost_a_row_is_filled_again_and_its_lease_ends() -> None:
    # given two full steps, the first with its trainer
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    _, trainer = filled(queue, 2)
    step = queue.do(trainer, cmd.LeaseRows(task="train", count=1))
    assert (step.step, unpack_ids(step.ids).tolist()) == (0, [0, 1, 2, 3])
    # when a row of the first is lost
    queue.lose(1)
    # then its group failed, what is left of it comes first, and the second step is empty but for the rest
    assert queue.audit().reasons == {f"failed: {LOST}": 2}
    with pytest.raises(LeaseLost):
        queue.do(trainer, cmd.Complete(token=step.token, columns={}))
    step = queue.do(trainer, cmd.LeaseRows(task="train", count=1))
    assert (step.step, unpack_ids(step.ids).tolist()) == (0, [2, 3, 4, 5])
    assert (queue.status().step, queue.status().free_slots) == (1, 2)


def test_a_step_behind_one_that_is_trained_fails_whole() -> None:
    # given two full steps, of which the later is acknowledged
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    _, trainer = filled(queue, 2)
    first = queue.do(trainer, cmd.LeaseRows(task="train", count=1))
    second = queue.do(trainer, cmd.LeaseRows(task="train", count=1))
    queue.do(trainer, cmd.Complete(token=second.token, columns={}))
    # when a row of the earlier is lost
    queue.lose(0)
    # then it cannot be filled again, and no step is trained twice
    audit = queue.audit()
    assert (audit.failed, audit.consumed, audit.live) == (4, 4, 0)
    with pytest.raises(LeaseLost):
        queue.do(trainer, cmd.Complete(token=first.token, columns={}))
    assert queue.status().step == 2


def test_rows_trained_before_their_step_was_opened_again_take_no_slot_of_it() -> None:
    # given a step with a trained row, which another task has still to read
    queue = Queue(ROLLOUT, REWARD, TRAIN, TaskSpec(name="log", needs=("reward",), lease_s=10), max_staleness=2)
    _, trainer = filled(queue, 1)
    queue.complete(trainer, queue.lease(trainer, "train"), 0)
    # when the other row of its group is lost
    queue.lose(1)
    # then the trained one stays, and the step lacks two rows
    assert (sorted(queue.live), queue.status().free_slots) == ([0, 2, 3], 2)


def test_rows_lost_before_their_turn_fail_with_their_groups_wherever_they_are() -> None:
    # given rows that wait, that are leased, and that fill a step
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2)
    replica, _ = filled(queue, 0)
    queue.do(replica, cmd.AddRows(groups=6, group_size=2, columns={"prompt": TOKENS}))
    held = queue.do(replica, cmd.LeaseRows(task="rollout", count=4))
    done = queue.do(replica, cmd.LeaseRows(task="rollout", count=2))
    queue.do(replica, cmd.Complete(token=done.token, columns={"response": TOKENS}))
    scored = queue.do(replica, cmd.LeaseRows(task="reward", count=2))
    queue.do(replica, cmd.Complete(token=scored.token, columns={"reward": TOKENS}))
    assert queue.status().rows["train"]["selected"] == 2
    # when one of each is lost
    queue.lose(0, 4, 10)
    # then three groups are gone, the rest goes on
    audit = queue.audit()
    assert (audit.failed, audit.live) == (6, 6)
    status = queue.status()
    assert (status.rows["rollout"]["leased"], status.rows["train"]["selected"], status.free_slots) == (2, 0, 4)
    assert unpack_ids(queue.complete(replica, held).revoked).tolist() == [0, 1]
