"""The demo as `make demo` runs it, in fewer steps: a real model, real engines, real processes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from children import warm_python

import asyncflow_sdk as af

ROOT = Path(__file__).parent.parent
STEPS = 32


def python(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [warm_python(), *map(str, arguments)]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def demo(directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return python(directory, "-m", "asyncflow_sdk.cli", "demo", "--out", "run", *arguments)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "start"
    warm_up = "import pathlib, sys; from asyncflow_torch.demo.model import warm_up; warm_up(pathlib.Path(sys.argv[1]), seed=0)"
    done = python(ROOT, "-c", warm_up, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def run(start: Path) -> Path:
    """The directory of a run that has ended."""
    done = demo(start.parent, "--model", start, "--steps", STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((start.parent / "run" / "summary.json").read_text())["report"] in done.stdout
    return start.parent / "run"


@pytest.mark.starts("asyncflow demo")
def test_it_learns_and_its_directory_tells_it(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())

    assert summary["status"] == "completed"
    assert summary["steps"] == STEPS
    assert summary["reward_last"] - summary["reward_first"] > 0.08
    assert summary["balanced"]
    assert summary["rows"]["consumed"] + summary["rows"]["filtered"] == STEPS * 256
    assert summary["staleness_max"] == 1
    assert af.staleness_of(run).values.max() == 1
    rows = np.concatenate([batch.ids for _, batch in af.read_steps(run)])
    assert len(rows) == len(np.unique(rows)) == STEPS * 256
    assert (run.parent / summary["report"]).read_text().count("<svg") >= 3


def test_the_trained_model_is_a_model_folder(run: Path, start: Path) -> None:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as Model, AutoTokenizer\n"
        "before, after = (Model.from_pretrained(folder).state_dict() for folder in sys.argv[1:])\n"
        "assert before.keys() == after.keys()\n"
        "assert any((before[name] != after[name]).any() for name in before)\n"
        "assert AutoTokenizer.from_pretrained(sys.argv[2])('31425=')['input_ids']\n"
    )

    done = python(ROOT, "-c", code, start, run / "model")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--model", ".", "--algorithm", "ppo", "--algorithm-option", 'critic={"decay": 2}'],
            "critic: decay must be from 0 to 1, not 2",
        ),
        (["--train", "fdsp"], "no train adapter is named 'fdsp'"),  # not after the warm-up, which makes run/start
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(tmp_path: Path, options: list[str], said: str) -> None:
    done = demo(tmp_path, *options)

    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(400)
@pytest.mark.starts("asyncflow resume", "examples/survive_kills.py")
def test_the_example_whose_processes_are_killed_ends_by_itself(tmp_path: Path, start: Path) -> None:
    script = ROOT / "examples" / "survive_kills.py"

    done = python(tmp_path, script, "run", "--model", start, "--steps", 15, "--every-steps", 6)

    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    for pattern in (
        r"killed +(rollout-[01]: \d, )+server: 1, train-0: 1",
        r"ended +completed, 15 of 15 steps in the weights",
        rf"rows trained +{15 * 128}, 0 of them twice",
        rf"audit +Audit\(put={15 * 128}, live=0,.*balanced: True",
        r"journal +\d+ records carried out again, 0 with other answers",
        r"staleness +at most 1",
    ):
        assert re.search(f"^{pattern}$", said, re.M), said


@pytest.mark.timeout(300)
def test_a_cell_of_the_matrix_is_green_when_each_version_was_proven_and_names_what_is_not_there(
    start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import matrix
    from benchmarks.pairs import ROLLOUTS, TRAINS, Environments, Pair, chosen

    monkeypatch.setattr(sys, "executable", warm_python())
    (plain, vllm, _), (torch, *_) = ROLLOUTS, TRAINS
    there, not_there = Environments({}), Environments({"vllm": "/nowhere/python"})

    green = matrix.run_cell(Pair(plain, torch), there, start, steps=3)
    lacking = matrix.run_cell(Pair(vllm, torch), not_there, start, steps=3)

    assert (green.green, green.steps, green.proven) == (True, 3, 2), green
    assert green.drift < 1e-5
    assert not lacking.green
    assert "/nowhere/python" in lacking.why
    text = matrix.page([green, lacking], not_there)
    assert "| transformers | 3 steps, 2 versions proven, drift" in text
    assert "| vLLM | **no**: rollout 'rollout': cannot start 'python'" in text
    assert "| SGLang | not run | not run | not run |" in text
    assert "| vLLM, Qwen3-MoE | not run | not run | not run |" in text
    assert chosen("vllm,fsdp", matrix.PAIRS) == [Pair(vllm, TRAINS[1]), Pair(vllm, TRAINS[1], "qwen3_moe")]
    assert len(chosen("", matrix.PAIRS)) == 12


def test_make_demo_both_takes_the_arguments_of_the_demo(tmp_path: Path) -> None:
    given = "--steps 40 --seed 1 --max-staleness 0 --staleness-policy drop --out run --model nowhere"
    made = subprocess.run(
        ["make", "-n", "demo-both", f"ARGS={given}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    example = "examples/vllm_and_sglang.py"
    words = shlex.split(next(line for line in made.stdout.splitlines() if example in line))
    script = words.index(example)

    done = python(tmp_path, ROOT / words[script], "no-vllm", "no-sglang", *words[script + 3 :])

    assert "cannot start 'no-vllm'" in done.stderr, done.stderr
    assert "cannot start 'no-sglang'" in done.stderr
