"""The ledger's guarantees about a run, one test each: groups, the staleness rule, steps, and the end."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_queue import (
    LAST,
    PLAIN,
    REWARD,
    ROLLOUT,
    TEXT,
    TOKENS,
    TRAIN,
    Queue,
    ids,
    packed,
    produce,
    running,
)

from asyncflow_sdk.errors import (
    ConfigError,
    DeadlineExceeded,
    Ended,
    LeaseLost,
)
from asyncflow_sdk.ledger import TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast

# ---- groups


def test_a_group_fails_as_a_whole_after_max_attempts_and_the_reason_is_kept() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), gives=("answer",), max_attempts=2), LAST)
    worker = queue.join("w")
    queue.put(2, 2)
    for reason in ("first failure", "engine crashed"):
        lease = queue.lease(worker, "plain", 1)
        assert ids(lease) == [0]
        queue.do(worker, cmd.GiveBack(token=lease.token, reason=reason, blame=True))
    audit = queue.audit()
    assert (audit.failed, audit.live) == (2, 2)
    assert audit.reasons == {"failed: failed 2 times in task 'plain'; last: engine crashed": 2}
    assert sorted(queue.ended) == [0, 1]
    assert ids(queue.lease(worker, "plain")) == [2, 3]


def test_innocent_rows_never_fail_for_their_neighbour() -> None:
    # given a row that its workers die of, and workers with several leases
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), gives=("answer",), max_attempts=1), LAST)
    queue.put(5)
    # when
    for number in range(12):
        worker = queue.join(f"w{number}")
        held = [queue.send(worker, cmd.LeaseRows(task="plain", count=2, timeout_s=0)) for _ in range(2)]
        if any(2 in ids(lease) for lease in held if isinstance(lease, cmd.Leased)):
            queue.die(worker)
            continue
        for lease in held:
            if isinstance(lease, cmd.Leased):
                queue.complete(worker, lease)
    # then it fails at the second death, alone
    audit = queue.audit()
    assert (audit.failed, audit.reasons) == (1, {"failed: failed 1 times in task 'plain'; last: killed": 1})


def test_of_groups_lost_with_a_replica_the_guilty_one_is_found_by_quarters() -> None:
    # given 64 groups in flight on a replica that is lost twice, by nobody's fault
    queue, replica, *_ = running(batch=128, max_staleness=4)
    queue.put(64, 2)
    for number in range(2):
        held = [queue.lease(replica, "rollout", 32) for _ in range(4)]
        queue.die(replica)
        replica = queue.join(f"gen-{number}")
        queue.load(replica, 0)
    assert sum(len(ids(lease)) for lease in held) == 128
    # when one of them, the eleventh, is at fault
    tried = []
    while queue.status().rows["rollout"]["ready"]:
        lease = queue.lease(replica, "rollout", 128)
        tried.append(len(ids(lease)) // 2)
        if 20 not in ids(lease):
            queue.complete(replica, lease)
            continue
        queue.die(replica)
        replica = queue.join(f"again-{len(tried)}")
        queue.load(replica, 0)
    # then it fails, and no other
    assert tried == [16, 4, 4, 4, 1, 1, 1, 1, 4, 16, 16, 16]
    assert queue.audit().failed == 2


def test_others_go_on_while_a_row_is_tried_alone() -> None:
    queue = Queue(PLAIN)
    queue.put(4)
    dies, tries, lives = (queue.join(name) for name in "dtl")
    queue.lease(lives, "plain", 1)
    queue.lease(dies, "plain", 1)
    queue.die(dies)
    waits = queue.ask(lives, cmd.LeaseRows(task="plain", count=1, timeout_s=5))
    assert ids(queue.lease(tries, "plain", 2)) == [1]
    assert ids(queue.answers[waits]) == [2]


def test_rows_whose_leases_expire_together_are_tried_again() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), gives=("answer",), lease_s=10, max_attempts=1), LAST)
    worker = queue.join("w")
    queue.put(2)
    for _ in range(2):
        queue.lease(worker, "plain", 1)

    queue.at(20.0)

    assert queue.audit().failed == 0
    queue.lease(worker, "plain", 1)
    queue.at(40.0)
    assert queue.audit().failed == 1  # it was held alone


def test_a_request_that_waits_for_rows_tried_alone_says_so() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), gives=("answer",)), LAST)
    dies, lives = queue.join("d"), queue.join("l")
    queue.put(4)
    queue.lease(lives, "plain", 1)
    queue.lease(dies, "plain", 1)
    queue.die(dies)

    with pytest.raises(
        DeadlineExceeded, match="3 of 1 rows; rows that were held by a lost worker are tried with fewer"
    ):
        queue.lease(lives, "plain", 1)


def test_a_launcher_explains_a_death_that_the_server_saw_first() -> None:
    queue = Queue(TaskSpec(name="plain", needs=("prompt",), gives=("answer",), max_attempts=2), LAST)
    queue.put(1)
    for _ in range(2):
        worker = queue.join("w")
        queue.lease(worker, "plain")
        queue.die(worker)
        reply = queue.do(queue.admin, cmd.Dismiss(name="w", ended="it ended with status 1: in score()"))
        assert reply.lost == 1
    (letter,) = queue.do(queue.admin, cmd.GetFailed()).groups
    assert letter.reasons == ("plain: killed", "w: it ended with status 1: in score()") * 2


def test_a_request_for_all_rows_gets_those_that_lost_a_lease_together() -> None:
    queue = Queue(PLAIN)
    queue.put(4)
    worker = queue.join("w")
    queue.lease(worker, "plain")
    queue.die(worker)
    assert ids(queue.lease(queue.join("w"), "plain", 4, at_least=4)) == [0, 1, 2, 3]


def test_rows_given_back_without_blame_never_fail() -> None:
    queue = Queue(PLAIN)
    worker = queue.join("w")
    queue.put(1)
    for _ in range(10):
        queue.do(worker, cmd.GiveBack(token=queue.lease(worker, "plain").token))
    assert queue.audit().live == 1


def test_filtering_a_row_ends_its_group_and_revokes_it_elsewhere() -> None:
    queue = Queue(PLAIN, TaskSpec(name="side", needs=("prompt",), gives=("score",)))
    worker, other = queue.join("w"), queue.join("o")
    queue.put(2, 2)
    held = queue.lease(other, "side")
    queue.complete(worker, queue.lease(worker, "plain", 1), drop=(0,))
    assert (queue.audit().filtered, sorted(queue.ended)) == (2, [0, 1])
    done = queue.complete(other, held)
    assert unpack_ids(done.revoked).tolist() == [0, 1]


def test_a_side_task_that_gives_up_leaves_the_row_to_its_trainer() -> None:
    # given rows that were trained, while a side task still holds them
    side = TaskSpec(name="side", needs=("prompt",), gives=("score",), max_attempts=1)
    queue = Queue(side, TaskSpec(name="train", needs=("prompt",), batch_rows=2))
    worker, trainer = queue.join("w"), queue.join("t")
    queue.put(2)
    lease = queue.lease(worker, "side")
    queue.complete(trainer, queue.lease(trainer, "train"))
    assert queue.audit().live == 2
    # when the side task fails for good
    for row in (0, 1):
        index = np.int32([row]).tobytes()
        queue.do(worker, cmd.GiveBack(token=lease.token, index=index, reason="no judge", blame=True))
    # then they are consumed, and it says what was skipped
    audit = queue.audit()
    assert (audit.consumed, audit.live) == (2, 0)
    assert audit.reasons == {"skipped: failed 1 times in task 'side'; last: no judge": 2}


@pytest.mark.parametrize("declared_first", [True, False])
def test_a_batch_that_no_number_of_groups_fills_is_refused(declared_first: bool) -> None:
    train = TaskSpec(name="train", needs=("prompt",), batch_rows=10)
    queue = Queue(*([train] if declared_first else []))
    text = r"batch_rows=10 is not a multiple of group_size=4; use 8 or 12, or another group size"
    if declared_first:
        with pytest.raises(ConfigError, match=text):
            queue.put(5, 4)
        assert queue.audit().put == 0
    else:
        queue.put(5, 4)
        with pytest.raises(ConfigError, match=text):
            queue.do(queue.admin, cmd.Declare(task=train))


def test_steps_need_groups_of_one_size() -> None:
    train = TaskSpec(name="train", needs=("prompt",), batch_rows=6)
    queue = Queue()
    queue.put(1, 3)
    queue.put(1, 2)
    with pytest.raises(ConfigError, match="groups of 2 and 3; steps need groups of one size"):
        queue.do(queue.admin, cmd.Declare(task=train))
    queue = Queue(train)
    queue.put(1, 3)
    with pytest.raises(ConfigError, match="this run has groups of 3"):
        queue.put(1, 2)


# ---- the staleness rule


def test_staleness_0_is_synchronous() -> None:
    # given one step's rows generated with version 0, and more prompts than that
    queue, replica, judge, trainer = running(max_staleness=0)
    queue.put(12)
    produce(queue, replica, judge, 100)
    # then nothing more may start before that step is trained and its version is loaded
    waiting = queue.ask(replica, cmd.LeaseRows(task="rollout", count=4, timeout_s=60))
    step = queue.lease(trainer, "train")
    assert (len(ids(step)), step.step) == (4, 0)
    queue.complete(trainer, step)
    assert waiting not in queue.answers
    queue.publish(1)
    assert queue.answers[waiting] == cmd.LoadFirst(version=1)
    queue.load(replica, 1)
    lease = queue.lease(replica, "rollout")
    assert (len(ids(lease)), lease.version) == (4, 1)


def test_staleness_1_generates_the_next_step_while_one_trains() -> None:
    queue, replica, judge, trainer = running(max_staleness=1)
    queue.put(12)
    produce(queue, replica, judge, 4)
    queue.lease(trainer, "train")
    produce(queue, replica, judge, 100)  # step 1, still with version 0
    with pytest.raises(DeadlineExceeded):
        queue.lease(replica, "rollout")  # step 2 would be too old
    assert queue.lease(trainer, "train").step == 1


def test_a_lagging_replica_is_told_to_load_first() -> None:
    queue, lagging, judge, trainer = running(max_staleness=1)
    queue.put(16)
    fresh = queue.join("gen-1")
    assert queue.lease(fresh, "rollout") == cmd.LoadFirst(version=0)  # it has nothing loaded
    for version in (1, 2):
        produce(queue, lagging if version == 1 else fresh, judge, 4)
        queue.complete(trainer, queue.lease(trainer, "train"))
        queue.publish(version)
        queue.load(fresh, version)
    assert queue.lease(lagging, "rollout") == cmd.LoadFirst(version=2)
    queue.load(lagging, 1)  # late again, but not too late
    assert queue.lease(lagging, "rollout", 1).version == 1


def test_rows_of_a_lost_producer_are_done_again_by_none_older() -> None:
    # given a group begun with version 1, half of it done, and then its producer dies
    queue, replica, *_ = running(max_staleness=2)
    older = queue.join("older")
    queue.load(older, 0)
    queue.publish(1)
    queue.load(replica, 1)
    queue.put(3, 2)
    queue.complete(replica, queue.lease(replica, "rollout", 2), 0)
    queue.die(replica)
    # then an older replica must load first, and the row keeps its version
    assert queue.lease(older, "rollout", 2) == cmd.LoadFirst(version=1)
    queue.load(older, 1)
    again = queue.lease(older, "rollout", 2)
    assert ids(again) == [1]
    queue.complete(older, again)


def test_a_group_given_back_in_parts_starts_again_as_a_whole() -> None:
    # given a group whose rows went back in two parts, so that nobody has begun it
    queue, replica, judge, trainer = running(max_staleness=1)
    queue.put(1, 4)
    lease = queue.lease(replica, "rollout")
    queue.do(replica, cmd.GiveBack(token=lease.token, index=packed(0, 1)))
    queue.do(replica, cmd.GiveBack(token=lease.token, index=packed(2, 3)))
    # then it is leased and admitted whole, and trained as one group
    assert ids(queue.lease(replica, "rollout", 1)) == [0, 1, 2, 3]
    queue.die(replica)
    replica = queue.join("gen-1")
    queue.load(replica, 0)
    produce(queue, replica, judge, 4)
    assert ids(queue.lease(trainer, "train")) == [0, 1, 2, 3]


def test_a_group_that_joined_a_step_meanwhile_keeps_its_admission() -> None:
    # given a group given back by its producer when a step, which needs nothing of that, has it already
    scored = TaskSpec(name="reward", needs=("prompt",), gives=("reward",))
    queue = Queue(ROLLOUT, scored, TaskSpec(name="train", needs=("reward",), batch_rows=4), max_staleness=0)
    replica, judge, trainer = queue.join("gen"), queue.join("judge"), queue.join("train")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(1, 2)
    lease = queue.lease(replica, "rollout")
    queue.complete(judge, queue.lease(judge, "reward"))
    queue.do(replica, cmd.GiveBack(token=lease.token))
    # then it is generated again under the same version, and the step's other slots are as they were
    again = queue.lease(replica, "rollout")
    assert ids(again) == [0, 1]
    queue.complete(replica, again)
    queue.put(2, 2)
    assert ids(queue.lease(replica, "rollout")) == [2, 3]
    queue.complete(judge, queue.lease(judge, "reward", 2))
    assert ids(queue.lease(trainer, "train")) == [0, 1, 2, 3]


def test_loading_wakes_a_parked_lease() -> None:
    queue = Queue(ROLLOUT, TRAIN)
    replica = queue.join("gen-0")
    queue.put(4)
    waiting = queue.ask(replica, cmd.LeaseRows(task="rollout", count=4, timeout_s=60))
    assert waiting not in queue.answers  # no version was published
    queue.load(replica, 0)  # it starts from a checkpoint of its own
    assert queue.answers[waiting].version == 0


def test_versions_far_ahead_of_the_steps_cost_nothing() -> None:
    queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=1)
    replica, judge, trainer = (queue.join(name) for name in ("gen", "judge", "train"))
    queue.publish(10**15)  # the first one here may have any number
    queue.load(replica, 10**15)
    queue.put(8)
    produce(queue, replica, judge, 8)
    assert queue.lease(trainer, "train").step == 0
    for version in (1 << 70, 5, -1):
        with pytest.raises(ConfigError):
            queue.publish(version)
    for version in (1 << 70, 10**15 + 1, -1):
        with pytest.raises(ConfigError, match="was never published"):
            queue.load(replica, version)


def test_rows_that_come_complete_skip_the_rollout() -> None:
    # given rows that bring all that a step needs, and rows that do not
    queue = Queue(ROLLOUT, TaskSpec(name="train", needs=("response",), batch_rows=4), max_staleness=0)
    replica, trainer = queue.join("gen"), queue.join("train")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(2, prompt=TEXT, response=TOKENS)
    queue.put(4)
    # then only the others are generated, as many as the step has slots for
    lease = queue.lease(replica, "rollout", 100)
    assert ids(lease) == [2, 3]
    queue.complete(replica, lease)
    step = queue.lease(trainer, "train")
    assert ids(step) == [0, 1, 2, 3]
    queue.complete(trainer, step)
    assert queue.audit().consumed == 4


# ---- steps


def test_a_step_whose_trainer_dies_is_leased_again_with_the_same_rows() -> None:
    queue, replica, judge, trainer = running(max_staleness=1)
    queue.put(8)
    produce(queue, replica, judge, 8)
    first, second = queue.lease(trainer, "train"), queue.lease(trainer, "train")
    queue.die(trainer)
    # then both come back, in order, and row by row the same
    other = queue.join("train-1")
    again = [queue.lease(other, "train") for _ in range(2)]
    assert [(lease.step, ids(lease)) for lease in again] == [(0, ids(first)), (1, ids(second))]
    with pytest.raises(LeaseLost):
        queue.complete(trainer, first)
    queue.complete(other, again[0], drop=(1, 2))
    audit = queue.audit()
    assert (audit.consumed, audit.filtered, audit.live) == (2, 2, 4)
    assert audit.reasons == {"filtered: no gradient, as in a group with equal rewards": 2}


def test_giving_part_of_a_step_back_gives_back_all_of_it() -> None:
    queue, replica, judge, trainer = running()
    queue.put(4)
    produce(queue, replica, judge, 4)
    lease = queue.lease(trainer, "train")
    queue.do(trainer, cmd.GiveBack(token=lease.token, index=packed(2)))
    assert ids(queue.lease(trainer, "train")) == ids(lease)


def test_a_group_that_fails_leaves_the_open_step_to_others() -> None:
    side = TaskSpec(name="side", needs=("prompt",), gives=("score",))
    queue = Queue(side, TaskSpec(name="train", needs=("prompt",), batch_rows=4))
    worker, trainer = queue.join("w"), queue.join("t")
    queue.put(1, 2)
    queue.complete(worker, queue.lease(worker, "side", 1), drop=(0,))
    queue.put(2, 2)
    assert ids(queue.lease(trainer, "train")) == [2, 3, 4, 5]


def test_the_earliest_deadline_joins_a_step_first() -> None:
    # given every slot of two steps promised to rows under way, and a row that came complete and waits for one
    queue = Queue(ROLLOUT, TaskSpec(name="train", needs=("response",), batch_rows=4), max_staleness=1)
    replica, trainer = queue.join("gen"), queue.join("train")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(8)
    lease = queue.lease(replica, "rollout")
    queue.put(1, prompt=TEXT, response=TOKENS)
    # when one of them is dropped as others become ready
    queue.complete(replica, lease, 0, 1, 2, 3, 4, drop=(0,))
    # then those go first, as they must not become too old, and it has the next slot
    assert ids(queue.lease(trainer, "train")) == [1, 2, 3, 4]
    queue.complete(replica, lease, 5, 6, 7)
    assert sorted(ids(queue.lease(trainer, "train"))) == [5, 6, 7, 8]


def test_wanted_is_answered_when_the_steps_are_declared() -> None:
    queue = Queue(steps=3)
    waiting = queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=60))
    queue.do(queue.admin, cmd.Declare(task=TRAIN))
    assert queue.answers[waiting] == cmd.RowsWanted(count=12)


def test_wanted_counts_what_the_steps_still_lack() -> None:
    queue, replica, judge, _ = running(steps=2)
    assert queue.do(queue.admin, cmd.AwaitRowsWanted()).count == 8
    queue.put(8)
    waiting = queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=60))
    assert waiting not in queue.answers
    queue.complete(replica, queue.lease(replica, "rollout", 1))
    queue.complete(judge, queue.lease(judge, "reward"), drop=(0,))
    assert queue.answers[waiting] == cmd.RowsWanted(count=1)


def test_without_a_last_step_the_next_few_are_kept_supplied() -> None:
    queue, replica, judge, _ = running(max_staleness=1)
    assert queue.do(queue.admin, cmd.AwaitRowsWanted()).count == 12
    queue.put(12)
    waiting = queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=60))
    assert waiting not in queue.answers
    produce(queue, replica, judge, 4)
    assert queue.answers[waiting] == cmd.RowsWanted(count=4)


# ---- the end


def test_the_end_of_the_steps_ends_every_task_and_cancels_what_is_left() -> None:
    queue, replica, judge, trainer = running(steps=1)
    queue.put(6)
    produce(queue, replica, judge, 4)
    asked = [
        queue.ask(replica, cmd.AwaitVersion(after=0, timeout_s=60)),
        queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=9)),
    ]
    queue.complete(trainer, queue.lease(trainer, "train"))
    for session, task in ((replica, "rollout"), (judge, "reward"), (trainer, "train")):
        with pytest.raises(Ended, match=f"task '{task}' has no more rows to grant"):
            queue.lease(session, task, wait=60)
    for ticket in asked:
        assert isinstance(queue.answers[ticket], Ended)
    with pytest.raises(Ended, match="the stream has ended"):
        queue.put(1)
    audit = queue.audit()
    assert (audit.consumed, audit.cancelled, audit.live) == (4, 2, 0)
    assert audit.reasons == {"cancelled: more than the steps needed": 2}


def test_after_end_full_steps_are_trained_and_a_short_rest_is_cancelled() -> None:
    queue, replica, judge, trainer = running()
    queue.put(6)
    waiting = queue.ask(trainer, cmd.LeaseRows(task="train", count=1, timeout_s=60))
    queue.do(queue.admin, cmd.End())
    assert queue.audit().cancelled == 0  # 6 rows still fill a step
    produce(queue, replica, judge, 6)
    assert len(ids(queue.answers[waiting])) == 4
    assert queue.audit().reasons == {"cancelled: too few to fill a step": 2}
    queue.complete(trainer, queue.answers[waiting])
    assert queue.audit().live == 0
    with pytest.raises(Ended):
        queue.lease(trainer, "train")


def test_end_with_requests_parked_everywhere_answers_them_all() -> None:
    queue, replica, _, trainer = running(capacity_rows=4)
    queue.put(2)
    asked = [
        queue.ask(trainer, cmd.LeaseRows(task="train", count=1, timeout_s=60)),
        queue.ask(queue.admin, cmd.AddRows(groups=3, group_size=1, columns={"prompt": TEXT}, timeout_s=60)),
        queue.ask(replica, cmd.AwaitVersion(after=0, timeout_s=60)),
    ]
    queue.do(queue.admin, cmd.End())
    assert all(isinstance(queue.answers[ticket], Ended) for ticket in asked)
    assert (queue.audit().cancelled, queue.audit().live) == (2, 0)


def test_end_with_cancel_leaves_full_steps_to_the_trainer() -> None:
    queue, replica, judge, trainer = running()
    queue.put(6)
    produce(queue, replica, judge, 5)
    queue.do(queue.admin, cmd.End(cancel=True))
    assert (queue.audit().cancelled, queue.audit().live) == (2, 4)
    queue.complete(trainer, queue.lease(trainer, "train"))


def test_a_replica_that_waits_for_weights_learns_that_none_are_needed() -> None:
    queue, replica, *_ = running()
    queue.put(4)
    lease = queue.lease(replica, "rollout")
    queue.do(queue.admin, cmd.End())
    waiting = queue.ask(replica, cmd.AwaitVersion(after=0, timeout_s=60))
    assert waiting not in queue.answers
    queue.complete(replica, lease)  # the last row that any replica makes
    assert isinstance(queue.answers[waiting], Ended)
    late = queue.join("gen-9")
    with pytest.raises(Ended):  # rather than: load first
        queue.lease(late, "rollout")


def test_without_an_end_a_stream_of_plain_tasks_is_consumed() -> None:
    queue = Queue(PLAIN, LAST)
    worker = queue.join("w")
    queue.put(2)
    queue.complete(worker, queue.lease(worker, "plain"))
    assert queue.audit().live == 2
    queue.complete(worker, queue.lease(worker, "last"))
    assert queue.audit().consumed == 2
    queue.do(queue.admin, cmd.End())
    for task in ("plain", "last"):
        with pytest.raises(Ended):
            queue.lease(worker, task, wait=9)


def test_rows_that_are_put_beyond_the_last_step_end_before_another_task_hears_of_them() -> None:
    # given rows that a step can take as they are put, and one more than the last step lacks
    queue = Queue(
        TaskSpec(name="train", needs=("prompt",), batch_rows=2), TaskSpec(name="side", needs=("prompt",)), steps=1
    )
    # when
    queue.put(3)
    # then
    rows = queue.status().rows
    assert queue.audit().cancelled == 1
    assert rows["side"] == {"waiting": 0, "ready": 2, "selected": 0, "leased": 0, "done": 0}
