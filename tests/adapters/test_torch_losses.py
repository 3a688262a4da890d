"""Advantages and the loss against independent formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncflow_sdk.algorithms import GRPO, group_advantages
from asyncflow_sdk.interfaces import PackedTokens


def grpo_loss(new: Any, old: Any, advantage: Any, config: GRPO, *, total_tokens: int) -> tuple[Any, dict[str, Any]]:
    rows = torch.zeros(len(new), dtype=torch.int64)
    tokens = PackedTokens(
        logprobs=new,
        behaviour=old,
        advantages=advantage,
        rows=rows,
        row_count=1,
        total_tokens=total_tokens,
        total_rows=1,
    )
    return config.loss(tokens)


def test_advantages_follow_the_formula_whatever_the_order_of_rows() -> None:
    # given groups of different sizes, interleaved
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([7, 3, 11], [4, 5, 8]))
    rewards = rng.normal(size=len(groups))

    # when
    advantages = group_advantages(rewards, groups)

    # then each group has torch's own numbers
    for group in (7, 3, 11):
        mine = torch.tensor(rewards[groups == group])
        wanted = (mine - mine.mean()) / (mine.std() + 1e-4)
        np.testing.assert_allclose(advantages[groups == group], wanted, rtol=1e-6)


@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7], [1e8, 1e8]])
def test_a_group_without_spread_has_advantage_exactly_zero(rewards: list[float]) -> None:
    assert not group_advantages(rewards, np.zeros(len(rewards), np.int64)).any()


def test_without_normalisation_the_advantage_is_the_distance_from_the_mean() -> None:
    advantages = group_advantages([0, 1, 5], np.array([4, 4, 4]), epsilon=None)
    np.testing.assert_allclose(advantages, [-2, -1, 3])


def _tokens(n: int = 40) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    behaviour = -rng.exponential(size=n)
    return behaviour + rng.normal(0, 0.4, n), behaviour, rng.normal(size=n)


def _reference(new: np.ndarray, old: np.ndarray, advantage: np.ndarray, low: float, high: float) -> float:
    """DAPO's eq. 8, token by token, in float64."""
    total = 0.0
    for x, y, a in zip(new, old, advantage, strict=True):
        ratio = np.exp(x - y)
        total += min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return -total / len(new)


def test_the_loss_and_its_gradient_equal_an_independent_float64_formula() -> None:
    # given tokens of which some are clipped on either side
    new, old, advantage = _tokens()
    config = GRPO(clip_low=0.1, clip_high=0.3)

    # when
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, metrics = grpo_loss(logprobs, torch.tensor(old), torch.tensor(advantage), config, total_tokens=len(new))
    loss.backward()

    # then value and central differences agree, and clipped tokens have no gradient
    assert loss.item() == pytest.approx(_reference(new, old, advantage, 0.1, 0.3), rel=1e-12)
    for i in range(len(new)):
        step = np.zeros(len(new))
        step[i] = 1e-6
        up, down = (_reference(new + s, old, advantage, 0.1, 0.3) for s in (step, -step))
        assert logprobs.grad[i].item() == pytest.approx((up - down) / 2e-6, abs=1e-8)
    clipped = (logprobs.grad == 0).float().mean().item()
    assert metrics["clip_fraction"].item() == pytest.approx(clipped)
    assert 0.1 < clipped < 0.9
    assert metrics["logprob_drift"].item() == pytest.approx(np.abs(new - old).mean())


def test_micro_batches_add_up_to_the_step() -> None:
    # given a step of 40 tokens, once whole and once in parts of unequal size
    new, old, advantage = (torch.tensor(x) for x in _tokens())
    whole, metrics = grpo_loss(new, old, advantage, GRPO(), total_tokens=40)
    parts = [slice(0, 3), slice(3, 30), slice(30, 40)]

    # when
    losses = [grpo_loss(new[p], old[p], advantage[p], GRPO(), total_tokens=40) for p in parts]

    # then
    assert sum(loss for loss, _ in losses) == pytest.approx(whole.item(), rel=1e-12)
    for name, value in metrics.items():
        assert sum(part[name] for _, part in losses) == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("drift", [500.0, -500.0])
def test_a_ratio_beyond_all_bounds_gives_a_finite_loss_and_gradient(drift: float, advantage: float) -> None:
    logprobs = torch.tensor([drift], requires_grad=True)
    loss, _ = grpo_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), GRPO(), total_tokens=1)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
