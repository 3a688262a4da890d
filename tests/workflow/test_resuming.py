"""Runs whose trainer, server or every process is killed: what they trained, in the end, is what an uninterrupted run trains."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import Driver, check_whole, echo_workflow, events_of, segments
from functions import length
from gates import GatedRanks, Gates, Killer
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.interfaces import StalenessPolicy, TrackedRun, Tracker
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.types.events import Event, Loaded, Note, StepTrained

PROMPTS = [[n, n + 1, n + 2] for n in range(1, 60)]
STEPS = 16
REPLICA: dict[str, Any] = {
    "in_flight": True,
    "token_s": 0.002,
    "delay_s": 0.0,
    "max_rows": 8,
    "group_size": 4,
    "prompt": "prompt_ids",
}


def workflow(**changes: Any) -> af.Workflow:
    """Each prompt is another. The trainer is a process, and waits before the steps of which there are gates."""
    arguments: dict[str, Any] = {
        "prompts": {"prompt_ids": af.Ragged.of(PROMPTS)},
        "rollout": af.Rollout("echo", launcher="thread", **REPLICA),
        "weights": af.Weights(swap="in_flight"),
        "train": af.Train("gates:Gated", max_restarts=50),
        "steps": STEPS,
        "checkpoint": af.Checkpoint(every=4, keep=2),
        "seed": 3,
    }
    return echo_workflow(**(arguments | changes))


def prompts_trained(directory: Path) -> Counter[tuple[int, ...]]:
    """How often each prompt is in the steps of the surviving lineage, which the run recorded."""
    found: Counter[tuple[int, ...]] = Counter()
    for _, batch in af.read_steps(directory):
        found.update(tuple(row.tolist()) for row in batch.ragged("prompt_ids"))
    return found


def check(result: af.Result, whole: Counter[tuple[int, ...]]) -> None:
    check_whole(result, STEPS)
    assert [step for step, _ in af.read_steps(result.directory)] == list(range(STEPS))
    assert prompts_trained(result.directory) == whole
    # the summary is of all steps of the surviving lineage, whichever process trained them
    rewards = [batch.array("reward").mean() for _, batch in af.read_steps(result.directory)]
    assert result.rewards == pytest.approx((np.mean(rewards[: STEPS // 2]), np.mean(rewards[STEPS // 2 :])))
    late = af.staleness_of(result.directory).values
    assert (late.min(), late.max()) == (0, 1), "staleness, as steps of the surviving lineage"
    assert result.summary["staleness"]["total"] == {"mean": pytest.approx(late.mean(), abs=1e-4), "max": 1}
    assert result.summary["rows_live"] == 0


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """Steps of a run that a driver makes: what is done to it before them is done in its midst."""
    gates = Gates(tmp_path / "gates", 6, 10, 12)
    monkeypatch.setenv("GATES", str(gates.folder))
    return gates


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Counter[tuple[int, ...]]:
    """What an uninterrupted run trains; without checkpoints, for they change nothing."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    workflow(checkpoint=None, train={}).run(directory)
    return prompts_trained(directory)


def test_a_trainer_that_is_killed_again_and_again_trains_what_it_would_have(
    tmp_path: Path, whole: Counter[tuple[int, ...]]
) -> None:
    killer = Killer(tmp_path / "gates", {0: "train-0", 5: "train-0", 13: "train-0"})

    result = workflow(train=killer.trainer(max_restarts=50)).run(tmp_path / "run", on_event=killer)

    assert len(killer.killed) == 3
    check(result, whole)
    notes = killer.texts(Note)
    assert any("goes on with step 0 anew, since there is no checkpoint" in text for text in notes), notes
    assert any("training goes on with step 4 from" in text for text in notes), notes
    trained = [e.step for e in killer.events if isinstance(e, StepTrained)]
    assert len(trained) > STEPS, "no step was trained again"


def test_without_checkpoints_nothing_is_kept_and_a_trainers_death_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="told to fail at step 2"):
        workflow(checkpoint=None, train={"fail_at": 2}).run(tmp_path / "run")

    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_that_is_killed_as_a_whole_again_and_again_trains_what_it_would_have(
    tmp_path: Path, gates: Gates, whole: Counter[tuple[int, ...]]
) -> None:
    # given a run that dies three times: with all its processes, and its driver alone
    directory, drivers = tmp_path / "run", list[Driver]()
    for gate, kill in ((6, Driver.kill_all), (10, Driver.kill)):
        drivers.append(Driver(directory, "resume" if drivers else "test_resuming:workflow"))
        drivers[-1].follow(gate - 1)
        kill(drivers[-1])
        drivers[-1].end()
        gates.open(gate)
    # when it is resumed to its end, and a replica joins in the midst of it
    ending = in_thread(af.resume, directory)
    until(lambda: len(list(directory.glob("steps/*"))) >= 12, "the step before the last gate", seconds=200)
    with af.connect(directory) as there:
        (guest,) = there.start(af.Rollout("echo", launcher="thread", swap="in_flight", **REPLICA))
        until(lambda: sum(each.replica for each in there.queue.status().sessions) == 2, "the one that joins")
        gates.open(12)
        result = ending()
        assert guest.ended.wait(60)
    # then
    check(result, whole)
    assert not guest.lost
    assert not any(segments(driver.pid) for driver in drivers)
    assert not (directory / "journal").exists() or not list((directory / "journal").glob("journal-*"))


