"""The terms that losses are made of: ratios, surrogates, means. Tensors are used by their methods: no framework is imported.

    ratio = token_ratio(tokens.logprobs - tokens.behaviour, tokens)
    gain, cut = clip(ratio, tokens.advantages, low=0.2, high=0.28)
    loss = -token_mean(gain, tokens)

A ratio is of each token, so each term goes with each other one.
"""

from __future__ import annotations

from typing import Any

from ..interfaces import PackedTokens

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this, where the ratio is 4.9e8: no token makes a loss infinite, and one that
is beyond it has no gradient."""


def bounded(difference: Any) -> Any:
    """A difference of log-probs, finite whatever they are."""
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


# ---- ratios: of the policy being trained to an older one, from the difference of their log-probs


def token_ratio(difference: Any, tokens: PackedTokens) -> Any:
    """r_t = exp(difference) (arXiv 1707.06347, section 3)."""
    return bounded(difference).exp()


def sequence_ratio(difference: Any, tokens: PackedTokens) -> Any:
    """s_i = exp(mean of the row's differences), the same for each of its tokens (arXiv 2507.18071, eq. 7)."""
    zeros = difference.new_zeros(tokens.row_count)
    mean = zeros.index_add(0, tokens.rows, difference) / row_tokens(difference, tokens)
    return bounded(mean).exp()[tokens.rows]


# ---- surrogates: what is made large, of each token, and which tokens were cut


def clip(ratio: Any, advantages: Any, *, low: float, high: float, dual: float | None = None) -> tuple[Any, Any]:
    """min(r A, clip(r, 1 - low, 1 + high) A) (arXiv 1707.06347, eq. 7; two ranges: arXiv 2503.14476, eq. 8); where A < 0 no
    less than ``dual`` A (arXiv 1912.09729, eq. 5). Cut are tokens that have no gradient for it."""
    free = ratio * advantages
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    gain, cut = free.minimum(clipped), clipped < free
    if dual is not None:
        floor = dual * advantages.clamp(max=0.0)
        gain, cut = gain.maximum(floor), cut | (gain < floor)
    return gain, cut


def truncate(ratio: Any, advantages: Any, logprobs: Any, *, low: float, high: float) -> tuple[Any, Any]:
    """sg(clip(r, 1 - low, 1 + high)) A log π (arXiv 2506.13585, eq. 4 and 5): every token has a gradient. Cut are tokens whose
    weight was."""
    free = ratio.detach()
    weight = free.clamp(1 - low, 1 + high)
    # a log-prob of -inf has no gradient that is a number
    return weight * advantages * logprobs.clamp(min=-1e4), weight != free


# ---- means: over the whole step, of which these tokens are a part


def token_mean(values: Any, tokens: PackedTokens) -> Any:
    """Every token weighs the same (arXiv 2503.14476, eq. 12)."""
    return values.sum() / max(tokens.total_tokens, 1)


def row_mean(values: Any, tokens: PackedTokens) -> Any:
    """Every row weighs the same, and in it every token (arXiv 2402.03300, eq. 3)."""
    return (values / row_tokens(values, tokens)[tokens.rows]).sum() / max(tokens.total_rows, 1)


def row_tokens(like: Any, tokens: PackedTokens) -> Any:
    """How many tokens each row has, at least 1: (row_count,)."""
    ones = like.new_zeros(len(like)) + 1
    return like.new_zeros(tokens.row_count).index_add(0, tokens.rows, ones).clamp(min=1)
