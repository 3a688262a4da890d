"""Tolerances by the dtype of the weights, for a token, for a response, for a greedy choice; and bounds
for the probability of a sample under the distribution expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ...types import dtype_name
from .policy import Ids, Policy, Tensors

TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 0.15, "bfloat16": 1.5}
"""Of a log-prob (nats), each above the largest error of the engine on transformers against
float32 in 1,500 responses of its small model: 5e-5, 0.10 and 1.0. Only a few tokens of almost no
probability are so far off."""
SHARE, LONG = 4, 8
"""The mean over a response of LONG tokens, and the gap of a greedy token to the likeliest one,
may be a SHARE-th of the tolerance; measured in bfloat16: 0.114 and 0.22."""


def dtype_of(tensors: Tensors) -> str:
    """Return the dtype of most of the weights."""
    sizes: dict[str, int] = {}
    for array in tensors.values():
        sizes[dtype_name(array.dtype)] = sizes.get(dtype_name(array.dtype), 0) + array.size
    return max(sizes, key=lambda name: sizes[name])


def tolerance_of(dtype: str) -> float:
    """Return the tolerance for a dtype (nats). Raises ConfigError for an unknown one."""
    if dtype not in TOLERANCES:
        raise ConfigError(f"how far log-probs of {dtype} weights may be apart is not known: give a tolerance (nats)")
    return TOLERANCES[dtype]


def too_far(apart: npt.NDArray[np.floating], tolerance: float) -> str:
    """Describe the distance of a response's log-probs from the policy's; "" within the tolerance."""
    if not len(apart) or apart.max() <= tolerance:
        mean = float(apart.mean()) if len(apart) >= LONG else 0.0
        return f"on average {mean:.3g}" if not mean <= tolerance / SHARE else ""
    return f"up to {apart.max():.3g}"


def follows(policy: Policy, version: int, prompt: Ids, ids: Ids, tolerance: float) -> bool:
    """Return True if each token is the most likely one after its predecessors, up to rounding."""
    ahead = policy.ahead(version, prompt, ids)
    if ahead is None or not len(ids):
        return False
    below = ahead.max(1) - ahead[np.arange(len(ids)), ids]
    return bool(below.max() <= tolerance / SHARE)


FALSE_ALARM = 1e-9
"""The significance level: the rate at which one question may fail a correct engine."""
_STEEPEST, _HALVINGS = 500.0, 80


def chance(values: npt.ArrayLike, shares: npt.ArrayLike, mean: float, count: int) -> float:
    """Return an upper bound for the probability of a mean at least as far from the expected one, on its side.

    ``count`` independent draws of ``values`` with probabilities ``shares``; Chernoff's bound, valid for any
    distribution and count.
    """
    value, share = np.asarray(values, np.float64), np.asarray(shares, np.float64)
    expected = float(share @ value)
    apart = value - expected
    reach = float(np.abs(apart).max())
    wanted = mean - expected
    if not reach or not wanted:
        return 1.0
    apart, wanted = np.sign(wanted) * apart / reach, abs(wanted) / reach

    def log_bound(steepness: float) -> float:
        """The logarithm of the bound at one tilt."""
        tilted = steepness * apart
        top = float(tilted.max())
        return top + float(np.log(share @ np.exp(tilted - top))) - steepness * wanted

    low, high = 0.0, _STEEPEST  # convex in between
    for _ in range(_HALVINGS):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, other) if log_bound(one) < log_bound(other) else (one, high)
    return float(np.exp(min(count * log_bound(low), 0.0)))


def chance_of_no_more(shares: npt.NDArray[Any], drawn: npt.NDArray[Any]) -> tuple[float, int, float]:
    """Return the probability of no draw beyond the least likely one drawn, its rank, and the probability beyond."""
    likeliest = np.argsort(-shares)
    rank = int(np.flatnonzero(np.isin(likeliest, drawn)).max()) + 1
    beyond = float(shares[likeliest[rank:]].sum())
    return (1.0 - beyond) ** drawn.size, rank, beyond