def test_an_interrupted_run_can_be_resumed_by_one_process_at_a_time(
    tmp_path: Path, gates: Gates, whole: Counter[tuple[int, ...]]
) -> None:
    # given a run that is interrupted, with a file of the record torn as by a host that went down
    directory = tmp_path / "run"
    driver = Driver(directory, "test_resuming:workflow")
    driver.follow(5)
    with pytest.raises(ConfigError, match=f"is being run by process {driver.pid}"):
        af.resume(directory)
    assert not (directory / "summary.json").exists()
    driver.signal(signal.SIGINT)
    driver.end()
    assert driver.last == "interrupted once"
    gates.open(6, 10, 12)
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["balanced"]) == ("interrupted", True)
    with (directory / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"step","step":')
    # when
    result = af.resume(directory)
    # then
    check(result, whole)
    # and what is complete is done already
    assert af.resume(directory).summary == result.summary == json.loads((directory / "summary.json").read_text())


class Resharding(GatedRanks):
    """Loads what another number of ranks has saved if the variable RESHARDS is set."""

    reshards = property(lambda self: "RESHARDS" in os.environ)  # type: ignore[assignment]


def test_a_run_is_resumed_with_another_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run with two ranks that was interrupted
    directory, gates, loaded = tmp_path / "run", Gates(tmp_path / "gates", 4), set[str]()

    def stop(event: Event) -> None:
        if isinstance(event, StepTrained) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def go_on(event: Event) -> None:
        loaded.update({event.worker} if isinstance(event, Loaded) else ())
        gates.open(*([4] if len(loaded) == 2 else ()))

    ranks = gates.trainer("test_resuming:Resharding", world_size=2)
    with pytest.raises(af.Interrupted):
        workflow(train=ranks, steps=8, checkpoint=af.Checkpoint(every=2)).run(directory, on_event=stop)
    # when an engine cannot load what so many ranks have saved, or something else shall change, then it is refused
    changes = {"train.world_size": 1, "rollout.replicas": 2}
    with pytest.raises(WorkerFailed, match=r"was saved by 2 ranks, .* not in 1: resume with train.world_size=2"):
        af.resume(directory, changes=changes)
    with pytest.raises(ConfigError, match="seed cannot change in a run, here from 3 to 4: a run goes on with the"):
        af.resume(directory, changes={"seed": 4})
    # but another engine goes on, with these changes
    monkeypatch.setenv("RESHARDS", "1")
    result = af.resume(directory, on_event=go_on)
    check_whole(result, 8)
    assert set(result.summary["publish_lag"]) == {"rollout-0", "rollout-1"}
    assert {event["worker"] for event in events_of(directory, "step")} == {"train-0 rank 0", "train-0"}


def test_what_cannot_be_imported_is_told_before_a_run_that_is_to_be_resumed_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward: .*<lambda> cannot be imported by another process"):
        workflow(reward=lambda response_ids: length(response_ids)).run(tmp_path / "run")


Drop: Any = registry().get("staleness", "drop").load()


class Mine(Drop):
    """A policy that no package registers."""

    promise = "what the tests need"

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        made.append(self)


@dataclass(frozen=True)
class Penalised(af.Algorithm):
    beta: float = 0.1

    def advantages(self, batch: Any) -> Any: ...
    def loss(self, tokens: Any) -> Any: ...


class Fails(EchoTrain):
    """Fails once, at its second step."""

    def __init__(self, model: str = "", *, algorithm: Any) -> None:
        super().__init__(model)
        made.append(algorithm)

    def train_step(self, batch: af.Batch) -> af.StepResult:
        if self.steps == 1 and not failed.is_set():
            failed.set()
            raise RuntimeError("told to fail once")
        return super().train_step(batch)


class Heard(Tracker):
    def __init__(self, name: str = "") -> None:
        self.name = name

    def open(self, run: TrackedRun) -> None:
        made.append((self.name, run.resumed))

    def log(self, step: int, version: int, metrics: Any) -> None: ...


made, failed = list[Any](), threading.Event()


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        (Penalised(beta=0.5), Mine),
        (("test_resuming:Penalised", {"beta": 0.5}), ("test_resuming:Mine", {"share": 0.25})),
    ],
)
def test_all_that_a_run_is_made_of_is_made_again(tmp_path: Path, algorithm: Any, policy: Any) -> None:
    failed.clear()
    flow = echo_workflow(
        train=af.Train("test_resuming:Fails", algorithm=algorithm, launcher="thread"), checkpoint=af.Checkpoint(every=1),
        staleness=af.Staleness(max_staleness=2, policy=policy), track=[(Heard, {"name": "a"}), "test_resuming:Heard"],
        stall_timeout_s=math.inf,
    )  # fmt: skip
    with pytest.raises(WorkerFailed, match="told to fail once"):
        flow.run(tmp_path / "run")
    made.clear()

    result = af.resume(tmp_path / "run")

    check_whole(result, 3)
    assert Penalised(beta=0.5) in made
    assert sorted(each for each in made if isinstance(each, tuple)) == [("", True), ("a", True)]
    policies = [each for each in made if isinstance(each, StalenessPolicy)]
    assert policies and all(each.share == (0.0 if policy is Mine else 0.25) for each in policies)


def test_a_directory_that_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    echo_workflow(steps=1, checkpoint=af.Checkpoint()).run(tmp_path)
    (file := tmp_path / "workflow.json").unlink()
    with pytest.raises(ConfigError, match="holds no run"):
        af.resume(tmp_path)
    unknown = '{"again": {"path": [], "workflow": {"$type": "asyncflow_sdk:Workflow", "x": 1}}}'
    for content, message in {
        "{}": "started without checkpoint=",
        '{"again": {"path": 3}}': "its workflow.json is not what was written",
        unknown: "cannot be made again: .*'x'",
    }.items():
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            af.resume(tmp_path)
