"""Algorithms that fail, in a module that ranks can import: gradients that are not finite, and errors in the middle of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from asyncflow_sdk.algorithms import GRPO, PPO
from asyncflow_sdk.interfaces import PackedTokens

INFINITE = float("inf")


@dataclass(frozen=True, kw_only=True)
class Faulty(GRPO):
    """At these ``calls`` of its loss, counted from 1, the gradient is infinite, or the loss ``raises``; and wherever a row has an advantage
    ``above`` a number, which is so on one of several ranks."""

    normaliser = "tokens"
    calls: tuple[int, ...] = ()
    above: float = INFINITE
    raises: bool = False
    more: set[int] = field(default_factory=set, compare=False)
    made: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        self.made.append(len(self.made) + 1)
        loss, metrics = super().loss(tokens)
        fails = self.made[-1] in {*self.calls, *self.more} or bool(tokens.advantages.max() > self.above)
        if fails and self.raises:
            raise KeyError("told to fail")
        return loss * (INFINITE if fails else 1.0), metrics


@dataclass(frozen=True, kw_only=True)
class FaultyPPO(PPO):
    """The gradient of the "policy" or of the "critic" is infinite, and that of the other is not: at these ``calls``, or at all."""

    infinite: str = "critic"
    calls: tuple[int, ...] = (1,)
    made: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        self.made.append(len(self.made) + 1)
        loss, metrics = super().loss(tokens)
        given = tokens.logprobs if self.infinite == "policy" else tokens.values
        if not self.calls or self.made[-1] in self.calls:
            loss = loss + (given - given.detach()).sum() * INFINITE
        return loss, metrics
