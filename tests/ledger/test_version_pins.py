"""Partitions pinned to a version: one exact version generates their rows, whatever else goes on."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import NUMBER, TEXT, TOKENS, TRAIN, Queue, ids, part
from test_ledger_swaps import swap

from asyncflow_sdk.errors import ConfigError, Ended, VersionGone
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast

BOTH = TaskSpec(
    name="rollout", needs=("prompt",), gives=("response",), lease_s=10, admits=True, partitions=("", "eval")
)
OWN = TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=10, admits=True)
ASIDE = TaskSpec(name="aside", needs=("prompt",), gives=("response",), partitions=("eval",))
REWARD = TaskSpec(name="reward", needs=("response",), gives=("reward",), partitions=("*",))
SCORE = TaskSpec(name="score", needs=("reward",), partitions=("eval",))


def evaluated(*rollouts: TaskSpec, steps: int = 9, **limits: Any) -> Queue:
    queue = Queue(*rollouts, REWARD, TRAIN, SCORE, max_staleness=4, steps=steps, **limits)
    queue.publish(0)
    return queue


def put(queue: Queue, version: int, partition: str = "eval", keep: int = -1) -> Any:
    command = cmd.AddRows(
        groups=2, group_size=1, columns={"prompt": TEXT}, partition=partition, version=version, keep=keep
    )
    return queue.do(queue.admin, command)


def replica(queue: Queue, task: str, version: int = 0) -> int:
    """A replica of a task with a version loaded."""
    session = queue.join(f"{task}-replica")
    queue.ask(session, cmd.AwaitVersion(after=version, task=task, timeout_s=60))
    queue.do(session, cmd.ReportStaged(version=version))
    queue.do(session, cmd.Swap(version=version))
    queue.do(session, cmd.ReportLoaded(version=version))
    return session


def take(queue: Queue, session: int, task: str) -> list[int]:
    """The rows that a replica gets now."""
    ticket = queue.ask(session, cmd.LeaseRows(task=task, count=100, partition="eval", timeout_s=1))
    leased = queue.answers.get(ticket)
    if leased is None:
        queue.forget(ticket)
        return []
    queue.complete(session, leased, response=TOKENS)
    return ids(leased)


def score(queue: Queue) -> list[int]:
    for task, columns in (("reward", {"reward": NUMBER}), ("score", {})):
        leased = queue.lease(queue.admin, task, partition="eval")
        queue.complete(queue.admin, leased, **columns)
    return ids(leased)


def test_a_training_replica_keeps_the_version_until_its_rows_are_generated() -> None:
    queue = evaluated(BOTH)
    session = replica(queue, "rollout")
    put(queue, 1)
    assert take(queue, session, "rollout") == []  # not by version 0
    queue.publish(1)
    queue.do(session, cmd.ReportStaged(version=1))
    assert queue.do(session, cmd.Swap(version=1)) == cmd.Permitted(version=1)
    queue.do(session, cmd.ReportLoaded(version=1))
    queue.publish(2)
    assert queue.do(session, cmd.AwaitVersion(after=1, task="rollout")).version == 2
    queue.do(session, cmd.ReportStaged(version=2))
    newer = swap(queue, session, 2)
    assert newer not in queue.answers

    rows = take(queue, session, "rollout")

    assert rows == [0, 1]
    assert queue.answers[newer] == cmd.Permitted(version=2)
    assert score(queue) == rows


def test_a_replica_set_aside_loads_only_the_pinned_version_even_if_it_is_no_longer_kept() -> None:
    queue = evaluated(OWN, ASIDE, keep_versions=1)
    put(queue, 1)
    session = queue.join("aside-0")
    first = queue.ask(session, cmd.AwaitVersion(after=-1, task="aside", timeout_s=60))
    assert first not in queue.answers  # version 0 is of no use to it

    queue.publish(1)
    queue.publish(2)
    assert queue.answers[first].version == 1
    queue.do(session, cmd.ReportStaged(version=1))
    assert queue.do(session, cmd.Swap(version=1)) == cmd.Permitted(version=1)
    queue.do(session, cmd.ReportLoaded(version=1))
    assert take(queue, session, "aside") == [0, 1]
    assert score(queue) == [0, 1]
    put(queue, 3, keep=1)
    queue.publish(3)

    assert queue.do(session, cmd.AwaitVersion(after=1, task="aside")).version == 3
    with pytest.raises(VersionGone):
        queue.do(session, cmd.Swap(version=1))
    assert queue.do(queue.admin, cmd.Rollback(version=1)).version == 4


def test_late_rows_are_bound_to_the_version_that_is_current() -> None:
    queue = evaluated(BOTH)
    queue.publish(1)
    put(queue, 1)

    assert take(queue, replica(queue, "rollout", 1), "rollout") == [0, 1]


def test_the_partition_takes_the_rows_of_one_version_at_a_time() -> None:
    queue = evaluated(BOTH)
    put(queue, 1)

    for version, partition in ((2, "eval"), (-1, "eval"), (1, "")):
        with pytest.raises(ConfigError):
            put(queue, version, partition=partition)


@pytest.mark.parametrize("how", ["rolled back", "bytes gone"])
def test_rows_of_a_lost_version_expire(how: str) -> None:
    queue = evaluated(BOTH)
    put(queue, 1)
    for command in (cmd.Announce(version=1), cmd.Publish(version=1, part=part(1, outlives=how == "rolled back"))):
        queue.do(queue.admin, command)

    if how == "rolled back":
        queue.do(queue.admin, cmd.Rollback(version=0))
    else:
        queue.do(queue.admin, cmd.ClosePublisher())

    assert queue.audit().expired == 2
    with pytest.raises(Ended):
        queue.lease(queue.admin, "score", partition="eval")
    put(queue, 1)


def test_the_last_version_is_evaluated_after_the_last_step() -> None:
    queue = evaluated(BOTH, steps=1)
    put(queue, 5)
    session = replica(queue, "rollout")
    queue.put(4)
    queue.complete(session, queue.lease(session, "rollout", partition=""), response=TOKENS)
    queue.complete(queue.admin, queue.lease(queue.admin, "reward", partition=""), reward=NUMBER)
    step = queue.lease(queue.admin, "train")
    queue.publish(1)
    queue.complete(queue.admin, step)
    with pytest.raises(Ended):
        queue.lease(queue.admin, "train")
    trainer = queue.join("trainer")

    over = queue.ask(trainer, cmd.AwaitPins(timeout_s=60))

    queue.do(session, cmd.ReportStaged(version=1))
    queue.do(session, cmd.Swap(version=1))
    queue.do(session, cmd.ReportLoaded(version=1))
    assert take(queue, session, "rollout") == [0, 1]
    assert score(queue) == [0, 1]
    with pytest.raises(Ended, match="was the last one"):
        put(queue, 2)
    assert over not in queue.answers
    queue.do(queue.admin, cmd.End(partition="eval"))
    assert queue.answers[over] == cmd.Done()
    with pytest.raises(Ended):
        queue.lease(session, "rollout")
