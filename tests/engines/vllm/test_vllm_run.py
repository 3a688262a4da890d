"""A run in two environments: vLLM generates in one, torch trains in the other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_options import OPTIONS

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Loaded

STEPS = 6
DEMO_STEPS = 30


def share_of_high(response_ids: Any) -> list[float]:
    return [float(sum(int(token) > 20 for token in row)) / len(row) for row in response_ids]


def test_vllm_generates_and_torch_trains(far: str, tmp_path: Path) -> None:
    from asyncflow_torch.reference import tiny_model

    model = tiny_model(tmp_path / "model", ends=True)
    events: list[Any] = []
    probe = af.Probe(((5, 6, 7), (8, 9)), ((10, 11, 12), (13, 14)))
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "vllm", model=model, group_size=8, prompt="prompt_ids", python=far, sampling=af.Sampling(max_tokens=8),
            **OPTIONS,
        ),
        reward=share_of_high,
        train=af.Train("torch", model=model, lr=3e-3, threads=1),
        batch_size=24, steps=STEPS, staleness=af.Staleness(max_staleness=1),
        weights=af.Weights(probe=probe, verify=["probe"]),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run", on_event=events.append)

    assert result.summary["balanced"]
    assert result.summary["steps"] == STEPS
    assert (
        max(event.version for event in events if isinstance(event, Loaded)) >= STEPS - 2
    )  # each proven by its log-probs
    rewards = []
    for _, batch in af.read_steps(tmp_path / "run"):
        assert batch.array("reward").tolist() == pytest.approx(share_of_high(batch.ragged("response_ids")))
        rewards.append(float(np.mean(batch.array("reward"))))
    assert len(rewards) == STEPS


def test_the_demo_learns_with_vllm_and_proves_each_version(far: str, tmp_path: Path) -> None:
    """As make demo-vllm runs it, in fewer steps."""
    options = ["dtype=float32", "enforce_eager=true", f"kv_cache_memory_bytes={128 << 20}"]
    command = [sys.executable, "-m", "asyncflow_sdk.cli", "demo", "--rollout", "vllm", "--python", far]
    command += ["--steps", str(DEMO_STEPS), "--out", str(tmp_path / "run")]

    done = subprocess.run(
        [*command, *(word for option in options for word in ("--option", option))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("completed", DEMO_STEPS, True)
    rewards = [float(np.mean(batch.array("reward"))) for _, batch in af.read_steps(tmp_path / "run")]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:5]) > 0.1, rewards
    (loaded,) = re.findall(
        r"^vllm loaded (\d+) versions, .* the trainer's names, and gave the trainer's log-probs for a probe$",
        done.stdout, re.M,
    )  # fmt: skip
    assert int(loaded) >= DEMO_STEPS // 2
