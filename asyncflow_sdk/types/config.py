"""What users choose: staleness, sampling, the algorithm. Frozen and keyword-only; checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How far rollouts may lag behind training. ``wait``: no trained token is ever older than
    ``max_staleness`` versions (0 is synchronous)."""

    max_staleness: int = 1
    policy: Literal["wait"] = "wait"

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 or more, not {self.max_staleness}")
        if self.policy != "wait":
            raise ConfigError(f"unknown staleness policy {self.policy!r}; known: 'wait'")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. ``max_tokens``: of a response. ``seed``: None draws differently each run."""

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be 1 or more, not {self.max_tokens}")
        if self.temperature < 0:
            raise ConfigError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (off) or more, not {self.top_k}")


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3) with the clip-higher range and the
    token-mean loss of DAPO (arXiv 2503.14476, eq. 8), no KL term.

    Advantage of a row: (reward - mean of its group) / (standard deviation of its group + ``epsilon``);
    ``normalize_std=False`` leaves the division out. Rows whose advantage is zero carry no gradient and are
    dropped before the forward pass (``drop_zero_advantage``), counted as filtered.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_std: bool = True
    epsilon: float = 1e-4
    drop_zero_advantage: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ConfigError(f"clip range [1 - {self.clip_low}, 1 + {self.clip_high}] is empty or negative")
