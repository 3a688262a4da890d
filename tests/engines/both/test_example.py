"""One run, two engines that cannot be installed beside each other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 100


@pytest.mark.starts("examples/vllm_and_sglang.py")
def test_vllm_and_sglang_feed_one_trainer(pythons: list[str], tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "vllm_and_sglang.py"
    command = [sys.executable, str(script), *(os.path.abspath(each) for each in pythons), "--steps", str(STEPS)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    assert f"{STEPS} steps" in done.stdout
    reward = re.search(r"reward ([\d.]+) to ([\d.]+)", done.stdout)
    assert reward is not None
    assert float(reward[2]) - float(reward[1]) > 0.2, done.stdout
    for what in ("rows by each engine", "versions proven by each"):
        counts = re.search(rf"{what}: {{'rollout-0': (\d+), 'rollout-1': (\d+)}}", done.stdout)
        assert counts is not None, done.stdout
        assert min(map(int, counts.groups())) > 0
