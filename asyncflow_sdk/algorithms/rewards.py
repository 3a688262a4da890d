"""Reward shaping of DAPO: penalties for long responses, and the filter for groups of equal rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.validation import UserConfig, check_fields


@dataclass(frozen=True, kw_only=True)
class Overlong(UserConfig):
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13): adds 0 to the reward up to
    ``max_tokens`` - ``buffer`` tokens, -1 beyond ``max_tokens``, linear between."""

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"overlong: buffer={self.buffer} must be from 1 to max_tokens={self.max_tokens}: the penalty"
                " begins buffer tokens before the limit"
            )

    def penalties(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the penalties for response lengths, each from -1 to 0."""
        return np.clip((self.max_tokens - self.buffer - lengths) / self.buffer, -1.0, 0.0)


def dynamic_sampling(score: npt.ArrayLike, groups: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    """Stage function: copy the score to the reward and filter groups with equal scores. Other
    prompts replace them, and every step is full of groups with a gradient (arXiv 2503.14476, eq.
    11).

        stages=[af.Stage(mine, task="score"), af.Stage(af.dynamic_sampling, gives=["reward"])]
    """
    reward = np.asarray(score, np.float32)
    _, group = np.unique(groups, return_inverse=True)
    lowest, highest = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(lowest, group, reward)
    np.maximum.at(highest, group, reward)
    return {"reward": reward, "filtered": (lowest == highest)[group]}
