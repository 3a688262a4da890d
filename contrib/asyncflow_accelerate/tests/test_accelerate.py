"""Accelerate passes the conformance kit, and trains in a run with an engine that knows nothing of
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance
from asyncflow_torch.reference import tiny_model

kit = Conformance("train", "accelerate", options={"learning_rate": 1e-3, "cpu": True, "micro_batch_rows": 5})


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def test_a_run_with_another_rollout_engine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", ends=True)
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "transformers", model=model, group_size=4, prompt="prompt_ids", threads=1, sampling=af.Sampling(max_tokens=8)
        ),
        reward=lambda response_ids: [float(sum(token > 20 for token in row)) / len(row) for row in response_ids],
        train=af.Train("accelerate", model=model, learning_rate=3e-3, cpu=True),
        batch_size=12, steps=6, staleness=af.Staleness(max_staleness=1),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run")

    assert result.summary["balanced"]
    assert result.summary["steps"] == 6
