"""The demo as `make demo` runs it, in fewer steps: a real model, real engines, real processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState

pytest.importorskip("torch")
STEPS = 60


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from asyncflow_torch.demo.model import warm_up

    folder = tmp_path_factory.mktemp("demo") / "start"
    warm_up(folder, seed=0)
    return folder


@pytest.mark.timeout(300)
def test_it_learns_and_its_directory_tells_it(tmp_path: Path, start: Path) -> None:
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "demo", "--model", str(start), "--steps", str(STEPS)]

    done = subprocess.run([*command, "--out", "run"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS
    assert summary["reward_last"] - summary["reward_first"] > 0.2
    assert summary["balanced"]
    assert summary["rows"]["consumed"] + summary["rows"]["filtered"] == STEPS * 256
    assert summary["staleness_max"] == 1
    assert af.staleness_of(tmp_path / "run").values.max() == 1
    assert (tmp_path / summary["report"]).read_text().count("<svg") >= 3
    assert summary["report"] in done.stdout


def test_an_algorithm_that_cannot_be_is_told_before_anything_starts(tmp_path: Path, start: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "asyncflow_sdk.cli",
        "demo",
        "--model",
        str(start),
        "--out",
        "run",
        "--algorithm",
        "ppo",
    ]
    critic = ["--algorithm-option", 'critic={"decay": 2}']

    done = subprocess.run([*command, *critic], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "critic: decay is from 0 to 1, not 2" in done.stderr + done.stdout


def test_an_engine_that_is_not_here_is_told_before_the_warm_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "demo", "--out", "run", "--train", "fdsp"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "no train adapter is named 'fdsp'" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(300)
def test_its_rollout_killed_half_way_it_finishes_and_no_row_is_trained_twice(tmp_path: Path, start: Path) -> None:
    from asyncflow_torch.demo.run import demo_workflow

    pids: list[int] = []
    killed: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, WorkerState) and event.worker == "rollout-0" and event.state == "ready":
            pids.append(event.pid)
        if isinstance(event, StepTrained) and event.step == 6 and not killed:
            killed.append(pids[-1])
            os.kill(pids[-1], signal.SIGKILL)

    summary = demo_workflow(start, 12, 0, 1).run(tmp_path / "run", on_event=kill).summary

    assert killed
    assert len(pids) == 2
    rows = np.concatenate([batch.ids for _, batch in af.read_steps(tmp_path / "run")])
    assert len(rows) == len(np.unique(rows)) == 12 * 256
    assert summary["balanced"]
    assert summary["steps"] == 12
    assert af.staleness_of(tmp_path / "run").values.max() <= 1


@pytest.mark.timeout(400)
def test_the_example_whose_processes_are_killed_ends_by_itself_and_learns(tmp_path: Path, start: Path) -> None:
    script = Path(__file__).parent.parent / "examples" / "survive_kills.py"
    command = [sys.executable, str(script), "run", "--model", str(start), "--steps", "24", "--every-steps", "9"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    assert re.search(r"^killed +(rollout-[01]: \d, )+server: 1, train-0: 1$", said, re.M), said
    assert re.search(r"^ended +completed, 24 of 24 steps in the weights$", said, re.M), said
    assert re.search(rf"^rows trained +{24 * 128}, 0 of them twice$", said, re.M), said
    assert re.search(rf"^audit +Audit\(put={24 * 128}, live=0,.*balanced: True$", said, re.M), said
    assert re.search(r"^journal +\d+ records carried out again, 0 with other answers$", said, re.M), said
    assert re.search(r"^staleness +at most 1$", said, re.M), said
    first, last = map(float, re.findall(r"^reward +(\S+) -> (\S+)", said, re.M)[0])
    assert last > first, said


def test_the_trained_model_is_a_model_folder(tmp_path: Path, start: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from asyncflow_torch.demo.run import demo_workflow

    demo_workflow(start, 2, 0, 0).run(tmp_path / "run")

    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").state_dict()
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model")("31425=")["input_ids"]


@pytest.mark.timeout(300)
def test_a_cell_of_the_matrix_is_green_when_each_version_was_proven_and_names_what_is_not_there(start: Path) -> None:
    from benchmarks import matrix

    (plain, vllm, _), (torch, *_) = matrix.ROLLOUTS, matrix.TRAINS
    there, not_there = matrix.Environments({}), matrix.Environments({"vllm": "/nowhere/python"})

    green = matrix.run_cell(plain, torch, there, start, steps=3)
    lacking = matrix.run_cell(vllm, torch, not_there, start, steps=3)

    assert (green.green, green.steps, green.proven) == (True, 3, 2), green
    assert green.drift < 1e-5
    assert not lacking.green
    assert "/nowhere/python" in lacking.why
    text = matrix.page([green, lacking], not_there)
    assert "| transformers | 3 steps, 2 versions proven, drift" in text
    assert "| vLLM | **no**: rollout 'rollout': cannot start '/nowhere/python'" in text
    assert "| SGLang | not run | not run | not run |" in text
    assert matrix.chosen("vllm,fsdp") == [(vllm, matrix.TRAINS[1])]
    assert len(matrix.chosen("")) == 9
