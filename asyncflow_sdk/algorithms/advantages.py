"""Advantages: the reward of a response or token above its expectation. numpy, float64 internally."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..types import Ragged

Floats = npt.NDArray[np.float64]


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.NDArray[np.int64], *, epsilon: float | None = 1e-4
) -> npt.NDArray[np.float32]:
    """Return the advantage of each row, float32 (rows,), from rewards (rows,) and group numbers (rows,) in any order:
    A_i = (R_i - mean(R)) / (std(R) + epsilon) over the row's group (arXiv 2402.03300, section 4.1.2), in float64.
    ``epsilon`` None: no division. std is the unbiased estimate (n - 1), as ``torch.std``. A group of one row, or of
    equal rewards, has advantage exactly 0."""
    reward = np.asarray(rewards, np.float64)
    _, group, count = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(group, kind="stable")
    starts = np.cumsum(count) - count
    spread = np.maximum.reduceat(reward[order], starts) > np.minimum.reduceat(reward[order], starts)
    centred = reward - (np.bincount(group, reward) / count)[group]
    if epsilon is not None:
        variance = np.bincount(group, centred**2) / np.maximum(count - 1, 1)
        centred /= np.sqrt(variance)[group] + epsilon
    # Rounding in the mean would give equal rewards an advantage of 1e-17, and so a gradient.
    return np.where(spread[group], centred, 0.0).astype(np.float32)


def gae(rewards: Floats, values: Floats, lengths: npt.NDArray[np.int64], *, discount: float, decay: float) -> Floats:
    """Return generalised advantage estimates of tokens packed row after row: (tokens,). A_t = δ_t + γλ A_{t+1}, with
    δ_t = r_t + γ V_{t+1} - V_t (arXiv 1506.02438, eq. 16), and 0 after a row. γ: ``discount``, λ: ``decay``."""
    ends = np.cumsum(lengths)
    ahead = np.append(values[1:], 0.0)
    ahead[ends[lengths > 0] - 1] = 0.0
    found = rewards + discount * ahead - values
    longest_first = np.argsort(-lengths, kind="stable")
    last = ends[longest_first] - 1
    for back in range(1, int(lengths.max(initial=0))):
        at = last[: np.count_nonzero(lengths > back)] - back
        found[at] += discount * decay * found[at + 1]
    return found


@dataclass(frozen=True)
class Moments:
    """Moments of a set of numbers. ``squares``: sum of squared deviations from the mean."""

    count: int
    mean: float
    squares: float

    @classmethod
    def of(cls, values: Floats) -> Moments:
        """Compute the moments of ``values``."""
        if not len(values):
            return cls(0, 0.0, 0.0)
        mean = values.mean()
        return cls(len(values), float(mean), float(np.square(values - mean).sum()))

    @classmethod
    def merge(cls, parts: Sequence[Moments]) -> Moments:
        """Return the moments of the union of several sets."""
        count = sum(part.count for part in parts)
        mean = sum(part.count * part.mean for part in parts) / max(count, 1)
        squares = sum(part.squares + part.count * (part.mean - mean) ** 2 for part in parts)
        return cls(count, mean, squares)


def standardise(values: Floats, *, epsilon: float, moments: Moments | None = None) -> Floats:
    """Return (values - mean) / (standard deviation + ``epsilon``) by ``moments``, default of ``values``."""
    if moments is None:
        moments = Moments.of(values)
    spread = math.sqrt(moments.squares / max(moments.count, 1))
    return np.asarray((values - moments.mean) / (spread + epsilon))


def row_sums(values: Floats, column: Ragged) -> Floats:
    """Sum token values by row of ``column``: (rows,)."""
    rows = np.repeat(np.arange(len(column)), column.lengths)
    return np.bincount(rows, values, len(column)).astype(np.float64)


def dynamic_sampling(score: npt.ArrayLike, groups: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    """Stage function: copy the score to the reward and filter groups with equal scores. Other prompts replace them,
    and every step is full of groups with a gradient (arXiv 2503.14476, eq. 11).

        stages=[af.Stage(mine, task="score"), af.Stage(af.dynamic_sampling, gives=["reward"])]
    """
    reward = np.asarray(score, np.float32)
    return {"reward": reward, "filtered": ~np.isin(groups, groups[group_advantages(reward, groups) != 0])}
