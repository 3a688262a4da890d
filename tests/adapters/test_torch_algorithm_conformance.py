"""Algorithms in the kit: GRPO passes, and what is wrong is caught by the check that is about it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance

ALL = {"kl": af.KL(coef=0.1), "off_policy": af.OffPolicy(), "entropy": 0.01}


@pytest.mark.parametrize(
    "factory",
    ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", lambda: af.GRPO(**ALL), lambda: af.PPO(**ALL, dual_clip=3.0)],
)
def test_what_comes_with_the_sdk(factory: Any) -> None:
    report = Conformance("algorithm", factory).run()

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


class DividedByTokens(Right):
    normaliser = "rows"


class DividedTwice(Right):
    """By the root of the tokens, which is no normaliser."""

    normaliser = "tokens"

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        return loss * tokens.total_tokens**0.5, metrics


class CountsRows(Right):
    """Its metric is a number of rows, no mean over tokens, and it does not say so."""

    normaliser = "tokens"

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        return loss, {**metrics, "count": float(tokens.row_count)}


class BaselineOfTheStep(Right):
    normaliser = "tokens"

    def advantages(self, batch: af.Batch) -> Any:
        return batch.array("reward") - batch.array("reward").mean()


class Misspelt(Right):
    normaliser = "token"


WRONG: list[tuple[Callable[..., Any], str, str]] = [
    (MeanOfPart, "parts", "add up to"),
    (MetricsOfPart, "parts", "metric 'likelihood'"),
    (WrongSign, "direction", "less likelier"),
    (Detached, "forms", "has no gradient"),
    (Unbounded, "extremes", "give a loss of"),
    (NeighboursAreGroups, "row_order", "in another order"),
    (DividesByNothing, "extremes", "equal rewards"),
    (DividedByTokens, "normaliser", "the normaliser is not 'rows'"),
    (DividedTwice, "normaliser", "the normaliser is not 'tokens'"),
    (CountsRows, "normaliser", "metric 'count'"),
    (BaselineOfTheStep, "normaliser", "advantages of two groups alone"),
    (Misspelt, "normaliser", "'token' is none of tokens, rows, groups, constant"),
]


@pytest.mark.parametrize(("factory", "check", "says"), WRONG, ids=[each[0].__name__ for each in WRONG])
def test_what_is_wrong_is_caught(factory: Callable[..., Any], check: str, says: str) -> None:
    report = Conformance("algorithm", factory, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]
    assert says in report.results[0].detail


@dataclass(frozen=True)
class NeedsBoth(Right):
    """A baseline a row, and a number a token, in which order nothing says."""

    needs = ("kl", "baseline", "reward")

    def advantages(self, batch: af.Batch) -> Any:
        return batch.array("reward") - batch.array("baseline")

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        beside = (tokens.columns["kl"] * tokens.columns["baseline"]).sum() / tokens.total_tokens
        return loss, {**metrics, "beside": beside}


@dataclass(frozen=True)
class NeedsWhatNobodyCanGive(Right):
    needs = ("kl",)

    def advantages(self, batch: af.Batch) -> Any:
        return batch.texts("kl")


def test_columns_are_of_rows_or_of_tokens_as_the_algorithm_takes_them() -> None:
    right = Conformance("algorithm", NeedsBoth).run()
    wrong = Conformance("algorithm", NeedsWhatNobodyCanGive, only=["forms"]).run()

    assert [(result.outcome, result.detail) for result in right.results if result.bad] == []
    assert right.level == "full"
    assert [result.outcome for result in wrong.results] == ["failed"]


def test_without_torch_nothing_is_asked_and_no_level_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    report = Conformance("algorithm", Right).run()

    assert {result.outcome for result in report.results} == {"not asked"}
    assert (report.ok, report.level) == (True, "")


def test_a_users_own_in_ten_lines_passes() -> None:
    report = Conformance("algorithm", Right).run()

    assert report.ok, report.to_dict()


class OfGroups(Right):
    """A mean over groups, and metrics of three kinds."""

    normaliser = "groups"
    metric_normalisers = MappingProxyType({"groups": "groups", "rows": "constant"})

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        total = loss * tokens.total_tokens / tokens.total_groups
        return total, {**metrics, "groups": total.detach(), "rows": float(tokens.row_count)}


def test_a_users_own_that_declares_its_normalisers_passes_and_one_without_is_not_asked() -> None:
    declared = Conformance("algorithm", OfGroups).run()
    silent = Conformance("algorithm", Right, only=["normaliser"]).run()

    assert declared.ok, declared.to_dict()
    assert {result.check.name: result.outcome for result in declared.results}["normaliser"] == "passed"
    assert [(r.outcome, r.detail) for r in silent.results] == [
        (
            "does not apply",
            "Right declares no normaliser, by which the losses of a step's parts could be divided at its end",
        )
    ]
