"""Accelerate trains in a run with an engine that knows nothing of it, and goes on exactly from its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncflow_sdk as af
from asyncflow_accelerate.engine import AccelerateEngine
from asyncflow_torch.reference import HuggingFacePolicy, tiny_model


def rows(policy: HuggingFacePolicy) -> af.Batch:
    prompts = [prompt for prompt in policy.prompts(3) for _ in range(4)]
    responses = policy.prompts(12, longest=9, seed=1)
    drawn = [policy.logprobs(0, p, r).astype(np.float32) for p, r in zip(prompts, responses, strict=True)]
    reward = np.tile(np.array([0, 1, 0, 1], np.float32), 3)
    columns = {"prompt_ids": prompts, "response_ids": responses, "logprobs": drawn, "reward": reward}
    return af.Batch.of(columns, groups=np.repeat(np.arange(3), 4))


def test_rewarded_responses_become_likelier_and_others_less() -> None:
    policy = HuggingFacePolicy()
    batch = rows(policy)
    engine = AccelerateEngine(policy.folder, lr=1e-3, cpu=True, micro_batch_rows=5)
    before = engine.logprobs(batch)
    np.testing.assert_allclose(before.values, batch.ragged("logprobs").values, atol=1e-4)

    result = engine.train_step(batch)

    gained = np.add.reduceat(engine.logprobs(batch).values - before.values, before.offsets[:-1])
    assert result.filtered is None
    assert gained[1::2].mean() > 0 > gained[::2].mean()


def test_a_saved_engine_goes_on_as_if_there_had_been_no_pause(tmp_path: Path) -> None:
    policy = HuggingFacePolicy()
    batch = rows(policy)
    whole, stopped, again = (AccelerateEngine(policy.folder, lr=1e-3, cpu=True) for _ in range(3))
    for engine in (whole, whole, stopped):
        engine.train_step(batch)
    stopped.save(tmp_path / "saved")

    again.load(tmp_path / "saved")
    again.train_step(batch)

    for (name, one), (_, other) in zip(whole.named_weights(), again.named_weights(), strict=True):
        assert torch.equal(one, other), name


def test_bad_rows_change_nothing() -> None:
    policy = HuggingFacePolicy()
    engine = AccelerateEngine(policy.folder, lr=1e-3, cpu=True)
    held = {name: tensor.clone() for name, tensor in engine.named_weights()}
    bad = rows(policy)
    reward = bad.array("reward").copy()
    reward[3] = np.nan
    columns: dict[str, Any] = {name: bad[name] for name in ("prompt_ids", "response_ids", "logprobs")}

    with pytest.raises(af.SchemaError, match="reward is not a finite number"):
        engine.train_step(af.Batch.of({**columns, "reward": reward}, groups=bad.groups))

    assert all(torch.equal(tensor, held[name]) for name, tensor in engine.named_weights())


def test_a_run_with_another_rollout_engine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", ends=True)
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "transformers", model=model, group_size=4, prompt="prompt_ids", threads=1, sampling=af.Sampling(max_tokens=8)
        ),
        reward=lambda response_ids: [float(sum(token > 20 for token in row)) / len(row) for row in response_ids],
        train=af.Train("accelerate", model=model, lr=3e-3, cpu=True),
        batch_size=12, steps=6, staleness=af.Staleness(max_staleness=1),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run")

    assert result.summary["balanced"]
    assert result.summary["steps"] == 6
