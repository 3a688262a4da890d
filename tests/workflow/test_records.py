"""What a run writes down as it goes on, whatever its disk and its listeners do."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from echo_runs import check_whole, column, echo_workflow, trained_rows
from gates import Gates
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import Batch, Event
from asyncflow_sdk.types.events import Note, StepTrained

pytestmark = pytest.mark.fast

RECORDER = "asyncflow_sdk.workflow.loops.recorder"
SINKS = "asyncflow_sdk.workflow.loops.event_sinks"


class Held:
    """A listener that holds the recorder at the first event that comes, until ``gate`` is set."""

    def __init__(self) -> None:
        self.began, self.gate, self.heard = threading.Event(), threading.Event(), list[Event]()

    def __call__(self, event: Event) -> None:
        self.began.set()
        self.gate.wait(200)
        self.heard.append(event)


def lines(directory: Path) -> list[dict[str, Any]]:
    """The events that are written as yet; the last line may be on its way."""
    whole = (directory / "events.jsonl").read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def many(response_ids: Any) -> dict[str, Any]:
    n = len(response_ids)
    return {
        "reward": [float(len(row)) for row in response_ids],
        "flags": np.arange(n) % 2 == 0,
        "half": np.arange(6 * n, dtype=ml_dtypes.bfloat16).reshape(n, 2, 3),
        "none": np.empty((n, 0, 3), np.float32),
        "across": np.arange(12 * n, dtype=np.float32).reshape(4, 3, n).T,
        "small": np.full(n, 7, np.int16),
    }


def test_columns_of_every_kind_are_recorded_for_us_and_for_others(tmp_path: Path) -> None:
    given: dict[str, Any] = {}

    def reward(response_ids: Any) -> dict[str, Any]:
        columns = many(response_ids)
        given.update(columns)
        return columns

    stage = af.Stage(reward, gives=list(many([])), batch=16)
    echo_workflow(reward=stage, steps=1, rollout={"delay_s": 0.0}).run(tmp_path / "run")

    ((_, batch),) = af.read_steps(tmp_path / "run")
    for name in ("flags", "none", "small"):
        assert batch.array(name).dtype == given[name].dtype
        assert batch.array(name).shape[1:] == given[name].shape[1:]
    assert batch.array("across").shape == (16, 3, 4)
    assert batch.array("half").dtype == ml_dtypes.bfloat16
    assert set(batch.array("small")) == {7}
    # the library of safetensors reads it, too
    (file,) = (tmp_path / "run" / "steps").iterdir()
    library = pytest.importorskip("safetensors.numpy", reason="safetensors comes with transformers")
    found = {name: array for name, array in library.load_file(file).items() if array.shape == (16, 3, 4)}
    assert any(np.array_equal(array, batch.array("across")) for array in found.values())
    # and a torn one nobody
    whole = file.read_bytes()
    for kept in (0, 5, 40, len(whole) - 1):
        file.write_bytes(whole[:kept])
        with pytest.raises((ValueError, KeyError)):
            [column(tmp_path / "run", name) for name in ("response_ids", *given)]


def test_a_listener_that_blocks_costs_bounded_memory_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few events and few steps may wait: those beyond are left out, or written at once."""
    monkeypatch.setattr(f"{SINKS}.MOST_EVENTS", 10)
    monkeypatch.setattr(f"{RECORDER}.MOST_WAITING", 3)
    held = Held()
    # given a listener that blocks at the first event
    ended = in_thread(echo_workflow(steps=12).run, tmp_path / "run", on_event=held)
    # when the run goes on, then that steps were trained is written at once, with the rows of those beyond
    until(lambda: len(list(tmp_path.glob("run/steps/*.safetensors"))) >= 9, "the steps that may not wait")
    until(lambda: len([line for line in lines(tmp_path / "run") if line["event"] == "step"]) == 12, "all steps")
    # and when it reads again, every step is there, and what is not is told
    held.gate.set()
    result = ended()
    check_whole(result, 12)
    assert [event.step for event in held.heard if isinstance(event, StepTrained)] == list(range(12))
    (warning,) = result.summary["warnings"]
    assert "events were left out while a listener blocked" in warning


def test_a_listener_that_never_returns_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{SINKS}.LISTENER_CLOSE_S", 0.05)
    held = Held()

    result = echo_workflow(steps=4).run(tmp_path / "run", on_event=held)

    assert len(set(trained_rows(result.directory))) == 4 * 16
    assert result.summary["warnings"] == ["a listener still blocks; its last events were left out"]
    held.gate.set()


