"""Partitions: rows that only some tasks see, beside the others in one queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ledger_queue import LAST, NUMBER, TEXT, TOKENS, Queue, ids

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types.events import RowsEnded

pytestmark = pytest.mark.fast

ROLLOUT = TaskSpec(name="rollout", needs=("prompt",), gives=("response",), admits=True, partitions=("", "eval"))
REWARD = TaskSpec(name="reward", needs=("response",), gives=("reward",), partitions=("*",))
TRAIN = TaskSpec(name="train", needs=("response", "reward"), batch_rows=4)
SCORE = TaskSpec(name="score", needs=("reward",), partitions=("eval",))


def put(queue: Queue, groups: int, size: int = 1, partition: str = "", **more: Any) -> Any:
    command = cmd.AddRows(groups=groups, group_size=size, columns={"prompt": TEXT}, partition=partition, **more)
    return queue.do(queue.admin, command)


def lease(queue: Queue, task: str, partition: str | None = None, count: int = 100) -> Any:
    return queue.do(queue.admin, cmd.LeaseRows(task=task, count=count, partition=partition))


def evaluating() -> Queue:
    """A run whose rollouts also answer evaluation prompts, with version 0 loaded."""
    queue = Queue(ROLLOUT, REWARD, TRAIN, SCORE, max_staleness=0, steps=2)
    queue.publish(0)
    queue.load(queue.admin, 0)
    return queue


def finish(queue: Queue, task: str, partition: str | None = None, **columns: Any) -> list[int]:
    got = lease(queue, task, partition)
    queue.complete(queue.admin, got, **columns)
    return ids(got)


def test_rows_pass_the_tasks_of_their_partition_and_no_others() -> None:
    queue = evaluating()
    put(queue, 1, 4)
    put(queue, 3, 1, "eval")

    rolled = [finish(queue, "rollout", name, response=TOKENS) for name in ("", "eval")]
    rewarded = [finish(queue, "reward", name, reward=NUMBER) for name in ("", "eval")]

    assert rolled == rewarded == [[0, 1, 2, 3], [4, 5, 6]]
    assert ids(lease(queue, "train")) == [0, 1, 2, 3]
    assert finish(queue, "score") == [4, 5, 6]
    assert queue.audit().consumed == 3


def test_a_task_gets_nothing_of_the_one_partition_there_is_unless_it_takes_it() -> None:
    queue = Queue(TaskSpec(name="other", needs=("prompt",), gives=("x",), partitions=("eval",)), LAST)
    put(queue, 2)
    with pytest.raises(DeadlineExceeded):
        lease(queue, "other")
    put(queue, 1, 1, "eval")
    assert ids(lease(queue, "other")) == [2]


def test_the_staleness_rule_does_not_count_rows_that_no_step_takes() -> None:
    queue = evaluating()
    put(queue, 2, 4)
    put(queue, 9, 1, "eval")

    lease(queue, "rollout", "")  # with max_staleness 0 the step is full of admitted rows now

    assert len(ids(lease(queue, "rollout", "eval"))) == 9


def test_a_lease_without_a_name_takes_the_partitions_in_turn() -> None:
    queue = Queue(TaskSpec(name="any", needs=("prompt",), partitions=("*",)))
    for name in ("a", "b", "a", "b"):
        put(queue, 2, partition=name)

    seen = [lease(queue, "any", count=1).partition for _ in range(4)]

    assert sorted(seen[:2]) == sorted(seen[2:]) == ["a", "b"]


def test_a_partition_that_ended_ends_for_its_readers_alone() -> None:
    queue = Queue(TaskSpec(name="any", needs=("prompt",), partitions=("*",)))
    put(queue, 1, partition="a")
    put(queue, 1, partition="b")

    queue.do(queue.admin, cmd.End(partition="a"))

    with pytest.raises(Ended, match="partition 'a' has ended"):
        put(queue, 1, partition="a")
    finish(queue, "any", "a")
    with pytest.raises(Ended, match="'a'"):
        lease(queue, "any", "a")
    assert finish(queue, "any", "b") == [1]
    put(queue, 1, partition="b")


def test_ending_a_partition_can_cancel_its_rows() -> None:
    queue = Queue(TaskSpec(name="any", needs=("prompt",), partitions=("*",)))
    put(queue, 2, partition="a")
    put(queue, 3, partition="b")

    queue.do(queue.admin, cmd.End(partition="a", cancel=True))

    audit = queue.audit()
    assert (audit.live, audit.cancelled) == (3, 2)


def test_rows_that_end_at_once_are_told_by_partition() -> None:
    queue = Queue(TaskSpec(name="any", needs=("prompt",), partitions=("*",)))
    put(queue, 2)
    put(queue, 3, partition="a")

    queue.do(queue.admin, cmd.Cancel(ids=cmd.pack_ids(np.arange(5))))

    told = [(event.partition, event.count) for event in queue.events if isinstance(event, RowsEnded)]
    assert told == [("", 2), ("a", 3)]


def test_a_partition_the_task_does_not_take_is_an_error() -> None:
    queue = Queue(TaskSpec(name="any", needs=("prompt",), partitions=("a",)))
    with pytest.raises(SchemaError, match="takes no rows of partition 'b', only of 'a'"):
        lease(queue, "any", "b")
    with pytest.raises(SchemaError, match="is no partition"):
        put(queue, 1, partition="*")


def test_the_size_of_groups_matters_only_where_steps_take_them() -> None:
    queue = evaluating()
    put(queue, 1, 4)
    put(queue, 1, 3, "eval")
    with pytest.raises(ConfigError, match="is not a multiple of group_size=3"):
        put(queue, 1, 3)


def test_the_last_step_leaves_other_partitions_alone() -> None:
    queue = evaluating()
    put(queue, 2, 4)
    put(queue, 2, 1, "eval")
    for version in (0, 1):
        queue.load(queue.admin, version)
        finish(queue, "rollout", "", response=TOKENS)
        finish(queue, "reward", "", reward=NUMBER)
        finish(queue, "train")
        queue.publish(version + 1)

    assert queue.audit().consumed == 8
    assert queue.audit().live == 2
    finish(queue, "rollout", response=TOKENS)
    finish(queue, "reward", reward=NUMBER)
    finish(queue, "score")
    assert queue.audit().consumed == 10


def test_a_task_declared_late_takes_only_its_own_partitions() -> None:
    queue = Queue(LAST)
    put(queue, 2)
    put(queue, 3, partition="b")

    queue.do(queue.admin, cmd.Declare(task=TaskSpec(name="late", needs=("prompt",), partitions=("b",))))

    assert ids(lease(queue, "late")) == [2, 3, 4]


def test_rows_given_back_wait_in_their_partition() -> None:
    queue = evaluating()
    put(queue, 2, 1, "eval")
    got = lease(queue, "rollout", "eval")

    queue.do(queue.admin, cmd.GiveBack(token=got.token))

    assert ids(lease(queue, "rollout", "eval")) == ids(got)


def test_the_end_of_the_trained_partitions_ends_the_steps() -> None:
    queue = evaluating()
    put(queue, 1, 2)  # half of a step
    put(queue, 2, 1, "eval")

    queue.do(queue.admin, cmd.End(partition=""))

    assert queue.audit().reasons["cancelled: too few to fill a step"] == 2
    with pytest.raises(Ended):
        lease(queue, "train")
    with pytest.raises(Ended):
        queue.do(queue.admin, cmd.AwaitRowsWanted())
    assert len(finish(queue, "rollout", "eval", response=TOKENS)) == 2


def test_groups_of_all_partitions_that_the_steps_take_have_one_size() -> None:
    queue = Queue(TaskSpec(name="train", needs=("prompt",), batch_rows=24, partitions=("", "b")))
    put(queue, 1, 8)
    with pytest.raises(ConfigError, match="this run has groups of 8; groups of 12"):
        put(queue, 9, 12, "b")
