"""A run in two environments: vLLM generates in one, torch trains in the other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

STEPS = 12


@pytest.mark.starts("rollout vllm")
def test_the_demo_runs_with_vllm_and_proves_each_version(far: str, tmp_path: Path) -> None:
    """As make demo-vllm runs it, in fewer steps."""
    options = ["dtype=float32", "enforce_eager=true", f"kv_cache_memory_bytes={128 << 20}"]
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "demo", "--rollout", "vllm", "--python", far]
    command += ["--steps", str(STEPS), "--out", str(tmp_path / "run")]

    done = subprocess.run(
        [*command, *(word for option in options for word in ("--option", option))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", STEPS, True)
    (loaded,) = re.findall(
        r"^vllm loaded (\d+) versions, .* the trainer's names, and gave the trainer's log-probs for a probe$",
        done.stdout, re.M,
    )  # fmt: skip
    assert int(loaded) >= STEPS // 2 - 1  # no row is older than one version
