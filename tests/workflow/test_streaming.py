"""Workflows whose trainer trains each step in parts while the rest of it is being generated, and what happens to an open step."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import functions
import numpy as np
import pytest
from echo_runs import TOML, Driver, check_whole, echo_workflow, segments, trained_rows
from gates import GROUP, HANGS_S, ROWS, STEPS, Gates, Listener, parts_of, rows_by_pid, streamed_workflow
from plugin_packages import install_plugin
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.types import one_version

PARTS = ROWS // GROUP


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """None is closed."""
    gates = Gates(tmp_path / "gates")
    monkeypatch.setenv("GATES", str(gates.folder))
    monkeypatch.setenv("RUN", str(tmp_path / "run"))
    return gates


def close(gates: Gates, step: int, part: int) -> str:
    """Have the trainer wait before a part that it has been given."""
    (gates.folder / f"{step}.{part}").touch()
    return f"{step}.{part}"


def meanwhile(gates: Gates, gate: str, ranks: int, do: Callable[[], Any]) -> Callable[[], Any]:
    """Do something while all ranks wait at a gate, then open it."""

    def act() -> Any:
        until(lambda: gates.reached(gate) >= ranks, f"the trainer at {gate}", HANGS_S)
        try:
            return do()
        finally:
            gates.open(gate)

    return in_thread(act)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_each_step_is_trained_in_parts_as_its_groups_come(tmp_path: Path, gates: Gates, max_staleness: int) -> None:
    listener = Listener()

    result = streamed_workflow(staleness=af.Staleness(max_staleness=max_staleness)).run(
        tmp_path / "run", on_event=listener
    )

    check_whole(result, STEPS)
    # one part a group, in the order of the record
    recorded = {step: batch.ids.tolist() for step, batch in af.read_steps(tmp_path / "run")}
    for step in range(STEPS):
        (rows,) = rows_by_pid(gates.folder, step)
        assert [len(part) for part in rows] == [GROUP] * PARTS
        assert np.concatenate(rows).tolist() == recorded[step]
    # said by spans, and by the metrics of the whole step
    trained = [event for event in listener.events if isinstance(event, ev.StepTrained)]
    assert [event.metrics["parts"] for event in trained] == [PARTS] * STEPS
    rewards = [float(batch.array("reward").mean()) for _, batch in af.read_steps(tmp_path / "run")]
    assert [event.metrics["reward"] for event in trained] == pytest.approx(rewards)
    spans = [e for e in listener.events if isinstance(e, ev.Span) and e.kind == "train" and e.version == 1]
    assert [(e.rows, e.detail) for e in spans] == [
        *((GROUP, f"part {part} of step 1") for part in range(PARTS)), (0, "update of step 1")
    ]  # fmt: skip
    for step, batch in af.read_steps(tmp_path / "run"):
        metrics = {n: v for n, v in trained[step].metrics.items() if n.startswith("staleness")}
        assert metrics == pytest.approx(batch.ages(step).metrics())
    assert result.summary["staleness_max"] <= max_staleness
    assert json.loads((tmp_path / "run/model/echo.json").read_text())["steps"] == STEPS


def test_a_trainer_killed_in_a_step_is_given_the_same_parts_again(tmp_path: Path, gates: Gates) -> None:
    listener, gate = Listener(), close(gates, 1, 2)
    kill = meanwhile(gates, gate, 1, lambda: os.kill(listener.pid("train-0"), signal.SIGKILL))

    result = streamed_workflow(
        processes=True, train={"max_restarts": 1}, checkpoint=af.Checkpoint(every=1)
    ).run(tmp_path / "run", on_event=listener)  # fmt: skip

    assert kill() is None
    check_whole(result, STEPS)
    first, second = rows_by_pid(gates.folder, 1)
    assert len(first) == 3
    assert second[:3] == first
    assert sorted(np.concatenate(second).tolist()) == sorted(dict(af.read_steps(tmp_path / "run"))[1].ids.tolist())
    assert [e.worker for e in listener.states("restarting")] == ["train-0"]
    # the weights have had every row once
    notes = json.loads(max((tmp_path / "run/checkpoints").glob("step-*/engine/notes.json")).read_text())
    assert [row for step in notes for row in step["rows"]] == trained_rows(tmp_path / "run")


def test_a_rank_killed_in_a_step_takes_the_others_along_and_all_get_the_same_shards_again(
    tmp_path: Path, gates: Gates
) -> None:
    """A part is one group here, so that one of the ranks has no row of it."""
    listener, gate = Listener(), close(gates, 1, 2)
    kill = meanwhile(gates, gate, 2, lambda: os.kill(listener.pid("train-0 rank 1"), signal.SIGKILL))
    train = {"engine": "gates:GatedRanks", "world_size": 2, "deaf": True, "max_restarts": 1}

    result = streamed_workflow(train=train, checkpoint=af.Checkpoint(every=1)).run(
        tmp_path / "run", on_event=listener
    )

    assert kill() is None
    check_whole(result, STEPS)
    whole: list[int] = []
    for rank in range(2):
        first, second = rows_by_pid(gates.folder, 1, rank)
        assert second[:3] == first
        whole += np.concatenate(second).tolist()
    assert sorted(whole) == sorted(dict(af.read_steps(tmp_path / "run"))[1].ids.tolist())
    parts = [
        [note for note in parts_of(gates.folder) if (note["step"], note["part"]) == (0, n)] for n in range(PARTS)
    ]
    assert [sorted(len(note["rows"]) for note in part) for part in parts] == [[0, GROUP]] * PARTS
    assert {e.worker for e in listener.states("restarting")} == {"train-0 rank 0", "train-0 rank 1"}


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_a_driver_that_ends_in_a_step_is_resumed_and_the_same_parts_come_first(
    tmp_path: Path, gates: Gates, end: str
) -> None:
    gate = close(gates, 1, 2)
    driver = Driver(tmp_path / "run", "gates:resumable_workflow")
    driver.follow(0)
    until(lambda: gates.reached(gate), "the trainer in the middle of step 1", HANGS_S)
    # when the server ends with its driver
    if end == "killed":
        driver.kill()
    else:
        driver.signal(signal.SIGINT)
    driver.end()
    assert driver.last.startswith("interrupted once") == (end == "interrupted")
    gates.open(gate)
    again = Driver(tmp_path / "run", "resume")
    while again.last != "done":
        again.read()
    again.end()
    # then
    summary, found = json.loads((tmp_path / "run/summary.json").read_text()), af.replay(tmp_path / "run")
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    assert (found.differing, found.audit.balanced, found.audit.consumed) == (0, True, STEPS * ROWS)
    first, second = rows_by_pid(gates.folder, 1)
    assert len(first) == 3
    assert second[:3] == first
    rows = trained_rows(tmp_path / "run")
    assert len(rows) == len(set(rows)) == STEPS * ROWS
    assert not segments(driver.pid) | segments(again.pid)


def test_a_rollback_that_removes_rows_of_an_open_step_has_it_discarded(tmp_path: Path, gates: Gates) -> None:
    """With max_staleness 0, all rows of step 2 are of version 2, which is given up while the last group is not there."""
    listener, gate = Listener(), close(gates, 2, 1)

    def roll_back() -> Any:
        with af.connect(tmp_path / "run", name="operator") as operator:
            return operator.rollback(1, "the reward fell")

    answer = meanwhile(gates, gate, 1, roll_back)
    result = streamed_workflow(
        steps=4, staleness=af.Staleness(max_staleness=0), weights=af.Weights(keep=4)
    ).run(tmp_path / "run", on_event=listener)  # fmt: skip

    assert (answer().version, result.summary["status"], result.summary["balanced"]) == (3, "completed", True)
    assert any("step 2 is discarded and trained again" in text for text in listener.texts(ev.Note))
    trained = [(e.step, e.version) for e in listener.events if isinstance(e, ev.StepTrained)]
    assert trained == [(0, 0), (1, 1), (2, 3), (3, 4)]
    given = [note["rows"] for note in parts_of(gates.folder) if note["step"] == 2]
    assert set(np.concatenate(given[:2]).tolist()).isdisjoint(np.concatenate(given[2:]).tolist())
    assert np.concatenate(given[2:]).tolist() == dict(af.read_steps(tmp_path / "run"))[2].ids.tolist()
    # version 1 has had one step, and steps 2 and 3 followed
    assert json.loads((tmp_path / "run/model/echo.json").read_text())["steps"] == 1 + 2


def test_all_ranks_discard_an_open_step_at_the_same_part(tmp_path: Path, gates: Gates) -> None:
    listener, gate = Listener(), close(gates, 2, 1)

    def roll_back() -> None:
        with af.connect(tmp_path / "run", name="operator") as operator:
            operator.rollback(1)

    answer = meanwhile(gates, gate, 2, roll_back)
    result = streamed_workflow(
        train={"engine": "gates:GatedRanks", "world_size": 2}, steps=4, staleness=af.Staleness(max_staleness=0),
        weights=af.Weights(keep=4),
    ).run(tmp_path / "run", on_event=listener)  # fmt: skip

    assert answer() is None
    check_whole(result, 4)
    for rank in range(2):
        parts = [note["part"] for note in parts_of(gates.folder) if (note["step"], note["rank"]) == (2, rank)]
        assert parts[:2] == [0, 1]
        assert parts[2] == 0
    assert sum("step 2 is discarded" in text for text in listener.texts(ev.Note)) == 1


def test_who_waits_for_the_last_group_of_a_step_says_which_it_is_and_who_has_it(tmp_path: Path) -> None:
    opened, calls = threading.Event(), list[int]()

    def reward(response_ids: Any, groups: Any) -> Any:
        calls.append(len(calls))
        assert len(calls) < PARTS or opened.wait(100)
        return functions.length(response_ids)

    with af.serve(tmp_path / "run", steps=1) as run:
        train = af.Train("echo", stream=True, part_rows=GROUP, launcher="thread")
        run.declare(train, ROWS)
        run.start(af.Rollout("echo", prompt="prompt_ids", group_size=GROUP, launcher="thread"))
        run.start(af.Stage(reward, task="reward", batch=GROUP))
        run.feed({"prompt_ids": [[1], [2, 3]]}, group_size=GROUP, column="prompt_ids")
        (worker,) = run.start(train)
        # given a trainer that has all other parts
        waits = lambda: run.queue.status().waiting.get("train-0", "")  # noqa: E731
        until(
            lambda: len(calls) == PARTS and "0 of 4 rows for the next part of step 0" in waits(), "its wait", HANGS_S
        )

        with pytest.raises(
            af.DeadlineExceeded, match=r"train-0 waits .*0 of 4 rows for .* in task 'reward', the oldest by reward-0"
        ):
            run.wait(worker, timeout_s=0.1)

        opened.set()
        run.wait(worker, timeout_s=60)
        assert run.audit().consumed == ROWS


engines: list[EchoTrain] = []


def engine_of_the_test(model: str = "", *, algorithm: Any = None) -> EchoTrain:
    """The engine that a trainer's thread is to use: the one that a test has made."""
    return engines.pop()


