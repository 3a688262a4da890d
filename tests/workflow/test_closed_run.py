"""A run that is closed has ended for a worker that holds nothing of it, whatever that was asking for; one that holds rows was not
through."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.queue import TransferQueue
from asyncflow_sdk.workflow.worker import RolloutJob, WorkerConfig, WorkerMain


@pytest.mark.parametrize("holds", [False, True])
def test_a_worker_was_through_with_a_run_that_is_closed_unless_it_holds_rows(tmp_path: Path, holds: bool) -> None:
    # given
    run = af.serve(tmp_path / "run")
    run.queue.declare("work", needs=["x"])
    run.queue.put({"x": [1.0]})

    def work(queue: TransferQueue) -> None:
        batch = queue.get("work", timeout_s=30)
        if not holds:
            batch.ack()
        # when
        run.close()
        queue.status()
        raise AssertionError(f"a closed run answered a worker with {batch.rows} rows")

    job = RolloutJob("", "", {}, af.Sampling(), "", "", False, "", ())
    ending = WorkerMain(msgspec.json.encode(WorkerConfig("work-0", run.address, job, [])), work).run()
    # then
    assert bool(ending.status) == holds, ending.text
    assert ("was closed by the process that served it" in ending.text) == holds
