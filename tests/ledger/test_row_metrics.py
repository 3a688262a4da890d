"""Metrics of rows, by which the ledger decides nothing: times of completion, lengths of responses."""

from __future__ import annotations

import numpy as np
import pytest
from ledger_queue import TOKENS, Queue, ids, produce, running

from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.ledger import unpack_ids
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types.reports import StatusReport, StepAges, length_bins

pytestmark = pytest.mark.fast


def lengths(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def status(queue: Queue) -> StatusReport:
    return queue.status()


def ended(queue: Queue, state: str) -> list[ev.RowsEnded]:
    return [e for e in queue.events if isinstance(e, ev.RowsEnded) and e.state == state]


def test_a_step_says_when_each_of_its_rows_was_completed() -> None:
    # given rows that were begun and completed with version 0, and others that were completed when 1 was current
    queue, replica, judge, trainer = running(batch=4, max_staleness=1)
    queue.put(8, 1)
    produce(queue, replica, judge, 4)
    late = queue.lease(replica, "rollout", 4)
    first = queue.lease(trainer, "train")
    assert unpack_ids(first.completed_at).tolist() == [0] * 4
    assert status(queue).ages == StepAges(step=0, in_flight_mean=0, in_queue_mean=0, in_flight_max=0, in_queue_max=0)
    queue.complete(trainer, first)
    queue.publish(1)

    queue.complete(replica, late)
    queue.complete(judge, queue.lease(judge, "reward", 4))
    second = queue.lease(trainer, "train")

    assert unpack_ids(second.completed_at).tolist() == [1] * 4
    assert status(queue).ages == StepAges(step=1, in_flight_mean=1, in_queue_mean=0, in_flight_max=1, in_queue_max=0)


def test_ranks_hear_it_of_their_own_rows() -> None:
    queue, replica, judge, trainer = running(batch=4, max_staleness=1)
    queue.put(4, 1)
    produce(queue, replica, judge, 4)
    other = queue.join("other")
    team = {"group": "t", "world_size": 2, "count": 1, "task": "train", "timeout_s": 9.0}
    ticket = queue.ask(trainer, cmd.LeaseRows(rank=0, **team))
    mine = queue.do(other, cmd.LeaseRows(rank=1, **team))

    assert len(unpack_ids(mine.completed_at)) == len(ids(mine)) == 2
    assert len(unpack_ids(queue.answers[ticket].completed_at)) == 2


def test_rows_that_end_bring_the_lengths_of_their_responses() -> None:
    queue, replica, judge, trainer = running(batch=2, max_staleness=1)
    queue.put(2, 1)
    lease = queue.lease(replica, "rollout")
    gives = dict.fromkeys(queue.tasks["rollout"].gives, TOKENS)
    queue.do(replica, cmd.Complete(token=lease.token, columns=gives, lengths=lengths(5, 70)))
    queue.complete(judge, queue.lease(judge, "reward"))
    queue.complete(trainer, queue.lease(trainer, "train"))

    (event,) = ended(queue, "consumed")
    assert event.lengths == length_bins(np.array([5, 70]))
    assert (event.tokens, event.squares) == (75, 25 + 4900)
    assert not event.unfinished


def test_what_ends_while_it_is_generated_has_about_the_tokens_that_others_had_by_then() -> None:
    # given responses of 30 tokens in 3 seconds
    queue, replica, _, _ = running(batch=2, max_staleness=1)
    queue.put(2, 1)
    lease = queue.lease(replica, "rollout", 1)
    gives = dict.fromkeys(queue.tasks["rollout"].gives, TOKENS)
    queue.at(3.0)
    queue.do(replica, cmd.Complete(token=lease.token, columns=gives, lengths=lengths(30)))
    # when another is cancelled after 5
    other = queue.lease(replica, "rollout", 1)
    queue.at(8.0)
    queue.do(queue.admin, cmd.Cancel(ids=other.ids))

    (event,) = ended(queue, "cancelled")
    assert not event.lengths
    assert event.unfinished == length_bins(np.array([50]))
    assert event.unfinished_tokens == 50


def test_lengths_that_are_not_one_for_each_row_are_left_out() -> None:
    for said in (lengths(5), lengths(5, -1), lengths(1, 2, 3), b"\0\0\0"):
        queue, replica, _, _ = running(batch=2, max_staleness=1)
        queue.put(2, 1)
        lease = queue.lease(replica, "rollout")
        gives = dict.fromkeys(queue.tasks["rollout"].gives, TOKENS)
        queue.do(replica, cmd.Complete(token=lease.token, columns=gives, lengths=said))
        queue.do(queue.admin, cmd.End(cancel=True))

        assert sum(event.count for event in ended(queue, "cancelled")) == 2
        assert not any(event.lengths for event in ended(queue, "cancelled"))
