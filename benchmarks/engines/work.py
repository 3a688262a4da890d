"""What is asked of an engine in each round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

VOCABULARY = 4096


@dataclass(frozen=True, kw_only=True)
class Work:
    """``prompts`` at once, ``n`` responses to each, all of ``max_tokens``."""

    prompts: int
    n: int
    max_tokens: int

    def batch(self, number: int) -> list[npt.NDArray[np.int32]]:
        """No prompt is in two batches."""
        drawn = np.random.default_rng(number).integers(3, VOCABULARY, (self.prompts, 24), dtype=np.int32)
        return list(drawn)
