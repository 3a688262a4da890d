"""Rollback: old bytes under a new number, rows that end with what is given up, steps that go on."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import TOKENS, TRAIN, Queue, ids, part, produce, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, LeaseLost, VersionGone
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast


def versions(count: int, **limits: Any) -> tuple[Queue, int, int, int]:
    """A run with versions 0 to count - 1, 0 loaded: (queue, replica, judge, trainer). Four rows make a step."""
    queue, replica, judge, trainer = running(**{"keep_versions": 4, "max_staleness": 4, **limits})
    for version in range(1, count):
        queue.publish(version)
    return queue, replica, judge, trainer


def roll_back(queue: Queue, version: int, *, restored: bool = True) -> Any:
    """``restored``: the trainer has loaded it."""
    reply = queue.do(queue.admin, cmd.Rollback(version=version, reason="it diverged"))
    if restored:
        queue.do(queue.admin, cmd.ReportRestored(version=reply.version))
    return reply


def step(queue: Queue, replica: int, judge: int, trainer: int, *, ack: bool = True) -> Any:
    """Make, lease and acknowledge a step."""
    queue.put(4)
    produce(queue, replica, judge, 4)
    lease = queue.lease(trainer, "train")
    if ack:
        queue.complete(trainer, lease)
    return lease


def training(queue: Queue) -> tuple[int, int]:
    """The first step that is not acknowledged, and the version that it trains."""
    cut = queue.do(queue.admin, cmd.GetTrainingPosition())
    return cut.step, cut.version


# ---- versions


def test_a_rollback_makes_a_new_number_of_old_bytes() -> None:
    queue, replica, *_ = versions(8)
    waiting = queue.ask(replica, cmd.AwaitVersion(after=7, timeout_s=60))
    assert roll_back(queue, 5) == cmd.RollbackDone(version=8, expired=0)
    assert queue.answers[waiting] == cmd.Version(version=8, parts=(part(5),), source=5)
    (said,) = [event for event in queue.events if isinstance(event, ev.Published) and event.source >= 0]
    assert (said.version, said.source, said.root) == (8, 5, "r5.0")
    assert said.reason == "version 7 was rolled back to 5: it diverged"


def test_after_a_rollback_the_newest_numbers_are_kept_with_the_bytes_they_came_from() -> None:
    queue, *_ = versions(4, keep_versions=3)  # 1, 2, 3
    roll_back(queue, 1)  # is 4
    assert [(v.version, v.source) for v in queue.status().versions] == [(2, 2), (3, 3), (4, 1)]
    assert queue.do(queue.admin, cmd.Announce(version=5)) == cmd.PublishReply(keep=(1, 2, 3))
    assert queue.do(queue.admin, cmd.Publish(version=5, part=part(5))) == cmd.PublishReply(keep=(1, 3, 5))
    queue.publish(6)
    assert roll_back(queue, 1).version == 7  # by the number its bytes had, too
    assert [(v.version, v.source) for v in queue.status().versions] == [(5, 5), (6, 6), (7, 1)]


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (1, "version 1 is not kept any more, so nothing can be rolled back to it; kept are: 2, 3"),
        (4, "version 4 is current; kept are: 2, 3"),
        (5, "version 5 was never published, so nothing can be rolled back to it; kept are: 2, 3"),
        (-1, "version -1 was never published"),
    ],
)
def test_what_is_not_kept_or_is_current_cannot_be_rolled_back_to(version: int, text: str) -> None:
    queue, *_ = versions(5, keep_versions=3)
    with pytest.raises(ConfigError, match=text):
        roll_back(queue, version)


def test_bytes_that_are_current_under_another_number_cannot_be_rolled_back_to() -> None:
    queue, *_ = versions(4)
    roll_back(queue, 2)
    with pytest.raises(ConfigError, match="version 2 is current, as version 4; kept are: 1, 3"):
        roll_back(queue, 2)


def test_what_cannot_be_fetched_cannot_be_rolled_back_to() -> None:
    queue, *_ = versions(3)
    queue.do(queue.admin, cmd.Announce(version=3))
    queue.do(queue.admin, cmd.Publish(version=3, part=part(3, outlives=False)))
    queue.publish(4)
    queue.do(queue.admin, cmd.ClosePublisher())
    with pytest.raises(ConfigError, match="version 3 is not kept any more.*kept are: 1, 2"):
        roll_back(queue, 3)


def test_an_announced_version_is_withdrawn_and_its_number_is_passed_over() -> None:
    queue, *_ = versions(3)
    queue.do(queue.admin, cmd.Announce(version=3))
    assert roll_back(queue, 1).version == 4
    text = "3 cannot be published: 4 is already current.*Load 4 into the trainer.*its next version is 5"
    with pytest.raises(ConfigError, match=text):
        queue.do(queue.admin, cmd.Publish(version=3, part=part(3)))
    queue.publish(5)
    assert queue.status().version == 5


def test_a_trainer_that_had_leased_its_step_before_learns_what_to_do() -> None:
    queue, replica, judge, trainer = versions(2)
    lease = step(queue, replica, judge, trainer, ack=False)  # step 0
    roll_back(queue, 0)  # takes number 2
    with pytest.raises(
        ConfigError, match=r"Version 2 is what was rolled back to, with the bytes of 0.*is 3, also for a step"
    ):
        queue.publish(2)
    queue.publish(3)
    queue.complete(trainer, lease)


def test_what_was_staged_of_a_version_given_up_is_not_loaded() -> None:
    queue, replica, *_ = versions(3)
    queue.do(replica, cmd.AwaitVersion(after=0))
    queue.do(replica, cmd.ReportStaged(version=2))
    roll_back(queue, 1)
    with pytest.raises(VersionGone, match="version 2 was rolled back; 3 is current: stage that"):
        queue.do(replica, cmd.Swap(version=2))


# ---- the trainer


def test_nothing_is_published_after_a_rollback_before_the_trainer_has_loaded_its_version() -> None:
    queue, *_ = versions(3)
    assert queue.do(queue.admin, cmd.GetRestoreTarget()) == cmd.RestoreTarget()
    roll_back(queue, 1, restored=False)  # is 3
    asked = queue.do(queue.admin, cmd.GetRestoreTarget())
    assert asked == cmd.RestoreTarget(version=3, source=1, parts=(part(1),))
    with pytest.raises(ConfigError, match=r"4 cannot be published: the run was rolled back, .* run.restored\(3\)"):
        queue.publish(4)
    for wrong in (1, 2, 4):
        with pytest.raises(ConfigError, match=f"version {wrong} cannot be restored: 3 is current"):
            queue.do(queue.admin, cmd.ReportRestored(version=wrong))

    for _ in range(2):  # repeatable
        queue.do(queue.admin, cmd.ReportRestored(version=3, optimizer="fresh"))

    (said,) = [event for event in queue.events if isinstance(event, ev.Restored)]
    assert (said.version, said.source, said.optimizer) == (3, 1, "fresh")
    queue.publish(4)


def test_of_two_rollbacks_the_second_is_restored() -> None:
    queue, *_ = versions(3)
    roll_back(queue, 1, restored=False)
    assert roll_back(queue, 0, restored=False).version == 4
    with pytest.raises(ConfigError, match="version 3 cannot be restored: 4 is current"):
        queue.do(queue.admin, cmd.ReportRestored(version=3))
    assert queue.do(queue.admin, cmd.GetRestoreTarget()).source == 0


def test_another_publisher_has_to_restore_too() -> None:
    queue, *_ = versions(3)
    roll_back(queue, 1, restored=False)
    queue.do(queue.admin, cmd.ClosePublisher())
    with pytest.raises(ConfigError, match="the run was rolled back"):
        queue.publish(4)


def test_a_rollback_that_no_trainer_could_follow_is_refused_also_after_its_death() -> None:
    queue, *_ = versions(1)
    queue.do(queue.admin, cmd.ClosePublisher())
    trainer = queue.join("trainer")
    queue.do(trainer, cmd.OpenPublisher(no_rollback="engine 'mine' has no load_weights"))
    queue.do(trainer, cmd.Announce(version=1))
    queue.do(trainer, cmd.Publish(version=1, part=part(1)))
    for _ in range(2):
        with pytest.raises(ConfigError, match="0 cannot be rolled back to: engine 'mine' has no load_weights"):
            roll_back(queue, 0)
        queue.die(trainer)

    queue.publish(2)  # another trainer

    roll_back(queue, 0)


def test_the_checkpoint_of_the_version_is_named_as_long_as_it_is_kept() -> None:
    queue, replica, judge, trainer = versions(1, checkpoints=True)
    for number in range(3):
        step(queue, replica, judge, trainer)
        queue.publish(number + 1)
        queue.load(replica, number + 1)
        queue.do(trainer, cmd.AddCheckpoint(step=number + 1, covers=0, version=number + 1))
    assert roll_back(queue, 1, restored=False).checkpoint == 1
    assert queue.do(queue.admin, cmd.GetRestoreTarget()).checkpoint == 1
    assert queue.do(queue.admin, cmd.GetTrainingPosition()).restore == 4
    queue.do(queue.admin, cmd.ReportRestored(version=4))
    assert queue.do(queue.admin, cmd.GetTrainingPosition()).restore == -1

    queue.publish(5)
    queue.do(trainer, cmd.AddCheckpoint(step=3, covers=2, version=5))

    assert roll_back(queue, 1).checkpoint == -1


def test_a_trainer_that_goes_on_from_a_checkpoint_has_nothing_to_restore() -> None:
    queue, replica, judge, trainer = versions(1, checkpoints=True)
    for number in range(2):
        step(queue, replica, judge, trainer)
        queue.publish(number + 1)
        queue.load(replica, number + 1)
    roll_back(queue, 1, restored=False)
    resumed = queue.do(trainer, cmd.Resume(step=0, version=0))
    assert queue.do(queue.admin, cmd.GetRestoreTarget()) == cmd.RestoreTarget()

    queue.publish(resumed.version)


# ---- replicas and rows


def test_replicas_on_what_was_given_up_are_granted_nothing_before_they_load_what_is_current() -> None:
    queue, replica, *_ = versions(3)
    queue.put(8)
    queue.load(replica, 2)
    old = queue.join("gen-1")
    queue.load(old, 1)
    assert ids(queue.lease(replica, "rollout", 1)) == [0]
    roll_back(queue, 1)
    assert queue.lease(replica, "rollout", 1) == cmd.LoadFirst(version=3)
    assert ids(queue.lease(old, "rollout", 1)) == [1]  # version 1 was not given up
    queue.load(replica, 3)
    assert ids(queue.lease(replica, "rollout", 1)) == [2]


def test_rows_of_versions_given_up_expire_with_their_groups() -> None:
    queue, replica, judge, _ = versions(2)
    queue.put(2, size=2)  # group 0 by version 0, group 1 by version 1
    first = queue.lease(replica, "rollout", 2)
    queue.load(replica, 1)
    second = queue.lease(replica, "rollout", 2)
    queue.complete(replica, second, 0)  # half of it
    queue.complete(judge, queue.lease(judge, "reward"))
    assert roll_back(queue, 0) == cmd.RollbackDone(version=2, expired=4)
    # group 0 was under way when its replica loaded version 1
    assert queue.audit().reasons == {"expired: version 1 was rolled back": 4}
    for lease in (first, second):
        with pytest.raises(LeaseLost):
            queue.complete(replica, lease)


@pytest.mark.parametrize("done", [0, 1])
def test_what_a_replica_generates_with_a_version_given_up_while_it_loaded_that_expires(done: int) -> None:
    queue, replica, *_ = versions(1)
    queue.put(4)
    lease = queue.lease(replica, "rollout", 4)
    queue.publish(1)
    queue.do(replica, cmd.AwaitVersion(after=0))
    queue.do(replica, cmd.ReportStaged(version=1))
    assert isinstance(queue.do(replica, cmd.Swap(version=1)), cmd.Permitted)
    if done:
        queue.complete(replica, lease, 0)  # wholly of version 0
    assert roll_back(queue, 0).expired == 0
    queue.load(replica, 1)  # its tokens are of version 1 from here on
    assert queue.audit().expired == 4 - done
    queue.put(4)
    assert queue.lease(replica, "rollout", 4) == cmd.LoadFirst(version=2)
    with pytest.raises(LeaseLost):
        queue.complete(replica, lease)


def test_a_rollback_while_a_published_step_is_held_counts_it_once() -> None:
    queue, replica, judge, trainer = versions(1, max_staleness=0)
    held = step(queue, replica, judge, trainer, ack=False)
    queue.publish(1)
    new = roll_back(queue, 0).version
    queue.do(trainer, cmd.GiveBack(token=held.token))
    queue.load(replica, new)
    queue.put(8)
    with pytest.raises(DeadlineExceeded):  # what this version makes now would be too old for step 1
        queue.lease(replica, "rollout", 100)
    again = queue.lease(trainer, "train")
    assert (again.step, again.version) == (0, new)
    queue.publish(new + 1)
    queue.complete(trainer, again)
    queue.load(replica, new + 1)
    assert len(ids(queue.lease(replica, "rollout", 100))) == 4


def test_rows_of_versions_that_stay_stay() -> None:
    queue, replica, judge, _ = versions(1)
    queue.put(3)
    queue.complete(replica, queue.lease(replica, "rollout", 1))  # by 0, done
    late = queue.join("gen-1")
    queue.load(late, 0)
    held = queue.lease(late, "rollout", 1)  # by 0, under way
    queue.publish(1)
    queue.load(replica, 1)
    queue.complete(replica, queue.lease(replica, "rollout", 1))  # by 1
    assert roll_back(queue, 0).expired == 1
    queue.complete(late, held)
    assert len(ids(queue.lease(judge, "reward"))) == 2
    assert queue.audit().live == 2


def test_what_was_redone_by_a_version_given_up_expires_with_the_rest_of_its_group() -> None:
    queue, replica, *_ = versions(1)
    queue.put(1, size=2)
    lease = queue.lease(replica, "rollout", 2)
    queue.complete(replica, lease, 0)  # by 0
    queue.do(replica, cmd.GiveBack(token=lease.token))
    queue.publish(1)
    queue.load(replica, 1)
    queue.complete(replica, queue.lease(replica, "rollout", 2))  # the other one by 1
    assert roll_back(queue, 0).expired == 2


def test_prompts_that_nobody_has_begun_stay() -> None:
    queue, replica, *_ = versions(2)
    queue.put(4)
    queue.load(replica, 1)
    lease = queue.lease(replica, "rollout", 4)
    queue.do(replica, cmd.GiveBack(token=lease.token))
    assert roll_back(queue, 0).expired == 0
    assert queue.audit().live == 4


def test_rows_in_a_full_step_stay_and_those_in_the_step_being_filled_expire() -> None:
    queue, replica, judge, trainer = versions(2)
    queue.load(replica, 1)
    queue.put(6)
    produce(queue, replica, judge, 6)
    assert queue.status().free_slots == 2
    assert roll_back(queue, 0).expired == 2
    assert (queue.status().step, queue.status().free_slots) == (1, 4)
    lease = queue.lease(trainer, "train")
    assert len(ids(lease)) == 4
    queue.complete(trainer, lease)


def test_what_expired_is_wanted_again() -> None:
    queue, replica, *_ = versions(2, steps=1)
    queue.put(4)
    queue.load(replica, 1)
    queue.lease(replica, "rollout", 4)
    waiting = queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=60))
    roll_back(queue, 0)
    assert queue.answers[waiting] == cmd.RowsWanted(count=4)


# ---- steps


def test_steps_go_on_and_their_versions_are_one_ahead() -> None:
    queue, replica, judge, trainer = versions(1, max_staleness=0)
    for number in range(3):
        assert step(queue, replica, judge, trainer).version == number
        queue.publish(number + 1)
        queue.load(replica, number + 1)
    assert roll_back(queue, 1).version == 4  # in the place of 3
    queue.load(replica, 4)
    lease = step(queue, replica, judge, trainer)
    assert (lease.step, lease.version) == (3, 4)
    queue.publish(5)
    queue.load(replica, 5)
    assert roll_back(queue, 4).version == 6
    queue.load(replica, 6)
    lease = step(queue, replica, judge, trainer)
    assert (lease.step, lease.version) == (4, 6)


@pytest.mark.parametrize("published", [True, False])
def test_a_step_leased_before_the_rollback_and_acknowledged_after_it_holds_nothing_up(published: bool) -> None:
    queue, replica, judge, trainer = versions(1, max_staleness=0)
    step(queue, replica, judge, trainer)
    queue.publish(1)
    queue.load(replica, 1)
    lease = step(queue, replica, judge, trainer, ack=False)  # step 1 trains version 1
    if published:
        queue.publish(2)
    new = roll_back(queue, 0).version  # the trainer throws step 1's update away
    queue.complete(trainer, lease)
    queue.load(replica, new)
    lease = step(queue, replica, judge, trainer)  # with max_staleness 0: of rows that the new version made
    assert (lease.step, lease.version) == (2, new)
    queue.publish(lease.version + 1)


def test_a_step_that_is_in_the_weights_rolled_back_to_holds_nothing_up() -> None:
    queue, replica, judge, trainer = versions(1, max_staleness=0)
    lease = step(queue, replica, judge, trainer, ack=False)
    queue.publish(1)
    roll_back(queue, 0)
    new = roll_back(queue, 1).version  # step 0 is trained after all
    queue.do(trainer, cmd.GiveBack(token=lease.token))
    again = queue.lease(trainer, "train")
    assert (again.step, again.version) == (0, new)
    queue.complete(trainer, again)
    queue.load(replica, new)
    following = step(queue, replica, judge, trainer)
    assert (following.step, following.version) == (1, new)


def test_steps_that_were_acknowledged_without_publishing_are_past() -> None:
    queue, replica, judge, trainer = versions(1, max_staleness=2)
    step(queue, replica, judge, trainer)
    queue.publish(1)
    queue.load(replica, 1)
    for _ in range(2):  # steps 1 and 2
        step(queue, replica, judge, trainer)
    assert roll_back(queue, 0).version == 2
    queue.load(replica, 2)
    lease = step(queue, replica, judge, trainer)
    assert (lease.step, lease.version) == (3, 2)


def test_a_step_given_back_after_the_rollback_trains_the_new_version() -> None:
    queue, replica, judge, trainer = versions(1)
    step(queue, replica, judge, trainer)
    queue.publish(1)
    lease = step(queue, replica, judge, trainer, ack=False)
    assert (lease.step, lease.version) == (1, 1)
    roll_back(queue, 0)
    queue.do(trainer, cmd.GiveBack(token=lease.token))
    again = queue.lease(trainer, "train")
    assert (again.step, again.version) == (1, 2)
    queue.publish(3)


def test_a_step_leased_while_numbers_were_ahead_publishes_the_number_it_was_told() -> None:
    queue, replica, judge, trainer = versions(1)
    step(queue, replica, judge, trainer)
    queue.publish(1)
    before = step(queue, replica, judge, trainer, ack=False)  # step 1 trains version 1
    roll_back(queue, 0)  # makes version 2
    queue.load(replica, 2)
    ahead = step(queue, replica, judge, trainer, ack=False)
    assert (ahead.step, ahead.version) == (2, 3)  # step 1 may yet publish 3
    queue.complete(trainer, before)  # it does not, so it is step 2 that trains version 2

    following = step(queue, replica, judge, trainer, ack=False)
    assert (following.step, following.version) == (3, 4)
    with pytest.raises(ConfigError, match=r"5 cannot be published: 2 is current and step 2 is .*next number is 4;"):
        queue.publish(5)
    queue.publish(ahead.version + 1)
    queue.complete(trainer, ahead)
    queue.publish(following.version + 1)
    queue.complete(trainer, following)
    queue.load(replica, 5)
    assert step(queue, replica, judge, trainer).version == 5


def test_a_first_version_that_a_step_made_is_trained_by_the_next_step() -> None:
    queue = Queue(TRAIN)
    trainer = queue.join("train-0")
    queue.put(8, response=TOKENS, reward=TOKENS)
    first, second = queue.lease(trainer, "train"), queue.lease(trainer, "train")
    queue.publish(first.version + 1)
    queue.complete(trainer, first)
    assert training(queue) == (1, 1)
    queue.complete(trainer, second)  # what it was trained to comes with the next version
    assert training(queue) == (2, 2)


def test_a_number_that_is_taken_without_a_rollback_is_not_called_rolled_back_to() -> None:
    queue, *_ = versions(1)
    for version in (1, 2):  # no step between them: 2 stays at the place of 1
        queue.publish(version)
    with pytest.raises(ConfigError, match="2 is already current, and a number is never used again$"):
        queue.publish(2)


# ---- quorum


def test_a_rollback_is_decided_at_once() -> None:
    queue, replica, *_ = versions(1, quorum=2)
    queue.put(8)
    other = queue.join("gen-1")
    for session in (replica, other):
        queue.do(session, cmd.AwaitVersion(after=-1))
        queue.do(session, cmd.ReportStaged(version=0))
    queue.load(replica, 0)
    queue.publish(1)
    assert queue.status().committed == 0
    assert roll_back(queue, 0).version == 2
    assert queue.status().committed == 2
    assert [e.version for e in queue.events if isinstance(e, ev.Committed)] == [0, 2]
    assert queue.lease(replica, "rollout", 1) == cmd.LoadFirst(version=2)
    queue.do(replica, cmd.ReportStaged(version=2))
    assert queue.do(replica, cmd.Swap(version=2)) == cmd.Permitted(version=2)
    queue.load(replica, 2)
    assert ids(queue.lease(replica, "rollout", 1)) == [0]


def test_a_rollback_without_steps_or_rows_is_only_a_version() -> None:
    queue = Queue()
    queue.publish(0)
    queue.publish(1)
    assert roll_back(queue, 0) == cmd.RollbackDone(version=2, expired=0)
    with pytest.raises(DeadlineExceeded, match="version 2 is current"):
        queue.do(queue.admin, cmd.AwaitVersion(after=2))
    assert queue.put(1, text=TOKENS).count == 1


# ---- descent


def given_up(queue: Queue) -> list[int]:
    """Versions from 1 on that a replica is given no rows with."""
    refused = []
    for version in range(1, queue.status().version + 1):
        replica = queue.join(f"on {version}")
        queue.load(replica, version)
        reply = queue.lease(replica, "rollout", 1)
        if isinstance(reply, cmd.LoadFirst):
            refused.append(version)
        else:
            queue.do(replica, cmd.GiveBack(token=reply.token))
    return refused


def test_a_version_descends_from_what_was_never_given_up() -> None:
    queue, *_ = versions(8, keep_versions=20, max_staleness=100)
    queue.put(1)
    roll_back(queue, 5)  # is 8
    assert given_up(queue) == [6, 7]
    queue.publish(9)
    queue.publish(10)
    roll_back(queue, 9)  # is 11
    assert given_up(queue) == [6, 7, 10]
    roll_back(queue, 7)  # to what had been given up, and is 12
    assert given_up(queue) == [8, 9, 10, 11]
    roll_back(queue, 11)  # is 13
    assert given_up(queue) == [6, 7, 10, 12]