def test_steps_that_cannot_be_written_are_named_once_and_counted(tmp_path: Path) -> None:
    steps = tmp_path / "run" / "steps"

    def reward(response_ids: Any) -> list[float]:  # no step is trained before the first rewards
        if steps.is_dir():
            steps.rmdir()
            steps.touch()
        return [0.0] * len(response_ids)

    given = af.Stage(reward, task="reward")
    result = echo_workflow(steps=4, reward=given).run(tmp_path / "run")

    assert result.summary["status"] == "completed"
    first, rest = result.summary["warnings"]
    assert "step 0 was not recorded: " in first
    assert rest.startswith("4 steps were not recorded, the last: step 3 was not recorded: ")


def test_a_directory_that_is_removed_under_a_run_is_told(tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates", 3)

    def remove(event: Event) -> None:
        if isinstance(event, StepTrained) and event.step == 2:
            shutil.rmtree((tmp_path / "run").rename(tmp_path / "gone"))  # at once, though files of it are being made
            gates.open(3)

    result = echo_workflow(train=gates.trainer(), steps=4).run(tmp_path / "run", on_event=remove)

    warnings = "\n".join(result.summary["warnings"])
    assert "was removed while the run went on: its events are gone" in warnings
    assert "step 3 was not recorded" in warnings


# ---- steps of a loop of one's own


def test_a_run_that_comes_back_tells_the_steps_again_that_no_checkpoint_covers(tmp_path: Path) -> None:
    # given four steps, of which a checkpoint covers one, when nobody has read their rows
    final: list[int] = []
    with af.serve(tmp_path / "run", durability="process", checkpoints=True, on_final=final.append) as run:
        run.queue.declare("train", needs=["x"], batch_rows=2)
        run.queue.put({"x": np.arange(10.0)})
        for number in range(4):
            run.queue.get("train").ack()
            if number < 2:
                run.checkpoint(lambda path: None, keep=2)
        run.queue.get("train")
    assert final[-1] == 1
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


def test_a_checkpoint_makes_no_step_final_that_is_not_recorded(tmp_path: Path) -> None:
    """Its driver may be killed right after: the rows of the steps that a checkpoint covers are on the disk before."""
    held, seen = Held(), list[tuple[int, list[int]]]()

    class Looks(EchoTrain):
        def save(self, path: Path) -> None:
            super().save(path)
            seen.append((self.steps, sorted(int(file.stem) for file in tmp_path.glob("run/steps/*.safetensors"))))

    engines.append(Looks())
    flow = echo_workflow(
        train=af.Train("test_records:engine_of_the_test", launcher="thread"),
        steps=6,
        checkpoint=af.Checkpoint(every=2, keep=1),
    )
    ended = in_thread(flow.run, tmp_path / "run", on_event=held)
    until(lambda: len(seen) >= 3, "the last checkpoint")
    # a checkpoint of step 4 is made when that of step 2 has made the steps before it final, and these are recorded
    assert set(dict(seen)[4]) >= {0, 1}
    assert set(dict(seen)[6]) >= {0, 1, 2, 3}
    held.gate.set()
    check_whole(ended(), 6)


engines: list[Any] = []


def engine_of_the_test(model: str = "", *, algorithm: Any = None) -> Any:
    return engines.pop()


def test_a_run_begins_in_no_directory_with_another_one(tmp_path: Path) -> None:
    # given a run that is served
    with af.serve(tmp_path / "live"):
        for begin in (af.serve, echo_workflow().run):
            with pytest.raises(af.ConfigError, match="live is being served at ipc:"):
                begin(tmp_path / "live")
    # and one that is durable
    with af.serve(tmp_path / "own", durability="process") as run:
        run.queue.declare("later", needs=["x"])
        run.queue.put({"x": [1]})
    # when it is not over, only a server goes on with it
    with pytest.raises(af.ConfigError, match="not over: continue it by `asyncflow serve"):
        echo_workflow(checkpoint=af.Checkpoint()).run(tmp_path / "own")
    with af.serve(tmp_path / "own") as run:
        assert run.recovered is not None
        run.finish()
    # and when it has ended and left a record, nothing does
    echo_workflow(steps=1).run(tmp_path / "ended")
    before = set((tmp_path / "ended").rglob("*"))
    with pytest.raises(af.ConfigError, match="already holds a run, which has ended"):
        af.serve(tmp_path / "ended")
    assert set((tmp_path / "ended").rglob("*")) == before


def test_a_note_of_a_client_is_recorded_with_its_text(tmp_path: Path) -> None:
    def tells(response_ids: Any) -> Any:
        with af.connect(tmp_path / "run", name="judge") as judge:
            judge.report(Note(time_s=0.0, text="a hard one", worker="judge"))
        return [1.0 for _ in response_ids]

    echo_workflow(reward=tells, steps=1).run(tmp_path / "run")

    assert "a hard one" in [line["text"] for line in lines(tmp_path / "run") if line["event"] == "note"]
