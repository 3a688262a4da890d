"""Runs whose trainer, server or every process is killed: what they trained, in the end, is what an uninterrupted run trains."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from echo_runs import alive, echo_workflow, segments
from functions import length
from gates import Gates, Killer
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError, WorkerFailed
from asyncflow_sdk.types.events import Note, StepTrained
from asyncflow_sdk.workflow.resuming import again, write_description

KILLS = int(os.environ.get("ASYNCFLOW_KILLS", "2"))
PROMPTS = [[n, n + 1, n + 2] for n in range(1, 60)]
STEPS = 24


def workflow(**changes: Any) -> af.Workflow:
    """Each prompt is another; a step takes a while, so that there is time to die in it."""
    arguments: dict[str, Any] = {
        "prompts": {"prompt_ids": af.Ragged.of(PROMPTS)},
        "train": af.Train("gates:Gated", delay_s=0.05, max_restarts=50),
        "steps": STEPS,
        "checkpoint": af.Checkpoint(every=5, keep=2),
        "seed": 3,
    }
    return echo_workflow(**(arguments | changes))


def prompts_trained(directory: Path) -> Counter[tuple[int, ...]]:
    """How often each prompt is in the steps of the surviving lineage, which the run recorded."""
    found: Counter[tuple[int, ...]] = Counter()
    for _, batch in af.read_steps(directory):
        found.update(tuple(row.tolist()) for row in batch.ragged("prompt_ids"))
    return found


def check(directory: Path, summary: dict[str, Any], whole: Counter[tuple[int, ...]]) -> None:
    assert [step for step, _ in af.read_steps(directory)] == list(range(STEPS))
    rows = [row for _, batch in af.read_steps(directory) for row in batch.ids.tolist()]
    assert len(set(rows)) == len(rows) == STEPS * 16, "a row is in two steps"
    assert prompts_trained(directory) == whole
    late = af.staleness_of(directory).values
    assert (late.min(), late.max()) == (0, 1), "staleness, as steps of the surviving lineage"
    assert summary["staleness_max"] <= 1
    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert summary["balanced"]
    assert (summary["rows"]["consumed"], summary["rows_live"]) == (STEPS * 16, 0)


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gates:
    """Steps 9 and 18 of a run that a driver makes: what is done to it before them is done in its midst."""
    gates = Gates(tmp_path / "gates", 9, 18)
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
    killer = Killer("train-0", at=[0, 6, 11, 17], gates=tmp_path / "gates")

    result = workflow(train=killer.trainer(max_restarts=50)).run(tmp_path / "run", on_event=killer)

    assert killer.killed == 4
    check(tmp_path / "run", result.summary, whole)
    notes = [e.text for e in killer.events if isinstance(e, Note)]
    assert any("goes on with step 0 anew, since there is no checkpoint" in text for text in notes), notes
    assert any("training goes on with step 5 from" in text for text in notes), notes
    trained = [e.step for e in killer.events if isinstance(e, StepTrained)]
    assert len(trained) > STEPS, "no step was trained again"


def test_without_checkpoints_nothing_is_kept_and_a_trainers_death_ends_the_run(tmp_path: Path) -> None:
    killer = Killer("train-0", at=[3], gates=tmp_path / "gates")

    with pytest.raises(WorkerFailed, match="train-0"):
        workflow(checkpoint=None, train=killer.trainer()).run(tmp_path / "run", on_event=killer)

    assert not (tmp_path / "run" / "checkpoints").exists()


class Driver:
    """A driver in a process of its own, and the workers it started."""

    def __init__(self, directory: Path, what: str) -> None:
        script = Path(__file__).parent / "resume_driver.py"
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(directory), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []
        self.steps = 0

    def follow(self, steps: int, workers: int = 0) -> bool:
        """Read on until so many steps were trained and so many workers started; False when the run was through before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("starting"):
                self.pids.append(int(line.split()[2]))
            self.steps += line.startswith("step")
            if line.startswith("done"):
                return False
            if self.steps >= steps and len(self.pids) >= workers:
                return True
        raise AssertionError(f"the driver ended early: {self.process.stderr.read() if self.process.stderr else ''}")

    def kill(self, everything: bool) -> None:
        """The process that drives and serves; with ``everything`` its workers too, at once, else they see its end."""
        for pid in [self.process.pid, *(self.pids if everything else ())]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                assert pid != self.process.pid
        self.close()

    def close(self) -> None:
        self.process.wait(60)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        until(lambda: not [pid for pid in self.pids if alive(pid)], "the end of all workers")


