"""Algorithms in the kit: GRPO passes, and what is wrong is caught by the check that is about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance


def test_grpo() -> None:
    report = Conformance("algorithm", "grpo").run()

    assert report.ok, report.to_dict()
    assert report.level == "full"


@dataclass(frozen=True)
class Right(af.Algorithm):
    def advantages(self, batch: af.Batch) -> Any:
        return batch.array("reward") - 0.5

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        ratio = (tokens.logprobs - tokens.behaviour).clamp(-20, 20).exp()
        return -(ratio * tokens.advantages).sum() / tokens.total_tokens, {
            "ratio": ratio.detach().sum() / tokens.total_tokens
        }


class MeanOfPart(Right):
    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        ratio = (tokens.logprobs - tokens.behaviour).clamp(-20, 20).exp()
        return -(ratio * tokens.advantages).mean(), {}


class MetricsOfPart(Right):
    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, _ = super().loss(tokens)
        return loss, {"likelihood": tokens.logprobs.detach().exp().mean()}


class WrongSign(Right):
    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        return -loss, metrics


class Detached(Right):
    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        return loss.detach(), metrics


class Unbounded(Right):
    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        ratio = (tokens.logprobs - tokens.behaviour).exp()
        return -(ratio * tokens.advantages).sum() / tokens.total_tokens, {}


class NeighboursAreGroups(Right):
    def advantages(self, batch: af.Batch) -> Any:
        reward = np.asarray(batch.array("reward")).reshape(-1, 4)
        return (reward - reward.mean(1, keepdims=True)).reshape(-1)


class DividesByNothing(Right):
    def advantages(self, batch: af.Batch) -> Any:
        reward = np.asarray(batch.array("reward"), np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (reward - reward.mean()) / reward.std()


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (MeanOfPart, "parts", "add up to"),
    (MetricsOfPart, "parts", "metric 'likelihood'"),
    (WrongSign, "direction", "less likelier"),
    (Detached, "forms", "has no gradient"),
    (Unbounded, "extremes", "give a loss of"),
    (NeighboursAreGroups, "row_order", "in another order"),
    (DividesByNothing, "extremes", "equal rewards"),
]


@pytest.mark.parametrize(("factory", "check", "says"), WRONG, ids=[each[0].__name__ for each in WRONG])
def test_what_is_wrong_is_caught(factory: Callable[..., Any], check: str, says: str) -> None:
    report = Conformance("algorithm", factory, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]
    assert says in report.results[0].detail


def test_a_users_own_in_ten_lines_passes() -> None:
    report = Conformance("algorithm", Right).run()

    assert report.ok, report.to_dict()
