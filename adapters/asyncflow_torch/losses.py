"""GRPO: group-relative advantages and the clipped token-mean loss.

GRPO is arXiv 2402.03300 (eq. 3); the asymmetric clip range and the mean over all tokens of a step are
DAPO's, arXiv 2503.14476 (eq. 8); there is no KL term.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncflow_sdk.types import GRPO

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this, where the ratio is 4.9e8: no token makes a loss infinite, and one that
is beyond it has no gradient."""


def group_advantages(rewards: npt.ArrayLike, groups: npt.NDArray[np.int64], config: GRPO) -> npt.NDArray[np.float32]:
    """Advantage of each row: float32 (rows,), from rewards (rows,) and group numbers (rows,) in any order.

    A_i = (R_i - mean(R)) / (std(R) + epsilon) over the row's group (arXiv 2402.03300, section 4.1.2), in
    float64. std is the unbiased estimate (n - 1), as ``torch.std``. A group of one, or of equal rewards,
    has advantage exactly 0.
    """
    reward = np.asarray(rewards, np.float64)
    _, group, count = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(count) - count
    spread = np.maximum.reduceat(reward[order], starts) > np.minimum.reduceat(reward[order], starts)
    centred = reward - (np.bincount(group, reward) / count)[group]
    if config.normalize_std:
        variance = np.bincount(group, centred**2) / np.maximum(count - 1, 1)
        centred /= np.sqrt(variance)[group] + config.epsilon
    # Rounding in the mean would leave equal rewards an advantage of 1e-17, and so a gradient.
    return np.where(spread[group], centred, 0.0).astype(np.float32)


def grpo_loss(
    logprobs: Any, behaviour: Any, advantages: Any, config: GRPO, *, total_tokens: int
) -> tuple[Any, dict[str, Any]]:
    """The loss of some tokens of a step, and metrics. All inputs float32 (tokens,), packed.

    -1/N · Σ_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), with the ratio r_t = exp(logprobs -
    behaviour) (arXiv 2503.14476, eq. 8). N is ``total_tokens``, the tokens of the *whole step*: so the
    losses of its micro-batches, and their gradients, add up to those of the step. So do the metrics:
    ``clip_fraction``, the share of tokens the clip takes the gradient from; ``logprob_drift``, the mean of
    |logprobs - behaviour|.
    """
    difference = logprobs - behaviour
    ratio = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    loss = -torch.minimum(free, clipped).sum() / total_tokens
    with torch.no_grad():
        metrics = {
            "clip_fraction": (clipped < free).sum() / total_tokens,
            "logprob_drift": difference.abs().sum() / total_tokens,
        }
    return loss, metrics