class TwoParts(EchoTrain):
    """Has the next group put when it is given a part. When it has both parts of the second step, a rollback is made to version 0."""

    def __init__(self, run: af.Run) -> None:
        super().__init__()
        self.run, self.begun, self.given = run, list[int](), list[list[int]]()

    def begin_step(self, step: int) -> None:
        self.begun.append(self.steps)

    def accumulate(self, batch: af.Batch) -> None:
        self.given.append(batch.ids.tolist())
        if len(self.given) < 4:
            put_group(self.run)
        elif len(self.given) == 4:
            until(lambda: self.run.queue.status().version == 1, "version 1 is current")
            self.run.rollback(0)

    def end_step(self) -> af.StepResult:
        self.steps += 1
        return af.StepResult({})


def put_group(run: af.Run) -> None:
    """Rows of version 0, which no rollback removes."""
    run.queue.put({"version_spans": one_version(0, np.full(1, 3))}, group_size=GROUP)


def test_a_rollback_that_removes_no_row_has_the_same_parts_trained_again_from_the_restored_weights() -> None:
    events: list[ev.Event] = []
    with af.serve(steps=2, keep_versions=4, on_event=events.append) as run:
        run.queue.declare("train", needs=["version_spans"], batch_rows=2 * GROUP)
        put_group(run)
        engine = TwoParts(run)
        engines.append(engine)
        with af.connect(run.address, name="client") as client:
            train = af.Train(
                "test_streaming:engine_of_the_test", needs=["version_spans"], stream=True, launcher="thread"
            )
            (worker,) = client.start(train)
            client.wait(worker, timeout_s=60)
        run.queue.flush()

        assert (run.queue.status().version, run.audit().consumed, run.audit().balanced) == (3, 4 * GROUP, True)

    assert engine.begun == [0, 1, 0]  # the second step from version 0's weights
    assert engine.given[4:] == engine.given[2:4]
    assert [(e.step, e.version) for e in events if isinstance(e, ev.StepTrained)] == [(0, 0), (1, 2)]


