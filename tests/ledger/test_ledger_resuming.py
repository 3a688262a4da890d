"""Resuming from a checkpoint: steps that are trained again, under numbers of their own, beside all that goes on meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import TOKENS, Queue, part, produce, running

from asyncflow_sdk.errors import ConfigError, VersionGone
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


def trained(steps: int, **limits: Any) -> tuple[Queue, int, int, int]:
    """A run with checkpoints, so many steps trained, published and acknowledged: (queue, replica, judge, trainer)."""
    queue, replica, judge, trainer = running(**{"checkpoints": True, "keep_versions": 4, **limits})
    for number in range(steps):
        queue.load(replica, number)
        queue.put(4)
        produce(queue, replica, judge, 4)
        lease = queue.lease(trainer, "train")
        queue.publish(lease.version + 1)
        queue.complete(trainer, lease)
    return queue, replica, judge, trainer


def resume(queue: Queue, trainer: int, step: int, version: int) -> Any:
    return queue.do(trainer, cmd.Resume(step=step, version=version))


def test_a_number_that_was_lost_is_not_published_any_more() -> None:
    queue, _, _, trainer = trained(2)
    queue.do(queue.admin, cmd.Announce(version=3))
    assert resume(queue, trainer, 1, 1) == cmd.Resumed(step=1, version=4, publish=True, again=4)

    for command in (cmd.Publish(version=3, part=part(3)), cmd.Announce(version=3)):
        with pytest.raises(
            ConfigError, match=r"3 cannot be published. Training went on from step 1, .* version is 4"
        ):
            queue.do(queue.admin, command)

    queue.publish(4)


def test_a_replica_that_waits_to_load_what_is_lost_is_told() -> None:
    queue, replica, _, trainer = trained(2, max_swapping=1)
    other = queue.join("gen-1")
    for session in (replica, other):
        queue.do(session, cmd.ReportStaged(version=2))
    assert queue.do(replica, cmd.Swap(version=2)) == cmd.Permitted(version=2)
    waiting = queue.ask(other, cmd.Swap(version=2, timeout_s=60))

    resume(queue, trainer, 1, 1)

    assert isinstance(queue.answers[waiting], VersionGone)


def test_a_version_that_was_lost_is_published_anew_though_a_checkpoint_names_it() -> None:
    queue, replica, _, trainer = trained(2)
    resume(queue, trainer, 2, 1)
    assert resume(queue, trainer, 2, 2) == cmd.Resumed(step=2, version=3, publish=True, again=0)

    queue.publish(3)
    queue.load(replica, 3)
    queue.put(4)
    assert isinstance(queue.lease(replica, "rollout", 4), cmd.Leased)


def test_what_is_kept_for_a_trainer_and_then_given_to_a_new_task_is_counted_once() -> None:
    queue, *_, trainer = trained(1, capacity_rows=8)
    assert queue.status().held == 4
    late = queue.join("late")
    queue.do(late, cmd.Declare(task=TaskSpec(name="late", needs=("response",), lease_s=10)))
    assert queue.status().held == 0

    queue.complete(late, queue.lease(late, "late"))
    assert queue.status().held == 4
    queue.do(trainer, cmd.AddCheckpoint(step=1, covers=1))
    assert (queue.status().held, queue.audit().consumed) == (0, 4)


def test_a_row_that_a_worker_has_for_two_tasks_is_lost_once() -> None:
    tasks = [TaskSpec(name=name, needs=("prompt",), lease_s=10) for name in ("one", "two")]
    queue = Queue(*tasks)
    worker = queue.join("worker")
    queue.put(1, prompt=TOKENS)
    waiting = queue.ask(worker, cmd.AwaitLost(timeout_s=60))
    for task in tasks:
        queue.lease(worker, task.name)

    queue.do(queue.admin, cmd.Cancel(partition=""))

    assert cmd.unpack_ids(queue.answers[waiting].ids).tolist() == [0]
