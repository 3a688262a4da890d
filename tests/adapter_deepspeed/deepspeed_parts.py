"""With which options DeepSpeed is made in tests, engines of two ranks, and algorithms that fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rank_runs import count_giving, hold

from asyncflow_sdk.algorithms import GRPO, PPO
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing.kit.ranks import Ranks


def options(stage: int, **more: Any) -> dict[str, Any]:
    """Of the small models of tests every parameter is parted: DeepSpeed keeps those of less than 100,000 elements whole."""
    config: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return {"stage": stage, "device": "cpu", "threads": 1, "lr": 1e-3, "config": config} | more


def engine_of(**given: Any) -> Any:
    make: Any = registry().get("train", "deepspeed").load()
    return make(**given)


RANKS = Ranks(engine_of, 2)
"""Two processes, for all tests: each takes ten seconds to start."""


def counting(**given: Any) -> Any:
    """`export` only counts."""
    engine: Any = registry().get("train", "deepspeed").load()

    class Counting(engine):  # type: ignore[misc]
        def export(self, path: Path) -> None:
            count_giving(self, path)

    return Counting(**given)


@dataclass(frozen=True, kw_only=True)
class Faulty(GRPO):
    """The gradient of its first pass is infinite, or its second pass ``raises``."""

    raises: bool = False
    passes: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: Any) -> Any:
        loss, metrics = super().loss(tokens)
        self.passes.append(1)
        if self.raises and len(self.passes) == 2:
            raise ArithmeticError("told to fail")
        return loss * (float("inf") if len(self.passes) == 1 and not self.raises else 1.0), metrics


@dataclass(frozen=True, kw_only=True)
class FaultyPPO(PPO):
    """In its first pass the gradient of the policy's log-probs or of the critic's values is infinite."""

    infinite: str = "policy"
    passes: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: Any) -> Any:
        loss, metrics = super().loss(tokens)
        self.passes.append(1)
        if len(self.passes) == 1:
            given = tokens.logprobs if self.infinite == "policy" else tokens.values
            loss = loss + (given - given.detach()).sum() * float("inf")
        return loss, metrics


def held(*, gates: str, **given: Any) -> Any:
    """Of which a rank may wait in a backward pass."""
    made = engine_of(**given)
    hold(made, gates)
    return made
