"""Algorithms under the names of their papers: PolicyGradient with other defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .critic import Critic
from .policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3) with the clip-higher range and
    the token-mean loss of DAPO (arXiv 2503.14476, eq. 8). As in the GRPO paper: ``mean="rows",
    clip_high=0.2, kl=af.KL(coef=0.04)``."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO without its biases (arXiv 2503.20783, section 3.2): advantages are not divided by the
    group's spread, and losses are divided by the constant ``length`` (for example the token limit
    of a response), not by the response's length. Rows with advantage 0 count too."""

    clip_high: float = 0.2
    mean: Literal["tokens", "rows", "length"] = "length"
    normalize_std: bool = False
    drop_zero_advantage: bool = False


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """Clip-higher and the mean over tokens (arXiv 2503.14476, eq. 8). ``overlong=af.Overlong(...)``
    adds its soft punishment (eq. 13). Groups with equal rewards (eq. 11) are dropped before the
    forward pass; a stage ``af.dynamic_sampling`` replaces them by others."""


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7): one ratio a response,
    clipped as a whole, with the clip range of section 5.1. With stale rows, this narrow range needs
    proximal log-probs: ``off_policy=af.OffPolicy()``."""

    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    mean: Literal["tokens", "rows", "length"] = "rows"


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """Clipped importance-sampling weights (arXiv 2506.13585, eq. 4 and 5): every token keeps its
    gradient. As in the paper, no lower bound. Its upper bound is not given; 5 is our choice."""

    surrogate: Literal["clip", "truncate"] = "truncate"
    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation (arXiv 1707.06347, eq. 7 and 9) with a critic in the trainer and
    GAE (arXiv 1506.02438, eq. 16). Allows groups of one row."""

    clip_high: float = 0.2
    critic: Critic | None = field(default_factory=Critic)
    drop_zero_advantage: bool = False
