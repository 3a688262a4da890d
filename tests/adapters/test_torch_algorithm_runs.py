"""Algorithms in whole runs: what they need of other tasks and ask of their engine comes together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Span, StepTrained
from asyncflow_torch.demo.task import exact_match, prompts
from asyncflow_torch.train import TorchEngine

HERE = {"launcher": "thread"}


@dataclass(frozen=True)
class OwnMean(af.Algorithm):
    """A user's own: each response counts alike, and so does each in its metric ``ratio``."""

    baseline: float = 0.25
    normaliser = "rows"
    metric_normalisers = {"ratio": "rows"}  # noqa: RUF012 - it is not changed

    def advantages(self, batch: Any) -> Any:
        return batch.array("reward") - self.baseline

    def loss(self, tokens: Any) -> Any:
        ratio = (tokens.logprobs - tokens.behaviour).exp()
        lengths = ratio.new_zeros(tokens.row_count).index_add(0, tokens.rows, ratio.detach() * 0 + 1)
        gains = ratio.new_zeros(tokens.row_count).index_add(0, tokens.rows, ratio * tokens.advantages)
        means = ratio.new_zeros(tokens.row_count).index_add(0, tokens.rows, ratio.detach()) / lengths.clamp(min=1)
        loss = -(gains / lengths.clamp(min=1)).sum() / tokens.total_rows
        return loss, {"ratio": means.sum() / tokens.total_rows}


def test_an_algorithm_of_ones_own_trains_steps_in_parts_once_it_says_by_what_it_divides(
    tiny: str, tmp_path: Path
) -> None:
    # given rewards that come group by group, each when the trainer has trained the groups before
    events, given = list[Event](), list[int]()

    def paced(response: Any, groups: Any) -> list[float]:
        until(
            lambda: len([e for e in events if isinstance(e, Span) and e.kind == "train" and e.rows]) >= len(given), ""
        )
        given.append(1)
        return [float(len(text) % 3) for text in response]

    train = {"algorithm": OwnMean(baseline=0.5), "learning_rate": 1e-4, "seed": 3}

    # when
    result = af.Workflow(
        prompts=prompts(16, 0),
        rollout=af.Rollout("transformers", model=tiny, group_size=4, sampling=af.Sampling(max_tokens=5, seed=0), **HERE),
        reward=af.Stage(paced, task="reward", gives=["reward"], batch=4),
        train=af.Train("torch", model=tiny, stream=True, part_rows=4, **train, **HERE),
        batch_size=16, steps=2,
    ).run(tmp_path / "run", on_event=events.append)  # fmt: skip

    # then the first step's numbers are those of the whole step
    assert result.summary["steps"] == 2
    metrics = [e.metrics for e in events if isinstance(e, StepTrained)]
    assert [each["parts"] for each in metrics] == [4, 4]
    _, batch = next(iter(af.read_steps(tmp_path / "run")))
    whole = TorchEngine(tiny, **train).train_step(batch).metrics
    assert {name: metrics[0][name] for name in whole} == pytest.approx(whole, rel=1e-4, abs=1e-6)
    assert whole["grad_norm"] > 0


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
        train=af.Train("torch", model=tiny, algorithm=algorithm, learning_rate=1e-3, updates=2, **HERE),
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
