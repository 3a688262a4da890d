"""Parts of DAPO: the treatment of long responses, and the filter for groups of equal rewards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.validation import UserConfig, check_fields
from .advantages import group_advantages


@dataclass(frozen=True, kw_only=True)
class Overlong(UserConfig):
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13): adds 0 to the reward up to
    ``max_tokens`` - ``buffer`` tokens, -1 beyond ``max_tokens``, linear between; nothing without both.
    ``mask_truncated``: leave responses that end for ``length`` out of the loss, after the advantages of
    their groups."""

    max_tokens: int = 0
    buffer: int = 0
    mask_truncated: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        alone = self.mask_truncated and self.max_tokens == self.buffer == 0
        if not alone and not 0 < self.buffer <= self.max_tokens:
            raise ConfigError(
                f"overlong: buffer={self.buffer} must be from 1 to max_tokens={self.max_tokens}: the penalty"
                " begins buffer tokens before the limit"
            )

    def penalties(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the penalties for response lengths, each from -1 to 0."""
        if not self.buffer:
            return np.zeros(len(lengths))
        return np.clip((self.max_tokens - self.buffer - lengths) / self.buffer, -1.0, 0.0)


def dynamic_sampling(score: npt.ArrayLike, groups: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
    """Stage function: copy the score to the reward and filter groups with equal scores. Other
    prompts replace them, and every step is full of groups with a gradient (arXiv 2503.14476, eq.
    11).

        stages=[af.Stage(mine, task="score"), af.Stage(af.dynamic_sampling, gives=["reward"])]
    """
    reward = np.asarray(score, np.float32)
    return {"reward": reward, "filtered": ~np.isin(groups, groups[group_advantages(reward, groups) != 0])}
