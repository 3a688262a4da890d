"""GRPO: group-relative advantages and the clipped token-mean loss.

GRPO is arXiv 2402.03300 (eq. 3); the asymmetric clip range and the mean over all tokens of a step are
DAPO's, arXiv 2503.14476 (eq. 8); there is no KL term. Tensors are used by their methods alone: no framework is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..interfaces import Algorithm, PackedTokens
from ..types import Batch
from ..types.typed import Configuration, check_fields

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this, where the ratio is 4.9e8: no token makes a loss infinite, and one that
is beyond it has no gradient."""


@dataclass(frozen=True, kw_only=True)
class GRPO(Configuration, Algorithm):
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3) with the clip-higher range and the
    token-mean loss of DAPO (arXiv 2503.14476, eq. 8), no KL term.

    Advantage of a row: (reward - mean of its group) / (standard deviation of its group + ``epsilon``);
    ``normalize_std=False`` leaves the division out. Rows whose advantage is zero carry no gradient and are
    dropped before the forward pass (``drop_zero_advantage``), counted as filtered.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_std: bool = True
    epsilon: float = 1e-4
    drop_zero_advantage: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.clip_low < 1 or not self.clip_high >= 0:
            raise ConfigError(f"clip range [1 - {self.clip_low}, 1 + {self.clip_high}] is empty or negative")
        if not self.epsilon >= 0:
            raise ConfigError(f"epsilon is a number from 0, not {self.epsilon}")

    def check(self, *, group_size: int) -> None:
        if group_size == 1:
            raise ConfigError(
                "group_size is 1: an advantage relative to the group is then always 0 and nothing would be"
                " learned; use groups of 2 or more"
            )

    def advantages(self, batch: Batch) -> npt.NDArray[np.float32]:
        return group_advantages(
            batch.array("reward"), batch.groups, epsilon=self.epsilon if self.normalize_std else None
        )

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """-1/N · Σ_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with the ratio r_t = exp(logprobs -
        behaviour) (arXiv 2503.14476, eq. 8), and N the tokens of the whole step. Metrics: ``clip_fraction``, the share of tokens
        the clip takes the gradient from; ``logprob_drift``, the mean of |logprobs - behaviour|."""
        difference = tokens.logprobs - tokens.behaviour
        ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        free = ratio * tokens.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * tokens.advantages
        loss = -free.minimum(clipped).sum() / tokens.total_tokens
        return loss, {
            "clip_fraction": (clipped < free).sum() / tokens.total_tokens,
            "logprob_drift": difference.detach().abs().sum() / tokens.total_tokens,
        }


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.NDArray[np.int64], *, epsilon: float | None = 1e-4
) -> npt.NDArray[np.float32]:
    """Advantage of each row: float32 (rows,), from rewards (rows,) and group numbers (rows,) in any order.

    A_i = (R_i - mean(R)) / (std(R) + epsilon) over the row's group (arXiv 2402.03300, section 4.1.2), in
    float64; without the division where ``epsilon`` is None. std is the unbiased estimate (n - 1), as ``torch.std``. A
    group of one, or of equal rewards, has advantage exactly 0.
    """
    reward = np.asarray(rewards, np.float64)
    _, group, count = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(count) - count
    spread = np.maximum.reduceat(reward[order], starts) > np.minimum.reduceat(reward[order], starts)
    centred = reward - (np.bincount(group, reward) / count)[group]
    if epsilon is not None:
        variance = np.bincount(group, centred**2) / np.maximum(count - 1, 1)
        centred /= np.sqrt(variance)[group] + epsilon
    # Rounding in the mean would leave equal rewards an advantage of 1e-17, and so a gradient.
    return np.where(spread[group], centred, 0.0).astype(np.float32)
