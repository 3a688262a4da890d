"""Algorithms in whole runs: what they need of other tasks and ask of their engine comes together."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import asyncflow_sdk as af
from asyncflow_torch.demo.task import exact_match, prompts

HERE = {"launcher": "thread"}


def test_ppo_with_a_critic_a_reference_and_a_correction_trains_in_a_workflow(tiny: str, tmp_path: Path) -> None:
    # given: groups of one, which only a critic can train
    algorithm = af.PPO(
        kl=af.KL(coef=0.05, estimator="k1", where="reward"),
        off_policy=af.OffPolicy(weight="mask", high=5.0, proximal="interpolated"),
        entropy=0.01,
    )
    workflow = af.Workflow(
        prompts=prompts(48, 0),
        rollout=af.Rollout("transformers", model=tiny, group_size=1, sampling=af.Sampling(max_tokens=5, seed=0), **HERE),
        reward=exact_match,
        stages=[af.Stage(af.Logprobs("torch", model=tiny), gives=["ref_logprobs"], **HERE)],
        train=af.Train("torch", model=tiny, algorithm=algorithm, lr=1e-3, updates=2, **HERE),
        batch_size=16, steps=3, staleness=af.Staleness(max_staleness=1),
        checkpoint=af.Checkpoint(every=2),
    )  # fmt: skip

    # when
    result = workflow.run(tmp_path / "run")

    # then each step has trained policy and critic, by tokens that it weighs by how far they are from it
    assert result.summary["steps"] == 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [event["metrics"] for event in events if event["event"] == "step"]
    for metrics in steps:
        assert metrics["rows_used"] == 16
        assert min(metrics[name] for name in ("value_loss", "critic_grad_norm", "grad_norm", "entropy")) > 0
        assert 0 < metrics["importance_ess"] <= 1
        assert metrics["off_policy_weight"] > 0.5
    assert abs(steps[0]["kl"]) < 0.05 < max(abs(m["kl"]) for m in steps[1:]), (
        "the reference stays where the policy began"
    )
    assert list((tmp_path / "run").rglob("critic/weights.safetensors"))
    _, batch = next(iter(af.read_steps(tmp_path / "run")))
    np.testing.assert_allclose(batch.ragged("ref_logprobs").values, batch.ragged("logprobs").values, atol=1e-4)
