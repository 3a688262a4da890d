"""Staleness policies in the ledger: what each lets happen to a straggler, and what becomes of one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_queue import REWARD, ROLLOUT, TRAIN, Queue, ids, produce, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, LeaseLost, PluginError
from asyncflow_sdk.interfaces import StalenessPolicy, StepWindow
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.tasks import PolicySpec

pytestmark = pytest.mark.fast

Drop: type[StalenessPolicy] = registry().get("staleness", "drop").load()

POLICIES = ["wait", "drop", "count"]


def straggling(policy: str, max_staleness: int = 1, steps: int = 1, **limits: Any) -> tuple[Queue, int, cmd.Leased]:
    """A run in which one replica has had two rows since version 0, and the others have gone on for ``steps`` steps as far
    as they may: (queue, the slow replica, its lease)."""
    limits = {"max_staleness": max_staleness, "staleness": PolicySpec(policy)} | limits
    queue, fast, judge, trainer = running(**limits)
    slow = queue.join("slow")
    queue.load(slow, 0)
    queue.put(20, 2)
    lease = queue.lease(slow, "rollout", 2)
    for step in range(steps):
        queue.load(fast, step)
        for _ in range(2):
            try:
                produce(queue, fast, judge, 2)
            except DeadlineExceeded:
                break
        try:
            taken = queue.lease(trainer, "train")
        except DeadlineExceeded:
            break
        queue.complete(trainer, taken)
        queue.publish(step + 1)
    return queue, slow, lease


def step_of(queue: Queue) -> int:
    return queue.status().step


def test_wait_fills_no_step_without_the_rows_that_are_due_in_it() -> None:
    queue, slow, lease = straggling("wait", steps=4)

    assert step_of(queue) == 1  # the last that may train version 0
    assert not queue.audit().expired
    assert queue.complete(slow, lease) == cmd.Completed(revoked=b"")


def test_drop_fills_steps_with_what_is_there_and_late_groups_expire_also_while_they_are_generated() -> None:
    queue, slow, lease = straggling("drop", steps=2)

    assert step_of(queue) == 2
    assert queue.audit().reasons["expired: older than max_staleness 1 (policy 'drop')"] == 2
    (told,) = [event for event in queue.events if isinstance(event, ev.RowsEnded) and event.state == "expired"]
    assert (told.count, told.reason) == (2, "older than max_staleness 1 (policy 'drop')")
    with pytest.raises(LeaseLost):
        queue.complete(slow, lease)


def test_count_trains_them_whenever_they_are_done() -> None:
    queue, slow, lease = straggling("count", steps=4)
    before = queue.status()

    queue.complete(slow, lease)
    queue.complete(judge := queue.join("another judge"), queue.lease(judge, "reward"))

    assert before.step >= 4
    assert queue.status().rows["train"]["selected"] == before.rows["train"]["selected"] + 2
    assert not queue.audit().expired


def test_what_expired_is_wanted_again() -> None:
    queue, fast, judge, _ = running(max_staleness=1, steps=3, staleness=PolicySpec("drop"))
    slow = queue.join("slow")
    queue.load(slow, 0)
    queue.put(6, 2)
    queue.lease(slow, "rollout", 2)
    assert isinstance(parked(queue, cmd.AwaitRowsWanted()), DeadlineExceeded)  # twelve rows for three steps of four

    produce(queue, fast, judge, 4)
    queue.publish(1)
    queue.load(fast, 1)
    produce(queue, fast, judge, 4)

    assert queue.audit().expired == 2
    assert queue.do(queue.admin, cmd.AwaitRowsWanted()) == cmd.RowsWanted(count=2)


def parked(queue: Queue, command: Any) -> Any:
    with pytest.raises(DeadlineExceeded) as caught:
        queue.do(queue.admin, command)
    return caught.value


def test_a_group_of_which_some_rows_are_done_expires_as_a_whole_with_its_leases_of_stages() -> None:
    queue, fast, judge, _ = running(max_staleness=1, staleness=PolicySpec("drop"))
    slow = queue.join("slow")
    queue.load(slow, 0)
    queue.put(20, 2)
    lease = queue.lease(slow, "rollout", 2)
    queue.complete(slow, lease, 0)
    scored = queue.lease(judge, "reward", 1)  # of the group, while its other row is generated

    for version in (1, 2):
        produce(queue, fast, queue.join("judge"), 4)
        queue.publish(version)
        queue.load(fast, version)

    assert queue.audit().expired == 2
    for session, held in ((slow, lease), (judge, scored)):
        with pytest.raises(LeaseLost):
            queue.complete(session, held)


@pytest.mark.parametrize("policy", POLICIES)
def test_at_max_staleness_0_no_replica_begins_more_than_the_step_lacks(policy: str) -> None:
    queue, fast, _, _ = running(max_staleness=0, staleness=PolicySpec(policy))
    queue.put(10, 2)

    assert len(ids(queue.lease(fast, "rollout"))) == 4
    with pytest.raises(DeadlineExceeded):
        queue.lease(fast, "rollout")


def test_a_session_hears_once_which_of_its_rows_have_ended() -> None:
    queue, slow, lease = straggling("drop", steps=0)
    waiting = queue.ask(slow, cmd.AwaitLost(timeout_s=100))
    assert waiting not in queue.answers

    queue.do(queue.admin, cmd.Cancel(ids=lease.ids))

    assert queue.answers[waiting] == cmd.Lost(ids=lease.ids)
    with pytest.raises(DeadlineExceeded, match="none of the rows this session has leased has ended"):
        queue.do(slow, cmd.AwaitLost())


def test_rows_that_a_session_completed_are_none_it_has_lost() -> None:
    queue, slow, lease = straggling("drop", steps=0)
    queue.ask(slow, cmd.AwaitLost(timeout_s=100))
    queue.complete(slow, lease, 0)  # one of the two

    queue.do(queue.admin, cmd.Cancel(ids=lease.ids))

    assert [cmd.unpack_ids(a.ids).tolist() for a in queue.answers.values() if isinstance(a, cmd.Lost)] == [[1]]


def test_the_status_and_an_event_say_what_a_policy_promises() -> None:
    for policy, bounded in (("wait", True), ("drop", True), ("count", False)):
        queue = Queue(ROLLOUT, REWARD, TRAIN, max_staleness=2, staleness=PolicySpec(policy))
        status = queue.status()
        (note,) = [event for event in queue.events if isinstance(event, ev.Note)]

        assert (status.staleness, status.max_staleness) == (policy, 2)
        assert ("no trained token is older" in status.promise) == bounded
        assert note.text == f"staleness policy {policy!r} with max_staleness 2: {status.promise}"
        assert note.level == ("info" if bounded else "warning")


def test_an_unknown_policy_is_refused_with_those_there_are_and_nothing_changes() -> None:
    queue = Queue(max_staleness=3)
    with pytest.raises(PluginError, match=r"no staleness adapter is named 'hope'; installed: .*wait, drop, count"):
        queue.do(queue.admin, cmd.Configure(staleness=PolicySpec("hope"), max_staleness=0))
    queue.do(queue.admin, cmd.Declare(task=TRAIN))
    assert (queue.status().staleness, queue.status().max_staleness) == ("wait", 3)


def test_options_a_policy_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"staleness policy 'drop' cannot be created with \{'share': 1\}"):
        Queue(staleness=PolicySpec("drop", {"share": 1}))


def test_the_policy_is_set_before_the_steps_are() -> None:
    queue = Queue(TRAIN)
    with pytest.raises(ConfigError, match="before the task with batch_rows"):
        queue.do(queue.admin, cmd.Configure(staleness=PolicySpec("drop")))


class Own(Drop):
    """What a user may write: right, and wrong in ways that tests choose."""

    wrong: str = ""

    def admit(self, window: StepWindow, deadline: int) -> int:
        if self.wrong == "admit":
            raise ValueError("no idea")
        return 10**30 if self.wrong == "admits all" else super().admit(window, deadline)

    def select(self, window: StepWindow, deadline: int | None) -> int:
        if self.wrong == "select":
            raise ValueError("no idea")
        return "a few" if self.wrong == "no number" else 10**30  # type: ignore[return-value]

    def least_rows(self, batch_rows: int, max_staleness: int) -> int:
        return batch_rows * (max_staleness + 2) if self.wrong == "needs room" else batch_rows


class NeverLate(Own):
    bounded = True

    def evict(self, window: StepWindow) -> tuple[int, ...]:
        return (-5, 10**9)  # no such rows


def own_queue(policy: StalenessPolicy, *tasks: TaskSpec, **limits: Any) -> Queue:
    """With a policy of this process."""
    return Queue(*tasks, policy=policy, staleness=PolicySpec("mine"), **limits)


def test_a_queue_too_small_for_its_policy_is_an_error_at_set_up_and_no_deadlock() -> None:
    policy = Own()
    policy.wrong = "needs room"
    queue = own_queue(policy, max_staleness=1, capacity_rows=11)

    with pytest.raises(ConfigError, match=r"may never fill in a queue of capacity_rows=11: it needs 12"):
        queue.do(queue.admin, cmd.Declare(task=TRAIN))

    queue.do(queue.admin, cmd.Configure(capacity_rows=12))
    queue.do(queue.admin, cmd.Declare(task=TRAIN))
    with pytest.raises(ConfigError, match="it needs 12"):
        queue.do(queue.admin, cmd.Configure(capacity_rows=11))


def test_an_answer_that_is_too_large_lets_in_no_more_than_there_is_room_for() -> None:
    policy = Own()
    policy.wrong = "admits all"
    queue = own_queue(policy, ROLLOUT, REWARD, TRAIN, steps=2)
    replica = queue.join("gen")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(10, 2)

    assert len(ids(queue.lease(replica, "rollout"))) == 8  # all steps have slots for


@pytest.mark.parametrize("wrong", ["admit", "select", "no number"])
def test_a_policy_that_fails_fails_those_who_lease_and_says_so(wrong: str) -> None:
    policy = Own()
    queue = own_queue(policy, ROLLOUT, REWARD, TRAIN, max_staleness=1)
    replica, judge, trainer = queue.join("gen"), queue.join("judge"), queue.join("train")
    queue.publish(0)
    queue.load(replica, 0)
    queue.put(4, 2)
    first = queue.lease(replica, "rollout", 2)
    policy.wrong = wrong
    waiting = queue.ask(trainer, cmd.LeaseRows(task="train", count=4, timeout_s=100))

    if wrong == "admit":
        with pytest.raises(PluginError, match="staleness policy 'mine' failed: ValueError: no idea"):
            queue.lease(replica, "rollout", 2)
        policy.wrong = ""
        assert len(ids(queue.lease(replica, "rollout", 2))) == 2  # no row was lost
        return
    queue.complete(replica, first)
    queue.complete(judge, queue.lease(judge, "reward"))

    assert isinstance(queue.answers[waiting], PluginError)
    with pytest.raises(PluginError, match="staleness policy 'mine' failed"):
        queue.lease(replica, "rollout", 2)
    assert [event.level for event in queue.events if isinstance(event, ev.Note)] == ["info", "error"]
    assert queue.audit().balanced


def test_what_a_bounded_policy_forgets_to_evict_is_not_trained_late() -> None:
    # given rows that are generated while two steps fill with others
    queue = own_queue(NeverLate(), ROLLOUT, REWARD, TRAIN, max_staleness=1)
    fast, slow, judge, trainer = (queue.join(name) for name in ("fast", "slow", "judge", "train"))
    queue.publish(0)
    for replica in (fast, slow):
        queue.load(replica, 0)
    queue.put(6, 2)
    late = queue.lease(slow, "rollout", 2)
    for version in (0, 1):
        queue.load(fast, version)
        produce(queue, fast, judge, 4)
        queue.complete(trainer, queue.lease(trainer, "train"))
        queue.publish(version + 1)
    # when they are done
    queue.complete(slow, late)
    queue.complete(judge, queue.lease(judge, "reward"))
    # then no step takes them
    assert (queue.status().step, queue.status().free_slots) == (2, 4)
