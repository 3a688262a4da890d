"""OffPolicy: what is done about tokens that other weights, or another engine, drew than those that are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, EngineError
from ..interfaces import PackedTokens
from ..types.typed import Configuration, check_fields
from .terms import bounded


@dataclass(frozen=True, kw_only=True)
class OffPolicy(Configuration):
    """Decoupled: the ratio that is clipped is to the proximal policy, the weights that the step began with, and how far
    that one is from the policy that drew a token is a weight of the token, w_t = π_proximal / π_behaviour, without gradient
    (arXiv 2110.00641, section 3; arXiv 2505.24298, eq. 5).

    ``weight``: "plain", w_t as it is, decoupled PPO. "truncate": min(w_t, ``high``), truncated importance sampling (arXiv
    1802.01561, eq. 1; between engines: arXiv 2505.24034). "mask": w_t from ``low`` to ``high``, and 0 outside, IcePop (arXiv
    2510.18855). Tokens that weigh 0 count in the mean. ``proximal``: "computed" by the engine, or "interpolated" between
    the policy that drew a token and the one being trained by how many versions lie between them, which costs no forward pass (arXiv 2512.06547).
    """

    weight: Literal["plain", "truncate", "mask"] = "truncate"
    low: float = 0.5
    high: float = 2.0
    proximal: Literal["computed", "interpolated"] = "computed"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weight not in ("plain", "truncate", "mask"):
            raise ConfigError(f'off_policy: weight is "plain", "truncate" or "mask", not {self.weight!r}')
        if self.proximal not in ("computed", "interpolated"):
            raise ConfigError(f'off_policy: proximal is "computed" or "interpolated", not {self.proximal!r}')
        if not 0 <= self.low < self.high:
            raise ConfigError(f"off_policy: no weight is from low={self.low} to high={self.high}")

    @property
    def asks(self) -> str:
        """What it asks the engine for."""
        return "proximal_logprobs" if self.proximal == "computed" else "staleness"

    def proximal_logprobs(self, tokens: PackedTokens) -> Any:
        """Under the policy that the ratio is to; without gradient. Interpolated: log π_behaviour + d / (d + 1) · (log π - log π_behaviour)
        of a token that was drawn d versions before the one that the step begins with."""
        if self.asks not in tokens.columns:
            raise EngineError(f"the algorithm asks its engine for {self.asks!r}, and was given none")
        given = tokens.columns[self.asks]
        if self.proximal == "computed":
            return given
        return tokens.behaviour + given / (given + 1) * bounded(tokens.logprobs.detach() - tokens.behaviour)

    def weights(self, proximal: Any, behaviour: Any) -> tuple[Any, Any]:
        """Of each token, from its log-probs under both policies; and whether it is another than w_t."""
        weight = bounded(proximal - behaviour).exp()
        if self.weight == "truncate":
            return weight.clamp(max=self.high), weight > self.high
        outside = (weight < self.low) | (weight > self.high)
        if self.weight == "mask":
            return weight * ~outside, outside
        return weight, weight < 0
