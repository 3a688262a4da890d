"""A run whose rollout engine is SGLang's shared server, and whose trainer is PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import one_server
import pytest
from plain_generation import check_evaluations

import asyncflow_sdk as af


def odd(response_ids: list[list[int]]) -> list[float]:
    return [sum(token % 2 for token in row) / len(row) for row in response_ids]


@pytest.mark.starts("rollout sglang")
def test_a_run_proves_every_version_and_evaluates_exact_ones(shared: Any, tmp_path: Path) -> None:
    model = one_server.model()
    probe = af.Probe(prompt_ids=((5, 6, 7), (8, 9)), response_ids=((10, 42, 12), (13,)), tolerance=1e-4)
    prompts = [[5 + n, 6 + n, 7] for n in range(12)]
    held_out = [[8], *([9, 5 + n] for n in range(5))]
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of(prompts)},
        rollout=af.Rollout(
            "sglang", model=model, group_size=8, prompt="prompt_ids", sampling=af.Sampling(max_tokens=12, top_k=20, top_p=0.95, sampling_mask=True),
            **shared.options,
        ),
        reward=odd,
        train=af.Train("torch", model=model, learning_rate=5e-3),
        weights=af.Weights(swap="drain", probe=probe, verify=["probe"]),
        batch_size=16,
        steps=6,
        staleness=af.Staleness(max_staleness=1),
        save_steps=1,
        evaluate=af.Evaluation(prompts={"prompt_ids": held_out}, every=3, reward=odd),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run")

    assert result.summary["balanced"]
    assert result.summary["status"] == "completed", result.summary
    assert 6 in check_evaluations(result, held_out, tokens=12)
    # both engines mean the same by the log-prob of a draw that was cut: that of one of its kept ids
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines() if '"step"' in line
    ]
    (first,) = [each["metrics"] for each in steps if each["event"] == "step" and each["step"] == 0]
    assert first["logprob_drift"] < 1e-4
