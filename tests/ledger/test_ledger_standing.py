"""Requests for prompts by a replica that hears of versions by itself: they wait for the version that they need."""

from __future__ import annotations

import pytest
from ledger_queue import ROLLOUT, Queue, ids

from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.fast


def standing(max_staleness: int) -> tuple[Queue, int, cmd.Leased]:
    """A queue of 12 prompts, and a replica that holds 4 of them, with version 0."""
    train = TaskSpec(name="train", needs=("response",), batch_rows=4)
    queue = Queue(ROLLOUT, train, max_staleness=max_staleness)
    replica = queue.join("gen")
    queue.put(12)
    queue.publish(0)
    queue.load(replica, 0)
    held = queue.lease(replica, "rollout", 4)
    assert len(ids(held)) == 4
    return queue, replica, held


def test_it_waits_for_what_it_has_to_load_and_then_gets_what_it_has_room_for() -> None:
    # given a replica that asked when it had room for one row, and may have four
    queue, replica, held = standing(max_staleness=0)
    queue.complete(replica, held, 0, 1, 2)
    asked = queue.ask(replica, cmd.LeaseRows(task="rollout", count=1, most=4, timeout_s=60))
    queue.complete(replica, held, 3)
    # when there is a version with which it would be given some
    queue.publish(1)
    assert queue.lease(replica, "rollout", 1) == cmd.LoadFirst(version=1)  # what others are told
    # then it is not told to load it
    assert asked not in queue.answers
    # and when it has, it gets as many as it has room for by now
    queue.load(replica, 1)
    assert len(ids(queue.answers[asked])) == 4


@pytest.mark.parametrize("end", ["loaded", "failed"])
def test_it_is_given_nothing_while_it_loads(end: str) -> None:
    # given a replica that may load a version, and might have rows for the one that it has
    queue, replica, _ = standing(max_staleness=1)
    queue.publish(1)
    queue.do(replica, cmd.AwaitVersion(after=0))
    queue.do(replica, cmd.ReportStaged(version=1))
    assert queue.do(replica, cmd.Swap(version=1)) == cmd.Permitted(version=1)
    # when it asks
    asked = queue.ask(replica, cmd.LeaseRows(task="rollout", count=1, most=7, timeout_s=60))
    # then it gets them when it is through with the load, whatever came of that: as many as it may hold with what it has
    assert asked not in queue.answers
    queue.do(
        replica,
        cmd.ReportLoaded(version=1) if end == "loaded" else cmd.ReportLoadFailed(version=1, reason="it would not"),
    )
    assert len(ids(queue.answers[asked])) == 3


def test_a_report_of_what_waits_changes_nothing() -> None:
    """No journal has reports: what one changed would be missing when the journal is replayed."""
    # given a replica that waits for a version, and another one that takes the last prompts with it
    queue, replica, _ = standing(max_staleness=1)
    other = queue.join("gen-1")
    queue.load(other, 0)
    queue.lease(other, "rollout", 4)
    asked = queue.ask(replica, cmd.LeaseRows(task="rollout", count=1, most=8, timeout_s=60))
    queue.publish(1)
    queue.load(other, 1)
    assert len(ids(queue.lease(other, "rollout", 4))) == 4
    assert asked not in queue.answers
    # then nothing has changed after a report
    queue.check()
