"""Runs that are served again: after an error, after a worker that failed for good, after their end, and by whom they are waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from queue_runs import memory_of, values_of
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, ServerLost

pytestmark = [pytest.mark.usefixtures("soon"), pytest.mark.fast]


def test_a_run_is_gone_on_with_after_an_error_and_after_its_end(tmp_path: Path) -> None:
    # given a run that an error ended
    run_directory = tmp_path / "run"
    told: list[Any] = []

    def fail() -> None:
        with af.serve(run_directory, durability="process", capacity_rows=50, on_event=told.append) as run:
            assert run.recovered is None
            run.queue.declare("work", needs=["x"])
            run.queue.put({"x": values_of(0, 5)}, key="first")
            run.queue.get("work", 2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert any(getattr(event, "text", "").startswith("5 live rows are kept for the next server") for event in told)
    # when it is served again, it has its rows, those that were leased too, and its limits
    with af.serve(run_directory) as run:
        assert run.recovered is not None
        assert (run.recovered.rows, run.recovered.discarded_bytes) == (5, 0)
        assert run.queue.put({"x": values_of(0, 5)}, key="first").again
        assert run.queue.status().capacity_rows == 50
        taken = 0
        while taken < 5:
            with run.queue.get("work", 5) as batch:
                taken += batch.rows
                batch.ack()
        run.queue.put({"x": [6.0]})
    # then leaving it is no end of it: only the word is
    with af.serve(run_directory) as run:
        assert (run.audit().put, run.audit().consumed, run.audit().live) == (6, 5, 1)
        run.queue.get("work").ack()
        run.queue.end()
        memory = memory_of(run.addresses)
    assert not memory.exists()
    with af.serve(run_directory, durability="process") as run:  # what is over is over: this is another run
        assert run.recovered is None
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": [1.0]})
        run.queue.end(cancel=True)


def test_a_worker_that_fails_for_good_takes_no_row_with_it(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run", durability="process") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": values_of(0, 5)})
        run.fail(af.WorkerFailed("rollout-0 ended for good"))
        with pytest.raises(af.WorkerFailed):
            next(iter(run.consumer("work")))

    with af.serve(tmp_path / "run") as run:
        assert run.audit().live == 5
        run.queue.end(cancel=True)


def test_what_durability_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a directory"):
        af.serve(durability="process")
    with pytest.raises(ConfigError, match='is "process" or "host", not \'disk\''):
        af.serve(tmp_path, durability="disk")  # type: ignore[arg-type]


def test_a_snapshot_whose_clean_up_fails_counts_all_the_same(tmp_path: Path) -> None:
    # given a server that makes a new snapshot, and cannot remove all that is old
    run_directory = tmp_path / "run"
    with af.serve(run_directory, durability="process") as run:
        run.queue.declare("work", needs=["x"])
        run.queue.put({"x": values_of(0, 3)})
    (run_directory / "journal" / "journal-000000").mkdir()
    with af.serve(run_directory) as run:
        run.queue.put({"x": values_of(3, 4)})
    # then what came after it is there
    with af.serve(run_directory) as run:
        assert run.audit().put == 7
        (run_directory / "journal" / "journal-000000").rmdir()
        run.queue.end(cancel=True)


def test_a_run_that_may_come_back_is_waited_for_and_one_that_is_over_is_not(tmp_path: Path) -> None:
    # given a client in the middle of a request when a durable run is closed before its end
    run = af.serve(tmp_path / "run", durability="process")
    run.queue.declare("work", needs=["x"])
    other = af.connect(run.address)
    wait = in_thread(other.queue.get, "work", timeout_s=1000)
    until(lambda: run.queue.status().waiting, "the request")
    run.close()
    # when it is served again
    with af.serve(tmp_path / "run") as run:
        run.queue.put({"x": [1.0]})
        # then the client got what it asked for
        with wait() as batch:
            batch.ack()
        run.queue.end()
    # and is told of the end that is one
    with pytest.raises(ServerLost, match=f"the run at {run.address} was closed"):
        other.queue.status()
    other.close()


def test_a_client_that_leaves_ends_no_run(tmp_path: Path) -> None:
    with af.serve(tmp_path / "run") as run:
        run.queue.declare("work", needs=["x"])
        with af.connect(run.address) as client:
            client.queue.put({"x": [1.0]})
        assert run.queue.put({"x": [2.0]}).count == 1
        assert not run.queue.status().over
