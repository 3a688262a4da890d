"""Chance: bounds for the probability of a sample under the distribution expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FALSE_ALARM = 1e-9
"""The significance level: the rate at which one question may fail a correct engine."""
_STEEPEST, _HALVINGS = 500.0, 80


def chance(values: npt.ArrayLike, shares: npt.ArrayLike, mean: float, count: int) -> float:
    """Return an upper bound for the probability of a mean at least as far from the expected one, on
    its side.

    ``count`` independent draws of ``values`` with probabilities ``shares``; Chernoff's bound, valid
    for any distribution and count.
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
    """Return the probability of no draw beyond the least likely one drawn, its rank, and the
    probability beyond."""
    likeliest = np.argsort(-shares)
    rank = int(np.flatnonzero(np.isin(likeliest, drawn)).max()) + 1
    beyond = float(shares[likeliest[rank:]].sum())
    return (1.0 - beyond) ** drawn.size, rank, beyond
