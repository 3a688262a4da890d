"""What a recorder has written when its process is killed, and what the next one knows of it."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types import Batch, Event, one_version
from asyncflow_sdk.types.events import Begun, Loaded, Note, Published, StepTrained
from asyncflow_sdk.workflow.recorder import Recorder


def step(number: int, **metrics: float) -> StepTrained:
    return StepTrained(time_s=1.0 + number, worker="train-0", step=number, version=number, metrics=metrics)


def test_that_a_step_was_trained_is_written_before_anything_else_happens(tmp_path: Path) -> None:
    # given a listener that hangs, and events that wait behind it
    go_on = threading.Event()
    recorder = Recorder(tmp_path, [lambda event: go_on.wait(60) and None])
    for number in range(3):
        recorder.event(Note(time_s=0.0, text=f"{number}"))

    recorder.event(step(0, reward=0.5))

    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [0]
    go_on.set()
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert sorted(line["event"] for line in lines) == ["note", "note", "note", "step"]


def test_a_recorder_that_goes_on_knows_every_step_also_of_a_loss_that_was_no_number(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [])
    recorder.event(step(0, reward=0.5, staleness_max=3.0))
    recorder.event(step(1, reward=math.nan, loss=math.nan))
    recorder.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"step","step":')  # torn

    again = Recorder(tmp_path, [], again=True)
    again.event(step(1, reward=0.75, loss=0.0))  # trained again
    again.close()

    assert (again.steps, again.staleness_max) == (2, 3)
    np.testing.assert_equal(again.rewards, [0.5, 0.75])


def test_steps_that_are_lost_count_when_they_are_trained_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [])
    for number in range(9):
        recorder.event(step(number, reward=1.0))
    for number in (5, 6):  # by a trainer that went on with step 5
        recorder.event(step(number, reward=2.0))
    recorder.close()

    assert recorder.rewards == [1.0] * 5 + [2.0] * 2


def test_a_recorder_that_goes_on_knows_how_stale_the_steps_before_were(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [])
    for number, versions in enumerate([[0, 0], [0, 1], [0, 2]]):
        spans = one_version(np.array(versions), np.array([3, 3]))
        recorder.step(number, lambda spans=spans: Batch.of({"version_spans": spans, "text": ["a", "b"]}))  # type: ignore[misc]
    recorder.close()
    whole = recorder.tally.summary()["staleness"]
    (tmp_path / "steps" / "000007.safetensors").write_bytes(b"torn")

    again = Recorder(tmp_path, [], again=True)
    again.close()

    assert again.tally.summary()["staleness"] == whole
    assert whole["total"] == {"mean": 0.5, "max": 2}


def test_publish_lag_and_time_are_summed_over_the_processes_of_a_run(tmp_path: Path) -> None:
    # given a process in which a replica lagged one version for 2 of 4 seconds, and that was killed after 10
    recorder = Recorder(tmp_path, [])
    first = [
        Begun(time_s=100.0), Published(time_s=102.0, version=0, nbytes=1, root=""), Loaded(time_s=102.0, worker="r-0", version=0, lag=0),
        Published(time_s=104.0, version=1, nbytes=1, root=""), Loaded(time_s=106.0, worker="r-0", version=1, lag=0),
    ]  # fmt: skip
    for event in [*first, Note(time_s=110.0, text="the last one")]:
        recorder.event(event)
    recorder.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"step","st')

    # when another goes on, after the host was started again: the replica lags two versions for 1 of 2 seconds
    again = Recorder(tmp_path, [], again=True)
    later = [
        Begun(time_s=5.0, again=True), Published(time_s=7.0, version=2, nbytes=1, root=""),
        Loaded(time_s=8.0, worker="r-0", version=2, lag=0), Published(time_s=9.0, version=4, nbytes=1, root=""), Note(time_s=10.0, text=""),
    ]  # fmt: skip
    for event in later:
        again.event(event)
    again.close()

    # then what was between them counts for nothing
    assert again.tally.summary()["publish_lag"] == {"r-0": {"mean": (1 * 2 + 2 * 1) / (8 + 2), "max": 2}}
    assert again.tally.before_s == 10.0
    third = Recorder(tmp_path, [], again=True)
    third.event(Begun(time_s=20.0, again=True))
    third.close()
    assert third.tally.before_s == 10.0 + 5.0


def test_a_disk_that_fails_is_named_once_and_listeners_go_on_hearing(tmp_path: Path) -> None:
    heard: list[Event] = []
    recorder = Recorder(tmp_path, [heard.append])
    recorder._log.close()

    recorder.event(step(0, reward=0.5))
    recorder.event(step(1, reward=0.5))
    until(lambda: len(heard) == 2, "both being heard")
    recorder.close()

    assert len(recorder.errors) == 1
    assert "events.jsonl is not whole" in recorder.errors[0]
    assert recorder.steps == 2


def test_a_run_that_comes_back_tells_the_steps_again_that_no_checkpoint_covers(tmp_path: Path) -> None:
    # given four steps, of which a checkpoint covers one, when nobody has read their rows
    with af.serve(tmp_path / "run", durability="process", checkpoints=True) as run:
        run.queue.declare("train", needs=["x"], batch_rows=2)
        run.queue.put({"x": np.arange(10.0)})
        for number in range(4):
            run.queue.get("train").ack()
            if number < 2:
                run.checkpoint(lambda path: None, keep=2)
        run.queue.get("train")
    told: dict[int, list[float]] = {}
    # when
    with af.serve(tmp_path / "run", on_step=lambda step, read: told.update({step: read()["x"].tolist()})) as run:
        # then those, with their values; not one that is leased
        assert told == {1: [2.0, 3.0], 2: [4.0, 5.0], 3: [6.0, 7.0]}
        run.queue.end(cancel=True)
        for step in run.consumer("train"):
            step.ack()
        run.checkpoint(lambda path: None, keep=1)


@pytest.mark.parametrize("rows", [2, 40_000])
def test_a_step_that_was_told_of_can_be_read_when_its_run_is_closed(tmp_path: Path, rows: int) -> None:
    told: list[Callable[[], Batch]] = []
    with af.serve(tmp_path / "run", on_step=lambda step, read: told.append(read)) as run:
        run.queue.declare("train", needs=["x"], batch_rows=rows)
        for part in np.split(np.arange(float(rows)), 2):
            run.queue.put({"x": part})
        run.queue.get("train").ack()
    assert [read()["x"].tolist() for read in told] == [list(range(rows))]


@pytest.mark.parametrize("again", [False, True])
def test_a_directory_that_holds_a_run_is_gone_on_with_only_where_that_is_meant(tmp_path: Path, again: bool) -> None:
    Recorder(tmp_path, []).close()
    if again:
        Recorder(tmp_path, [], again=True).close()
        return
    with pytest.raises(af.ConfigError, match="already holds a run"):
        Recorder(tmp_path, [])


def test_steps_that_cannot_be_written_are_named_once_and_counted(tmp_path: Path) -> None:
    def full() -> Batch:
        raise OSError("No space left on device")

    recorder = Recorder(tmp_path, [])
    for number in range(9):
        recorder.step(number, full)
    recorder.close()

    assert recorder.errors == [
        "step 0 was not recorded: No space left on device",
        "9 steps were not recorded, the last: step 8 was not recorded: No space left on device",
    ]


def test_a_directory_that_is_removed_under_a_run_is_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", [])
    shutil.rmtree(tmp_path / "run")
    recorder.event(step(0, reward=0.5))
    recorder.close()

    assert recorder.errors == [f"{tmp_path / 'run'} was removed while the run went on: its events are gone"]
