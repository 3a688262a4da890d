"""Which rows come first, and how many at a time: priorities, and batches of a fixed size."""

from __future__ import annotations

import pytest
from ledger_queue import LAST, PLAIN, TEXT, TRAIN, Queue, ids, produce, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, Ended, SchemaError
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast

# ---- priorities


def test_a_higher_priority_comes_first_and_within_one_the_order_of_arrival() -> None:
    queue = Queue(PLAIN, LAST)
    worker = queue.join("w")
    for priority in (0, 5, -1, 5, 0):  # rows 0-1, 2-3, 4-5, 6-7, 8-9
        queue.put(2, priority=priority)
    assert [ids(queue.lease(worker, "plain", 3)) for _ in range(4)] == [[2, 3, 6], [7, 0, 1], [8, 9, 4], [5]]


def test_rows_given_back_keep_their_priority_and_their_turn() -> None:
    # given urgent rows in hand, and ordinary and further urgent ones ready
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(2, priority=1)
    queue.put(2)
    held = queue.lease(worker, "plain", 2)
    queue.put(1, priority=1)
    # when they come back, then they are first, and the ordinary ones last
    queue.do(worker, cmd.GiveBack(token=held.token))
    assert ids(queue.lease(worker, "plain", 10)) == [0, 1, 4, 2, 3]


def test_every_task_heeds_a_priority() -> None:
    queue, replica, judge, trainer = running(max_staleness=4)
    queue.put(8)
    queue.put(4, priority=9)
    produce(queue, replica, judge, 6)
    assert ids(queue.lease(trainer, "train")) == [8, 9, 10, 11]
    assert ids(queue.lease(replica, "rollout", 2)) == [2, 3]


def test_a_priority_changes_nothing_about_what_may_start() -> None:
    # given room for 4 rows under the staleness rule, all taken by ordinary ones
    queue, replica, _, _ = running(max_staleness=0)
    queue.put(8)
    queue.lease(replica, "rollout", 4)
    # when an urgent row comes, then it waits like any other
    queue.put(1, priority=100)
    with pytest.raises(DeadlineExceeded, match="no group may start"):
        queue.lease(replica, "rollout", 1)


def test_a_priority_out_of_range_is_refused() -> None:
    queue = Queue(PLAIN)
    with pytest.raises(SchemaError, match="int32"):
        queue.put(1, priority=1 << 31)


# ---- at least so many


def test_a_fixed_batch_waits_until_it_is_full_and_the_rest_comes_at_the_end() -> None:
    queue = Queue(PLAIN, LAST)
    worker = queue.join("w")
    fixed = cmd.LeaseRows(task="plain", count=4, at_least=4, timeout_s=60)
    first = queue.ask(worker, fixed)
    queue.put(3)
    assert first not in queue.answers
    queue.put(3)
    assert ids(queue.answers[first]) == [0, 1, 2, 3]
    # when the stream ends with two left
    second = queue.ask(worker, fixed)
    assert second not in queue.answers
    queue.do(queue.admin, cmd.End())
    # then they are given at once, also while another batch is in hand; after that there is nothing
    assert ids(queue.answers[second]) == [4, 5]
    queue.complete(worker, queue.answers[first])
    queue.complete(worker, queue.answers[second])
    with pytest.raises(Ended):
        queue.do(worker, fixed)


def test_the_rest_waits_for_rows_that_still_come_from_other_tasks() -> None:
    queue = Queue(PLAIN, LAST)
    maker, taker = queue.join("maker"), queue.join("taker")
    queue.put(5)
    made = queue.lease(maker, "plain")
    queue.complete(maker, made, 0, 1)
    queue.do(queue.admin, cmd.End())
    waiting = queue.ask(taker, cmd.LeaseRows(task="last", count=4, at_least=4, timeout_s=60))
    assert waiting not in queue.answers
    # when one of them is filtered and the others are made
    queue.complete(maker, made, 2, drop=(0,))
    queue.complete(maker, made, 3)
    assert waiting not in queue.answers
    queue.complete(maker, made, 4)
    assert ids(queue.answers[waiting]) == [0, 1, 3, 4]


def test_a_small_request_is_not_held_up_by_a_large_one() -> None:
    queue = Queue(PLAIN)
    large, small = queue.join("large"), queue.join("small")
    waiting = queue.ask(large, cmd.LeaseRows(task="plain", count=8, at_least=8, timeout_s=60))
    queue.put(3)
    assert ids(queue.lease(small, "plain", 2)) == [0, 1]
    assert waiting not in queue.answers


def test_a_batch_that_can_never_be_full_is_an_error() -> None:
    queue = Queue(PLAIN, TRAIN, capacity_rows=8)
    worker = queue.join("w")
    for wrong, why in (
        ({"count": 9, "at_least": 9}, "the queue holds 8"),
        ({"count": 4, "at_least": 5}, "up to 4, not 5"),
        ({"count": 4, "at_least": -1}, "up to 4, not -1"),
    ):
        with pytest.raises(SchemaError, match=why):
            queue.do(worker, cmd.LeaseRows(task="plain", **wrong))
    with pytest.raises(SchemaError, match="up to 4, not 5"):
        queue.do(worker, cmd.LeaseRows(task="train", count=99, at_least=5))
    # also one that waits when the queue is made smaller
    waiting = queue.ask(worker, cmd.LeaseRows(task="plain", count=8, at_least=8, timeout_s=60))
    queue.do(queue.admin, cmd.Configure(capacity_rows=6))
    assert isinstance(queue.answers[waiting], SchemaError)


def test_a_task_that_admits_takes_no_least_number() -> None:
    queue, replica, *_ = running()
    with pytest.raises(SchemaError, match="staleness rule"):
        queue.do(replica, cmd.LeaseRows(task="rollout", count=4, at_least=2))


def test_its_deadline_says_how_many_there_are_and_what_keeps_the_others_out() -> None:
    queue = Queue(PLAIN, TaskSpec(name="side", needs=("answer",)), capacity_rows=8)
    worker = queue.join("w")
    queue.put(6)
    with pytest.raises(DeadlineExceeded, match="task 'plain' has 6 of 8 rows; 6 rows are ready"):
        queue.do(worker, cmd.LeaseRows(task="plain", count=8, at_least=8))
    queue.ask(queue.join("feeder"), cmd.AddRows(groups=3, group_size=1, columns={"prompt": TEXT}, timeout_s=60))
    with pytest.raises(DeadlineExceeded, match="has 6 of 8 rows, and feeder waits for room to put 3 more"):
        queue.do(worker, cmd.LeaseRows(task="plain", count=8, at_least=8))
    queue.complete(worker, queue.lease(worker, "plain", 3))
    with pytest.raises(DeadlineExceeded, match="has 3 of 8 rows"):
        queue.do(worker, cmd.LeaseRows(task="plain", count=8, at_least=8))


def test_a_request_for_one_partition_learns_of_its_end_behind_others_that_wait() -> None:
    spec = TaskSpec(name="both", needs=("prompt",), partitions=("a", "b"))
    queue = Queue(spec)
    first, second = queue.join("first"), queue.join("second")
    waiting = queue.ask(first, cmd.LeaseRows(task="both", count=1, timeout_s=60))
    ending = queue.ask(second, cmd.LeaseRows(task="both", count=1, timeout_s=60, partition="b"))
    queue.do(queue.admin, cmd.End(partition="b"))
    assert isinstance(queue.answers[ending], Ended)
    assert waiting not in queue.answers
    assert not isinstance(queue.answers.get(waiting), ConfigError)
