"""Runs are written by the real Trackio, and read from its files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncflow_sdk.testing import Conformance

kit = Conformance("tracker", "trackio")


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


PROGRAM = """
import sys
import asyncflow_sdk as af
from trackio.sqlite_storage import SQLiteStorage

af.Workflow(
    prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
    rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"), reward=lambda response_ids: [0.5] * len(response_ids),
    train=af.Train("echo"), batch_size=8, steps=4, track=[("trackio", {"project": "mine", "sample_every": 2})],
).run(sys.argv[1])
logs = SQLiteStorage.get_logs("mine", "first")
print([(row["step"], row["train/reward"], row["version"]) for row in logs if "train/reward" in row])
print([row["step"] for row in logs if "samples" in row])
print(SQLiteStorage.get_run_config("mine", "first")["batch_size"])
"""


@pytest.mark.starts("tracker trackio")
def test_the_steps_of_a_run_its_samples_and_configuration(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads TRACKIO_DIR when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "first")],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}, capture_output=True, text=True, timeout=250,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-3:] == [str([(step, 0.5, step) for step in range(4)]), "[0, 2]", "8"], done.stdout
