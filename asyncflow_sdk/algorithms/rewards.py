"""Rewards before they become advantages: what DAPO does about long responses, and about groups that teach nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.typed import Configuration, check_fields


@dataclass(frozen=True, kw_only=True)
class Overlong(Configuration):
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13): added to the reward are 0 up to ``max_tokens`` - ``buffer``
    tokens, -1 beyond ``max_tokens``, and between them what lies on the line."""

    max_tokens: int
    buffer: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"overlong: buffer={self.buffer} is from 1 to max_tokens={self.max_tokens}: so many tokens before the limit it begins"
            )

    def penalties(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Of responses of these lengths, from 0 down to -1."""
        return np.clip((self.max_tokens - self.buffer - lengths) / self.buffer, -1.0, 0.0)


def dynamic_sampling(score: npt.ArrayLike, groups: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    """A stage's work: the score as the reward, and groups filtered whose scores are all alike, so that other prompts take their
    place and every step is full of groups that teach (arXiv 2503.14476, eq. 11).

        stages=[af.Stage(mine, task="score"), af.Stage(af.dynamic_sampling, gives=["reward"])]
    """
    reward = np.asarray(score, np.float32)
    _, group = np.unique(groups, return_inverse=True)
    lowest, highest = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
    np.minimum.at(lowest, group, reward)
    np.maximum.at(highest, group, reward)
    return {"reward": reward, "filtered": (lowest == highest)[group]}
