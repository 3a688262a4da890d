"""Drift: distance of the trained policy from the policies that drew its tokens, as metrics of each
step.

    drift = Drift(); drift.add(logprobs, behaviour)            # of each pass
    Drift.metrics(ranks.gather(drift.counts))                  # of the step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from asyncflow_sdk.algorithms import clamp_log_ratio

NAMES = ("logprob_drift", "behaviour_kl", "importance_mean", "importance_max", "importance_ess")


class Drift:
    """Sums over the tokens of one rank. They stay on the device until ``counts``."""

    def __init__(self) -> None:
        self._sums: Any = 0.0
        self._most: Any = None

    def add(self, logprobs: Any, behaviour: Any) -> None:
        """Add tokens: log-probs under the trained policy, and under the policies that drew them."""
        if not len(logprobs):
            return
        apart = clamp_log_ratio((logprobs.detach() - behaviour).double())
        weight = apart.exp()
        each = torch.stack([torch.ones_like(apart), apart.abs(), weight, weight.square(), weight - 1 - apart])
        self._sums = self._sums + each.sum(1)
        self._most = weight.max() if self._most is None else torch.maximum(self._most, weight.max())

    @property
    def counts(self) -> dict[str, Any]:
        """Sums as JSON, for the other ranks."""
        none = self._most is None
        return {"sums": [0.0] * 5 if none else self._sums.tolist(), "most": 0.0 if none else float(self._most)}

    @staticmethod
    def metrics(counts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return metrics of all ranks' tokens, with w = π / π_behaviour: ``logprob_drift``, the mean of |log w|;
        ``behaviour_kl``, the mean of w - 1 - log w, an estimate of KL(behaviour ‖ π); ``importance_mean`` and
        ``importance_max`` of w; ``importance_ess``, the effective sample size (Σ w)² / Σ w² by the number of
        tokens."""
        tokens, apart, weights, squares, kl = (sum(each) for each in zip(*(c["sums"] for c in counts), strict=True))
        if not tokens:
            return {}
        most, size = max(each["most"] for each in counts), weights**2 / squares
        return dict(zip(NAMES, (apart / tokens, kl / tokens, weights / tokens, most, size / tokens), strict=True))
