"""The terms of losses: ratios, surrogates and means. They call methods of tensors and import no framework.

    ratio = token_ratio(tokens.logprobs - tokens.behaviour, tokens)
    gain, cut = clip(ratio, tokens.advantages, low=0.2, high=0.28)
    loss = -token_mean(gain, tokens)

All ratios have one value per token, so terms combine freely."""

from __future__ import annotations

from typing import Any

from ..errors import EngineError
from ..interfaces import PackedTokens

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this number (ratio 4.9e8): losses stay finite. Tokens beyond have no gradient."""


def clamp_log_ratio(difference: Any) -> Any:
    """Clamp a difference of log-probs to ± ``LOG_RATIO_BOUND``."""
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def computed(given: Any, name: str) -> Any:
    """Return a quantity of ``Algorithm.asks``. Raises EngineError if it is None: not computed."""
    if given is None:
        raise EngineError(f"the algorithm asks its engine for {name!r} (in `asks`), which the engine did not compute")
    return given


# ---- ratios of the policy being trained to an older one, from the difference of their log-probs


def token_ratio(difference: Any, tokens: PackedTokens) -> Any:
    """Return r_t = exp(difference) (arXiv 1707.06347, section 3)."""
    return clamp_log_ratio(difference).exp()


def sequence_ratio(difference: Any, tokens: PackedTokens) -> Any:
    """Return s_i = exp(mean of the row's differences), the same for each token of a row (arXiv 2507.18071, eq. 7)."""
    zeros = difference.new_zeros(tokens.row_count)
    mean = zeros.index_add(0, tokens.rows, difference) / row_tokens(difference, tokens)
    return clamp_log_ratio(mean).exp()[tokens.rows]


# ---- surrogates: the objective of each token, and a mask of the tokens that were cut


def clip(ratio: Any, advantages: Any, *, low: float, high: float, dual: float | None = None) -> tuple[Any, Any]:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, eq. 7; two ranges: arXiv 2503.14476, eq. 8),
    at least ``dual`` A for A < 0 (arXiv 1912.09729, eq. 5). Cut: tokens without gradient because of the clip."""
    free = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    gain, cut = free.minimum(clipped), clipped < free
    if dual is not None:
        floor = dual * advantages.clamp(max=0.0)
        gain, cut = gain.maximum(floor), cut | (gain < floor)
    return gain, cut


def truncate(ratio: Any, advantages: Any, logprobs: Any, *, low: float, high: float) -> tuple[Any, Any]:
    """Return sg(clip(r, 1 - low, 1 + high)) A log π (arXiv 2506.13585, eq. 4 and 5). Cut: clipped tokens."""
    free = ratio.detach()
    weight = free.clamp(1 - low, 1 + high)
    # the gradient at a log-prob of -inf would be NaN
    return weight * advantages * logprobs.clamp(min=-1e4), weight != free


# ---- means over the whole step; the given tokens are a part of it


def token_mean(values: Any, tokens: PackedTokens) -> Any:
    """Return the mean with equal weight for every token (arXiv 2503.14476, eq. 12)."""
    return values.sum() / max(tokens.total_tokens, 1)


def row_mean(values: Any, tokens: PackedTokens) -> Any:
    """Return the mean with equal weight for every row, and within a row for every token (arXiv 2402.03300, eq. 3)."""
    return (values / row_tokens(values, tokens)[tokens.rows]).sum() / max(tokens.total_rows, 1)


def row_tokens(like: Any, tokens: PackedTokens) -> Any:
    """Return the number of tokens of each row, at least 1: (row_count,)."""
    ones = like.new_zeros(len(like)) + 1
    return like.new_zeros(tokens.row_count).index_add(0, tokens.rows, ones).clamp(min=1)
