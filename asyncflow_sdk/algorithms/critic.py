"""Critic: advantages from a value model, trained with the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..types.validation import UserConfig, check_above, check_fields


@dataclass(frozen=True, kw_only=True)
class Critic(UserConfig):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): ``discount`` γ, ``decay`` λ.
    ``coef``: weight of the value loss. ``clip``: largest change of a value in a step; None: any."""

    discount: float = 1.0
    decay: float = 0.95
    coef: float = 0.5
    clip: float | None = 0.2

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("discount", "decay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"critic: {name} must be from 0 to 1, not {getattr(self, name)}")
        check_above(0, coef=self.coef, clip=self.clip)

    def losses(self, values: Any, before: Any, returns: Any) -> Any:
        """Return the value loss of each token: max((V - R)², (V_before + clip(V - V_before, ±clip)
        - R)²) / 2 (arXiv 1707.06347, eq. 9; clipped as in arXiv 2005.12729, section 3)."""
        squares = (values - returns).square()
        if self.clip is not None:
            near = before + (values - before).clamp(-self.clip, self.clip)
            squares = squares.maximum((near - returns).square())
        return squares / 2
