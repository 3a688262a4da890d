"""LeaseRenewer: a lease lasts while work on it gets on, and not much longer."""

import functools
import time

import pytest
from queue_runs import Served
from waiting import until

from asyncflow_sdk.errors import DeadlineExceeded, LeaseLost
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.queue import Connection, LeaseRenewer, lease_renewal, open_queue


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases of a minute are renewed ten times a second."""
    monkeypatch.setattr(lease_renewal, "_PARTS", 600)


def worker(run: Served, patience_s: float) -> TransferQueue:
    """The queue of a worker whose leases are renewed."""
    connection = Connection(run.address, "worker")
    LeaseRenewer(connection, patience_s)
    return open_queue(connection)


def lasts_s(queue: TransferQueue) -> float:
    """Seconds from the oldest lease's grant to its expiry, in whole milliseconds. Only a renewal changes it."""
    oldest = queue.status().oldest
    assert oldest is not None
    return round(oldest.since_s + oldest.left_s, 3)


def outlasted(run: Served, queue: TransferQueue) -> None:
    """Let more time pass than the lease has, of which none is left without a renewal."""
    for _ in range(2):
        before = lasts_s(queue)
        run.pass_time(40.0)
        until(functools.partial(renewed, queue, before + 30.0), "a renewal")


def renewed(queue: TransferQueue, lasted_s: float) -> bool:
    return lasts_s(queue) > lasted_s


def test_a_lease_is_renewed_by_itself_and_also_while_its_work_gets_on(run: Served, often: None) -> None:
    queue, other = worker(run, 1000.0), run.queue()
    queue.declare("work", needs=["x"], lease_s=60.0)
    queue.put({"x": [1, 2]})
    batch = queue.get("work", 2)
    # when the work takes longer than the lease
    outlasted(run, other)
    # then nobody else gets its rows
    with pytest.raises(DeadlineExceeded):
        other.get("work", timeout_s=0)
    batch.complete(index=[0])
    batch.ack()


def test_a_step_in_parts_is_renewed_until_it_is_acknowledged(run: Served, often: None) -> None:
    queue, other = worker(run, 1000.0), run.queue()
    queue.declare("train", needs=["x"], batch_rows=2, lease_s=60.0)
    queue.put({"x": [1]})
    with queue.steps("train") as steps:
        step = next(iter(steps))
        # when the work on a part takes longer than the lease
        outlasted(run, other)
        # then its step goes on
        queue.put({"x": [2]})
        assert [part["x"].tolist() for part in step.parts()] == [[1], [2]]
        step.ack()
    assert queue.audit().consumed == 2


def test_a_lease_of_work_that_hangs_is_anothers_and_what_comes_late_has_no_effect(run: Served) -> None:
    queue, other = worker(run, 0.0), run.queue()
    queue.declare("work", needs=["x"], lease_s=1.0)
    queue.put({"x": [1]})
    batch = queue.get("work")
    assert other.get("work", timeout_s=60)["x"].tolist() == [1]
    with pytest.raises(LeaseLost):
        batch.ack()


def test_a_batch_that_nobody_has_any_more_is_not_renewed(run: Served) -> None:
    queue, other = worker(run, 1000.0), run.queue()
    queue.declare("work", needs=["x"], lease_s=1.0)
    queue.put({"x": [1]})
    queue.get("work")  # and drops it
    assert other.get("work", timeout_s=60)["x"].tolist() == [1]


def test_a_lease_is_renewed_no_more_often_than_need_be(run: Served) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"], lease_s=1000.0)
    queue.put({"x": [1]})
    batch = queue.get("work")
    for after_s, renews in ((900.0, False), (0.0, True)):
        before = lasts_s(queue)
        time.sleep(0.01)  # a renewal adds the time since the last one
        batch.renew(after_s=after_s)
        assert renewed(queue, before) == renews
