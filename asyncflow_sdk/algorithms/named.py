"""Algorithms by the names of their papers: each is PolicyGradient with other things said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .critic import Critic
from .policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO without its biases (arXiv 2503.20783, section 3.2): advantages are not divided by the group's spread, nor losses by the
    response's length, but by the constant ``length``, such as the most tokens a response may have. All rows count, also those that
    teach nothing."""

    clip_high: float = 0.2
    mean: Literal["tokens", "rows", "length"] = "length"
    normalize_std: bool = False
    drop_zero_advantage: bool = False


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """Clip-higher and the mean over tokens (arXiv 2503.14476, eq. 8), with ``overlong=af.Overlong(...)`` its soft punishment
    (eq. 13). Groups that teach nothing (eq. 11) are dropped before the forward pass; with a stage ``af.dynamic_sampling`` others take
    their place."""


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7): one ratio a response, clipped as a whole; the ranges are
    those of section 5.1. So narrow a range wants proximal log-probs where rows are stale: ``off_policy=af.OffPolicy()``."""

    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    mean: Literal["tokens", "rows", "length"] = "rows"


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """Clipped importance-sampling weights (arXiv 2506.13585, eq. 4 and 5): no token loses its gradient. There is no lower end, as
    in the paper, which does not say its upper one; 5 is ours."""

    surrogate: Literal["clip", "truncate"] = "truncate"
    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation (arXiv 1707.06347, eq. 7 and 9) with a critic of the trainer's and GAE (arXiv 1506.02438, eq.
    16). Groups may be of one."""

    clip_high: float = 0.2
    critic: Critic | None = field(default_factory=Critic)
    drop_zero_advantage: bool = False
