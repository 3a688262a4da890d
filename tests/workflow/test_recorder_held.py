"""What a run leaves behind when whoever listens to it blocks."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.types import Batch, Event
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


class Held:
    """A listener that holds the recorder at the first event that comes, until ``gate`` is set."""

    def __init__(self) -> None:
        self.began, self.gate = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        self.began.set()
        self.gate.wait(60)


def held_recorder(directory: Path) -> tuple[Recorder, Held]:
    held = Held()
    record = Recorder(directory, [held])
    record.event(Note(time_s=0.0, text="first"))
    assert held.began.wait(60)
    return record, held


def recorded(directory: Path) -> dict[int, list[float]]:
    return {step: batch["x"].tolist() for step, batch in af.read_steps(directory)}


def test_a_recorder_that_is_late_leaves_no_step_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a recorder that stands still, and more steps than may wait, each acknowledged by a worker that has left
    monkeypatch.setattr(recorder, "MOST_WAITING", 3)
    record, held = held_recorder(tmp_path / "run")
    waiting = []

    def on_step(step: int, read: Callable[[], Batch]) -> None:
        record.step(step, read)
        waiting.append(len(record._steps))

    with af.serve(on_step=on_step) as run:
        run.queue.declare("train", needs=["x"], batch_rows=2)
        for step in range(10):
            with af.connect(run.address) as worker:
                worker.queue.put({"x": [step, step + 0.5]})
                run.queue.get("train").ack()
        # then those beyond are written meanwhile
        assert max(waiting) == 3
        assert sorted(recorded(tmp_path / "run")) == list(range(7))
    # and the others when it goes on, though the run is closed
    held.gate.set()
    record.close()
    assert recorded(tmp_path / "run") == {step: [step, step + 0.5] for step in range(10)}
    assert record.errors == []


def test_a_listener_that_never_returns_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CLOSE_S", 0.05)
    record, held = held_recorder(tmp_path / "run")
    for step in range(5):
        record.step(step, lambda step=step: Batch.of({"x": np.array([float(step)])}))

    record.close()

    assert recorded(tmp_path / "run") == {step: [step] for step in range(5)}
    assert record.errors == ["a listener still blocks; its last events were left out"]
    held.gate.set()


def test_of_a_step_that_is_trained_again_the_last_rows_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST_WAITING", 2)
    record, held = held_recorder(tmp_path / "run")
    for number, step in enumerate([0, 1, 2, 1, 2, 3]):
        record.step(step, lambda number=number: Batch.of({"x": np.array([float(number)])}))
    held.gate.set()
    record.close()
    assert recorded(tmp_path / "run") == {0: [0], 1: [3], 2: [4], 3: [5]}


def test_a_checkpoint_makes_no_step_final_that_is_not_recorded(tmp_path: Path) -> None:
    # given a recorder that stands still, and acknowledged steps of a durable run
    record, held = held_recorder(tmp_path / "record")
    with af.serve(
        tmp_path / "run", durability="process", checkpoints=True, on_step=record.step, on_final=record.settle
    ) as run:
        run.queue.declare("train", needs=["x"], batch_rows=2)
        run.queue.put({"x": np.arange(8.0)})
        for number in range(4):
            run.queue.get("train").ack()
            if number in (0, 2):
                run.checkpoint(lambda path: None, keep=2)
        # then a step is written before a checkpoint covers it, so that its driver may be killed
        assert recorded(tmp_path / "record") == {0: [0, 1]}
        run.queue.end(cancel=True)
        run.checkpoint(lambda path: None, keep=1)
        assert recorded(tmp_path / "record") == {step: [2 * step, 2 * step + 1] for step in range(4)}
    held.gate.set()
    record.close()
    assert record.errors == []
