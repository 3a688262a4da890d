"""``asyncflow run`` and ``asyncflow resume``: what they say of a run that ended, and never of another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKFLOW = """\
steps = 3
batch_size = 16
prompts = { prompt_ids = [[1], [2]] }
reward = "rewards:length"
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo", shifted = true }
checkpoint = { every = 2 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(
        "def length(response_ids):\n    return [float(len(r)) for r in response_ids]\n"
    )
    (tmp_path / "run.toml").write_text(WORKFLOW)
    return tmp_path / "run.toml"


def begun(*args: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "asyncflow_sdk.cli", *map(str, args)]
    env = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def said(*args: object) -> tuple[int, str, str]:
    process = begun(*args)
    out, err = process.communicate(timeout=100)  # only ends a test that would hang
    return process.returncode, out, err


def test_a_run_into_the_directory_of_another_says_nothing_of_that(file: Path) -> None:
    code, out, err = said("run", file, file.parent / "one")
    assert (code, err) == (0, "")
    assert "steps trained" in out
    page = (file.parent / "one" / "report.html").stat()

    code, out, err = said("run", file, file.parent / "one")

    assert code == 2
    assert "already holds a run" in err
    assert "steps trained" not in out
    assert (file.parent / "one" / "report.html").stat() == page


def test_a_run_that_is_resumed_is_shown_as_it_is_when_it_is_run(file: Path) -> None:
    # given a run that is killed
    process = begun("run", file, file.parent / "one", "--set", "steps=100000")
    until = time.monotonic() + 100
    while not list((file.parent / "one" / "steps").glob("*.safetensors")):
        assert time.monotonic() < until, "no step"
        time.sleep(0.05)
    process.kill()
    process.communicate()

    # when it is gone on with, and stopped
    process = begun("resume", file.parent / "one")
    assert process.stdout is not None
    for line in process.stdout:
        if "worker train-0: ready" in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=100)

    # then
    assert process.returncode == 130
    assert "interrupted: stopped by request" in err
    assert "rows ended" in out
    assert (file.parent / "one" / "report.html").is_file()
