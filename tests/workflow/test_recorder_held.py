"""What a run leaves behind when whoever listens to it blocks."""

import threading
from pathlib import Path

import pytest

from asyncflow_sdk.types import Event
from asyncflow_sdk.types.events import Note, StepTrained
from asyncflow_sdk.workflow import recorder
from asyncflow_sdk.workflow.recorder import Recorder


def test_a_listener_that_blocks_costs_bounded_memory_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_EVENTS", 10)
    reads, began, heard = threading.Event(), threading.Event(), list[Event]()

    def listener(event: Event) -> None:
        began.set()
        reads.wait(60)
        heard.append(event)

    # given a listener that blocks at the first event
    record = Recorder(tmp_path / "run", [listener])
    record.event(Note(time_s=0.0, text="first"))
    assert began.wait(60)
    # when many come
    for number in range(100):
        record.event(Note(time_s=float(number), text="more"))
    record.event(StepTrained(time_s=100.0, worker="train-0", step=0, version=0, metrics={"reward": 1.0}))
    assert record._inbox.qsize() <= 11
    # then, when it reads again, every step is there, and what is not is told
    reads.set()
    record.close()
    assert record.rewards == [1.0]
    assert sum(isinstance(event, StepTrained) for event in heard) == 1
    assert record.errors == ["90 events were left out while a listener blocked"]
