"""Renewing: a lease lasts while work on it gets on, and not much longer."""

import time

import asyncflow_sdk as af
from asyncflow_sdk.queue import Renewing


def test_a_lease_is_kept_until_the_work_has_not_got_on_for_the_time_of_patience() -> None:
    with af.serve() as run, af.connect(run.address) as worker:
        run.queue.declare("work", needs=["x"], lease_s=0.3)
        run.queue.put({"x": [1, 2]})
        Renewing(worker._connection, patience_s=1.5)

        batch = worker.queue.get("work", 2)
        time.sleep(0.9)
        batch.complete(index=[0])  # it gets on, so patience begins anew
        time.sleep(0.9)

        assert run.queue.status().lease_count == 1
        with run.queue.get("work", timeout_s=60) as again:  # it hangs: another gets the row
            assert again["x"].tolist() == [2]
            again.ack()


def test_a_batch_that_nobody_has_any_more_is_not_renewed() -> None:
    with af.serve() as run, af.connect(run.address) as worker:
        run.queue.declare("work", needs=["x"], lease_s=0.3)
        run.queue.put({"x": [1]})
        Renewing(worker._connection, patience_s=60.0)

        worker.queue.get("work")  # and drops it

        with run.queue.get("work", timeout_s=30) as again:
            again.ack()
