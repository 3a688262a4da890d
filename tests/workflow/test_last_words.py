"""What came of one batch is sent with the request for the next: by stages, and by consumers of one's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, WriteOnceError
from asyncflow_sdk.interfaces import LeasedBatch
from asyncflow_sdk.types import events as ev

pytestmark = pytest.mark.fast

ROWS, BATCH = 40, 8


def given_rows(run: af.Run) -> None:
    run.queue.declare("double", needs=["x"], gives=["y"])
    run.queue.declare("train", needs=["y"])
    run.queue.put({"x": np.arange(float(ROWS))})


def finish_all(consumer: Iterable[LeasedBatch], *columns: str) -> None:
    for batch in consumer:
        batch.finish({name: batch.array("x") for name in columns})


def test_what_a_stage_says_too_late_costs_its_rows_only() -> None:
    events: list[ev.Event] = []
    with af.serve(on_event=events.append) as run, af.connect(run.address) as own:
        given_rows(run)
        run.queue.end()

        def double(x: Any) -> Any:
            if x[0] == 0:
                run.queue.cancel([0])
            if x[0] == BATCH:
                run.queue.cancel(np.arange(BATCH, 2 * BATCH))
            return x * 2

        af.Stage(double, task="double", needs=["x"], gives=["y"], batch=BATCH, lease_s=600.0).run(own.queue)

        run.queue.end(cancel=True)
        audit = run.audit()
    assert audit.balanced
    late = [event.text for event in events if isinstance(event, ev.Note) and "came too late" in event.text]
    assert len(late) == 1
    assert late[0].startswith(f"{BATCH} results of task 'double'")
    worked = [event for event in events if isinstance(event, ev.Span) and event.kind == "y"]
    assert sum(event.rows for event in worked) == ROWS


def test_a_consumer_sends_what_was_finished_with_its_next_request() -> None:
    with af.serve() as run, af.connect(run.address) as own:
        given_rows(run)
        run.queue.end()
        leases = list[int]()

        for batch in own.consumer("double", count=BATCH):
            batch.finish({"y": batch.array("x")})
            leases.append(run.queue.status().completed.get("double", 0))

        assert leases == [BATCH * before for before in range(ROWS // BATCH)], "not before the next request"
        assert run.queue.status().completed["double"] == ROWS


def test_rows_whose_last_word_is_refused_are_given_back_and_the_loop_can_go_on() -> None:
    with af.serve() as run, af.connect(run.address) as own:
        given_rows(run)
        run.queue.end()
        consumer = own.consumer("double", count=ROWS)

        with pytest.raises(WriteOnceError, match="'x'"):
            finish_all(consumer, "x", "y")

        assert run.queue.status().lease_count == 0
        finish_all(consumer, "y")
        with run.queue.get("train", ROWS, timeout_s=5.0) as batch:
            assert batch.rows == ROWS
            batch.ack()


def test_the_last_word_has_its_effect_also_when_nothing_more_comes() -> None:
    with af.serve() as run, af.connect(run.address) as own:
        given_rows(run)

        with pytest.raises(DeadlineExceeded):
            finish_all(own.consumer("double", count=ROWS, timeout_s=0.05), "y")

        with run.queue.get("train", ROWS, timeout_s=5.0) as batch:
            assert batch.rows == ROWS
            batch.ack()
