"""GRPO: group-relative advantages and the clipped token-mean loss."""

from __future__ import annotations

from dataclasses import dataclass

from .advantages import group_advantages as group_advantages
from .policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3) with the clip-higher range and
    the token-mean loss of DAPO (arXiv 2503.14476, eq. 8). As in the GRPO paper: ``mean="rows",
    clip_high=0.2, kl=af.KL(coef=0.04)``."""
