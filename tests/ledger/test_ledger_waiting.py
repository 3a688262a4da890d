"""What a request says when its deadline passes: what is missing, and who should bring it."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import (
    PLAIN,
    REWARD,
    ROLLOUT,
    TEXT,
    TRAIN,
    Queue,
    ids,
    produce,
    running,
)

from asyncflow_sdk.errors import (
    DeadlineExceeded,
)
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


def deadline_of(queue: Queue, session: int, command: Any) -> str:
    """What a request says when its time is over; it waits from 2 s to 5 s."""
    queue.at(2.0)
    ticket = queue.ask(session, command)
    queue.at(4.9)
    assert ticket not in queue.answers
    queue.at(5.0)
    assert isinstance(queue.answers[ticket], DeadlineExceeded)
    return str(queue.answers[ticket])


def test_a_deadline_of_a_stage_says_which_column_is_missing_and_who_makes_it() -> None:
    queue, replica, judge, _ = running()
    queue.put(4)
    queue.lease(replica, "rollout", 3)
    text = deadline_of(queue, judge, cmd.LeaseRows(task="reward", count=1, timeout_s=3))
    assert text == (
        "after 3.0 s: task 'reward' has nothing to give; 4 rows lack column 'response', given by task 'rollout';"
        " 1 rows are ready for task 'rollout', and no client requests them; 3 rows are leased in task 'rollout', the"
        " oldest by gen-0 for 5.0 s"
    )


def test_a_deadline_of_the_trainer_says_what_the_step_lacks() -> None:
    queue, replica, judge, trainer = running()
    queue.put(3)
    produce(queue, replica, judge, 1)
    queue.complete(replica, queue.lease(replica, "rollout", 1))
    queue.lease(judge, "reward")
    text = deadline_of(queue, trainer, cmd.LeaseRows(task="train", count=1, timeout_s=3))
    assert "task 'train' has nothing to give; step 0 lacks 3 of 4 rows, and the queue has 2 that may fill it" in text
    assert "2 rows lack column 'reward', given by task 'reward'" in text
    assert "1 rows are leased in task 'reward', the oldest by judge-0 for 5.0 s" in text
    assert "1 rows are ready for task 'rollout', and no client requests them" in text


def test_a_deadline_names_a_column_that_nobody_gives() -> None:
    queue = Queue(TaskSpec(name="judge", needs=("prompt", "truth"), gives=("score",)))
    queue.put(2)
    text = deadline_of(queue, queue.join("j"), cmd.LeaseRows(task="judge", count=1, timeout_s=3))
    assert "no task gives column 'truth', and 2 rows were put without it" in text


def test_a_deadline_of_a_replica_says_who_trains() -> None:
    queue, replica, judge, trainer = running(max_staleness=0)
    queue.put(8)
    produce(queue, replica, judge, 4)
    queue.lease(trainer, "train")
    text = deadline_of(queue, replica, cmd.LeaseRows(task="rollout", count=1, timeout_s=3))
    assert "with version 0 loaded and max_staleness 0 no group may start" in text
    assert "version 0 is current since 5.0 s" in text
    assert "4 rows are leased in task 'train', the oldest by train-0 for 5.0 s" in text
    with pytest.raises(DeadlineExceeded, match=r"no version newer than 0; .* the oldest by train-0"):
        queue.do(replica, cmd.AwaitVersion(after=0))


def test_a_deadline_of_a_replica_before_any_version_says_so() -> None:
    queue = Queue(ROLLOUT, TRAIN)
    queue.put(4)
    text = deadline_of(queue, queue.join("gen"), cmd.LeaseRows(task="rollout", count=1, timeout_s=3))
    assert "no version is loaded; no version was published yet and no trainer holds a step" in text
    queue = Queue(ROLLOUT)
    text = deadline_of(queue, queue.join("gen"), cmd.LeaseRows(task="rollout", count=1, timeout_s=3))
    assert "no task with batch_rows (train) is declared" in text


def test_a_deadline_of_a_put_says_who_keeps_the_queue_full() -> None:
    queue, replica, *_ = running(capacity_rows=4)
    queue.put(4)
    queue.lease(replica, "rollout", 3)
    put = cmd.AddRows(groups=1, group_size=1, columns={"prompt": TEXT}, timeout_s=3)
    text = deadline_of(queue, queue.admin, put)
    assert "1 more rows do not fit: the queue has 4 of 4 rows" in text
    assert "1 rows are ready for task 'rollout', and no client requests them" in text
    assert "3 rows are leased in task 'rollout', the oldest by gen-0 for 5.0 s" in text


def test_a_deadline_of_a_put_that_can_never_fit_says_what_to_do() -> None:
    queue, *_ = running(capacity_rows=6)
    queue.put(2)
    text = deadline_of(queue, queue.admin, cmd.AddRows(groups=5, group_size=1, columns={"prompt": TEXT}, timeout_s=3))
    assert "5 more rows do not fit: the queue has 2 of 6 rows, and step 0 cannot fill without 2 more" in text
    assert "put fewer at a time, or set a larger capacity_rows" in text


def test_a_deadline_of_wanted_says_why_nothing_is() -> None:
    queue = Queue()
    with pytest.raises(DeadlineExceeded, match="no task with batch_rows"):
        queue.do(queue.admin, cmd.AwaitRowsWanted())
    queue = Queue(TRAIN)
    queue.put(12)
    with pytest.raises(DeadlineExceeded, match="enough rows are queued for step 0 and the 2 after it"):
        queue.do(queue.admin, cmd.AwaitRowsWanted())
    queue = Queue(TRAIN, steps=1)
    queue.put(4)
    with pytest.raises(DeadlineExceeded, match="enough rows are queued"):
        queue.do(queue.admin, cmd.AwaitRowsWanted(timeout_s=float("nan")))  # which is no time at all


def test_a_forgotten_request_takes_nothing() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    ticket = queue.ask(worker, cmd.LeaseRows(task="plain", count=1, timeout_s=60))
    queue.forget(ticket)
    queue.put(1)
    assert ticket not in queue.answers
    assert ids(queue.lease(worker, "plain")) == [0]


def test_a_request_for_the_oldest_of_versions_waits() -> None:
    queue = Queue()
    waiting = queue.ask(queue.admin, cmd.AwaitVersion(after=-7, timeout_s=60))
    queue.publish(0)
    assert queue.answers[waiting].version == 0


def test_a_deadline_says_who_loads_the_model_that_its_rows_wait_for() -> None:
    # given a rollout that loads its model, and a trainer that waits for what it generates
    queue = Queue(ROLLOUT, REWARD, TRAIN)
    queue.put(4)
    replica, trainer = queue.join("gen-0"), queue.join("train-0")
    queue.at(1.0)
    queue.do(replica, cmd.Prepare(task="rollout", what="loading its model"))

    # when, then
    text = deadline_of(queue, trainer, cmd.LeaseRows(task="train", count=1, timeout_s=3))
    assert "4 rows are ready for task 'rollout'; gen-0 is loading its model for 4.0 s" in text
    assert "nobody asks" not in text
    (session,) = [each for each in queue.status().sessions if each.id == replica]
    assert (session.prepares, session.prepares_s) == ("loading its model", 4.0)

    # when it is prepared, and asks for nothing
    queue.do(replica, cmd.Prepare(task="rollout"))
    with pytest.raises(DeadlineExceeded, match="4 rows are ready for task 'rollout', and no client requests them"):
        queue.do(trainer, cmd.LeaseRows(task="train", count=1))

    # when one dies while it loads
    queue.do(replica, cmd.Prepare(task="rollout", what="loading its model"))
    queue.die(replica)
    with pytest.raises(DeadlineExceeded, match="and no client requests them"):
        queue.do(trainer, cmd.LeaseRows(task="train", count=1))


def test_a_trainers_deadline_says_that_no_task_has_the_rows_of_a_step() -> None:
    # given a trainer's task that nobody gave batch_rows, so that no group is ever admitted
    queue = Queue(ROLLOUT, REWARD, TaskSpec(name="train", needs=TRAIN.needs))
    queue.put(4)
    replica = queue.join("gen-0")
    queue.ask(replica, cmd.LeaseRows(task="rollout", count=4, timeout_s=60))

    # when
    text = deadline_of(queue, queue.join("train-0"), cmd.LeaseRows(task="train", count=1, timeout_s=3))

    # then what is missing is named, and not rows that are ready for others
    assert "task 'rollout' starts no row before a task with batch_rows is declared, and none is" in text
    assert 'run.consumer("train", batch_size=256)' in text
    assert "are ready" not in text


def test_a_deadline_names_no_task_of_other_partitions() -> None:
    # given an evaluation's rollout that gives the column which a judge of training's rows lacks
    beside = TaskSpec(name="eval", needs=("prompt",), gives=("response",), partitions=("eval",))
    queue = Queue(ROLLOUT, REWARD, TRAIN, beside)
    queue.put(2)
    text = deadline_of(queue, queue.join("judge"), cmd.LeaseRows(task="reward", count=1, timeout_s=3))
    assert "2 rows lack column 'response', given by task 'rollout';" in text
    assert "eval" not in text
