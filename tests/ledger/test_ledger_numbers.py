"""Numbers of versions and the steps that train them: given a run, when a version is published or a step leased again ..."""

from __future__ import annotations

import pytest
from ledger_queue import REWARD, ROLLOUT, TRAIN, Queue, ids, part, produce, running

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


def test_numbers_go_with_the_steps_that_are_trained() -> None:
    queue, *_ = running(max_staleness=0)
    queue.put(64)
    with pytest.raises(
        ConfigError, match=r"0 is current and step 0 is not trained yet, so the next number is 1; .*step.version"
    ):
        queue.publish(10)
    queue.publish(1)


def test_a_number_that_is_refused_withdraws_nothing() -> None:
    # given a version that is announced
    queue, *_ = running(max_staleness=0)
    queue.do(queue.admin, cmd.Announce(version=1))
    said = len(queue.events)

    # when its publisher announces one that cannot come in its place
    with pytest.raises(ConfigError, match="step 0 is not trained yet, so the next number is 1"):
        queue.do(queue.admin, cmd.Announce(version=2))

    # then the first one still comes, and nobody was told otherwise
    assert not queue.events[said:]
    assert queue.do(queue.admin, cmd.Publish(version=1, part=part(1))) == cmd.PublishReply(keep=(0, 1))


def test_a_number_published_without_a_step_lets_no_more_rows_in() -> None:
    queue, replica, *_ = running(max_staleness=0)
    queue.put(64)
    for version in (1, 2, 3):  # nothing is leased, let alone trained
        queue.publish(version)
    queue.load(replica, 3)
    assert len(ids(queue.lease(replica, "rollout", 100))) <= 2 * 4


def test_the_first_version_of_a_run_may_have_any_number() -> None:
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=0)
    replica = queue.join("gen")
    queue.publish(100)
    queue.load(replica, 100)
    queue.put(12)
    assert len(ids(queue.lease(replica, "rollout", 100))) == 4


def test_a_trainer_that_acknowledges_first_publishes_what_it_trained() -> None:
    queue, replica, judge, trainer = running(max_staleness=0)
    queue.put(8)
    produce(queue, replica, judge, 4)
    lease = queue.lease(trainer, "train")
    queue.complete(trainer, lease)
    queue.publish(lease.version + 1)
    with pytest.raises(ConfigError, match="step 1 is not trained yet, so the next number is 2"):
        queue.publish(3)


def test_a_trainer_that_acknowledges_late_goes_on_publishing() -> None:
    queue, replica, judge, trainer = running(max_staleness=4)
    queue.put(12)
    produce(queue, replica, judge, 12)
    for step in range(3):
        lease = queue.lease(trainer, "train")
        assert (lease.step, lease.version) == (step, step)
        queue.publish(lease.version + 1)


# ---- a step that is leased again


def test_a_step_whose_trainer_died_after_publishing_it_takes_the_next_number() -> None:
    queue, replica, judge, trainer = running(max_staleness=0)
    queue.put(24)
    produce(queue, replica, judge, 4)
    lease = queue.lease(trainer, "train")
    queue.publish(lease.version + 1)
    queue.die(trainer)
    trainer = queue.join("train-1")
    for step in range(4):
        lease = queue.lease(trainer, "train")
        assert (lease.step, lease.version) == (step, step + 1)
        queue.publish(lease.version + 1)
        queue.complete(trainer, lease)
        queue.load(replica, lease.version + 1)
        rows = queue.lease(replica, "rollout", 100)
        assert len(ids(rows)) == 4, "those of the next step, with max_staleness 0"
        queue.complete(replica, rows)
        queue.complete(judge, queue.lease(judge, "reward", 100))


@pytest.mark.parametrize("late", [True, False])
def test_a_step_leased_again_may_be_acknowledged_before_its_version_is_there_or_without_one(late: bool) -> None:
    queue, replica, judge, trainer = running(max_staleness=0)
    queue.put(8)
    produce(queue, replica, judge, 4)
    queue.lease(trainer, "train")
    queue.publish(1)
    queue.die(trainer)
    trainer = queue.join("train-1")
    queue.complete(trainer, queue.lease(trainer, "train"))
    if late:
        queue.publish(2)
    queue.load(replica, 1 + late)
    queue.put(8)
    rows = queue.lease(replica, "rollout", 100)
    assert len(ids(rows)) == 4, "those of step 1, with max_staleness 0"
    queue.complete(replica, rows)
    queue.complete(judge, queue.lease(judge, "reward", 4))
    lease = queue.lease(trainer, "train")
    assert (lease.step, lease.version) == (1, 2)
    queue.publish(3)


def test_a_trainer_may_die_there_again_and_again() -> None:
    queue, replica, judge, trainer = running(max_staleness=1)
    queue.put(16)
    produce(queue, replica, judge, 8)
    for death in range(3):
        lease = queue.lease(trainer, "train")
        assert (lease.step, lease.version) == (0, death)
        queue.publish(death + 1)
        queue.die(trainer)
        trainer = queue.join("train again")
    queue.complete(trainer, queue.lease(trainer, "train"))
    queue.load(replica, 3)
    assert len(ids(queue.lease(replica, "rollout", 100))) == 4, "of step 2; those of step 1 are there"