@pytest.mark.timeout(180 + 60 * KILLS)
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_that_is_killed_as_a_whole_again_and_again_trains_what_it_would_have(
    seed: int, tmp_path: Path, gates: Gates, whole: Counter[tuple[int, ...]]
) -> None:
    # given a run that dies four times, at any moment (twice for sure): with all its workers, or alone
    chance = random.Random(seed)
    directory, what, deaths, trained = tmp_path / "run", "test_resuming", 0, 0
    pids = []
    for gate in (9, 18, 0, 0):
        driver = Driver(directory, what)
        pids.append(driver.process.pid)
        going = driver.follow(chance.randint(0, 8), workers=chance.randint(1, 3))
        trained += driver.steps
        if not going:
            driver.close()
            break
        driver.kill(everything=chance.random() < 0.5)
        deaths += 1
        what = "resume"
        gates.open(gate)
    # when it is resumed to its end
    result = af.resume(directory)
    # then
    check(directory, result.summary, whole)
    assert deaths > 1
    assert not any(segments(pid) for pid in pids)
    assert not (directory / "journal").exists() or not list((directory / "journal").glob("journal-*"))


def test_a_run_is_resumed_by_one_process_at_a_time_and_a_complete_one_is_done_already(
    tmp_path: Path, gates: Gates
) -> None:
    driver = Driver(tmp_path / "run", "test_resuming")
    assert driver.follow(steps=2)

    with pytest.raises(ConfigError, match=f"is being run by process {driver.process.pid}"):
        af.resume(tmp_path / "run")

    assert not (tmp_path / "run" / "summary.json").exists()
    gates.open(9, 18)
    assert not driver.follow(steps=10**9)
    driver.close()
    result = af.resume(tmp_path / "run")
    assert result.summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result.summary["status"] == "completed"


def test_an_interrupted_run_can_be_resumed(tmp_path: Path, gates: Gates, whole: Counter[tuple[int, ...]]) -> None:
    driver = Driver(tmp_path / "run", "test_resuming")
    assert driver.follow(steps=7)
    driver.process.send_signal(signal.SIGINT)
    driver.close()
    gates.open(9, 18)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["balanced"]) == ("interrupted", True)

    result = af.resume(tmp_path / "run")

    check(tmp_path / "run", result.summary, whole)


def test_what_cannot_be_imported_is_told_before_a_run_that_is_to_be_resumed_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^reward: .*<lambda> cannot be imported by another process"):
        workflow(reward=lambda response_ids: length(response_ids)).run(tmp_path / "run")

    assert workflow(steps=2).run(tmp_path / "run").summary["status"] == "completed"


def test_what_has_no_end_is_so_again(tmp_path: Path) -> None:
    write_description(workflow(stall_timeout_s=math.inf), tmp_path)

    assert again(tmp_path).stall_timeout_s == math.inf


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no run"),
        ("{}", "started without checkpoint="),
        ('{"again": {"path": 3}}', "its workflow.json is not what was written"),
        (
            '{"again": {"path": [], "workflow": {"$type": "asyncflow_sdk:Workflow", "x": 1}}}',
            "cannot be made again: .*'x'",
        ),
    ],
)
def test_a_directory_that_cannot_be_resumed_says_so(tmp_path: Path, content: str | None, message: str) -> None:
    write_description(workflow(), tmp_path)
    (tmp_path / "workflow.json").unlink()
    if content is not None:
        (tmp_path / "workflow.json").write_text(content)

    with pytest.raises(ConfigError, match=message):
        af.resume(tmp_path)