SPECS = """
import asyncflow_sdk as af
@af.hookimpl
def asyncflow_adapters():
    return [af.AdapterSpec(kind="train", name="declared", factory="not.here:Engine", can={"steps": "whole"})]
"""


@dataclass(frozen=True)
class Plain(af.Algorithm):
    """A user's own, which declares nothing."""

    weight: float = 1.0

    def advantages(self, batch: Any) -> Any:
        return batch.array("reward") * self.weight

    def loss(self, tokens: Any) -> Any:
        return -(tokens.logprobs * tokens.advantages).sum() / tokens.total_tokens, {}


@dataclass(frozen=True)
class Declared(Plain):
    """The same, which says by what its loss is divided."""

    normaliser = "tokens"


class WholeOnly(EchoTrain):
    streams = False


class Unsure(EchoTrain):
    """Says only in its worker that it needs whole steps."""

    whole_step = "its option says so"


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"engine": "test_streaming:WholeOnly"}, "has no accumulate"),
        ({"engine": "echo", "algorithm": Plain()}, "Plain declares no normaliser"),
        ({"engine": "echo", "algorithm": "ppo"}, "scales advantages by their mean and spread over the whole step"),
        ({"engine": "torch", "updates": 2}, "updates=2"),
        ({"engine": "declared", "python": sys.executable}, "has no accumulate"),
    ],
)
def test_what_needs_whole_steps_is_refused_before_anything_starts(
    train: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin(tmp_path, monkeypatch, "declaring", SPECS)
    with pytest.raises(ConfigError, match=f"has stream=True, and needs whole steps: .*{why}.*; leave stream= out"):
        echo_workflow(train=af.Train(**train, stream=True))


def test_an_engine_that_needs_whole_steps_says_so_in_its_worker(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="needs whole steps: its option says so; leave stream= out"):
        echo_workflow(train=af.Train("test_streaming:Unsure", stream=True, launcher="thread")).run(tmp_path / "run")


def test_the_least_rows_of_a_part_follow_from_step_group_and_ranks(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TOML.replace('train = { engine = "echo" }', 'train = { engine = "echo", stream = true }'))

    assert af.load_workflow(file).plan.train.part_rows == 4  # a group
    assert af.load_workflow(file, {"batch_size": "64"}).plan.train.part_rows == 8  # an eighth
    assert af.load_workflow(file, {"train.part_rows": "2"}).plan.train.part_rows == 2
    flow = echo_workflow(train=af.Train("echo-ranks", world_size=4, stream=True))
    assert flow.plan.train.part_rows == 16  # a group a rank
    assert "trained in parts of at least 16 rows" in str(flow)
    assert flow.describe()["train"]["part_rows"] == 16
    with pytest.raises(ConfigError, match="train.part_rows=32: part_rows=32 is more than a step has: batch_size=4"):
        af.load_workflow(file, {"train.part_rows": "32"})
    with pytest.raises(ConfigError, match="part_rows=8 is of a step trained in parts: say stream=True, too"):
        af.Train("echo", part_rows=8)
