"""Parts of PolicyGradient, each an option of it: KL, OffPolicy, Critic and Overlong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..interfaces import PackedTokens
from ..types.validation import UserConfig, check_above, check_fields, check_least
from .terms import LOG_RATIO_BOUND, clamp_log_ratio, computed

ESTIMATORS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: -d,
    "k2": lambda d, exp: d * d / 2,
    "k3": lambda d, exp: exp(d) - 1 - d,
}
"""Estimators of KL(π ‖ ref) from one token sampled from π; d = log ref - log π (Schulman, "Approximating KL
divergence"; k3: arXiv 2402.03300, eq. 4). The second argument is the exponential function for d's array type."""


@dataclass(frozen=True, kw_only=True)
class KL(UserConfig):
    """A penalty of ``coef`` times the estimated KL to a reference. ``column``: the reference's
    log-probs, from a stage ``af.Stage(af.Logprobs("torch", model=path), gives=["ref_logprobs"])``.

    ``where``: "loss": add it to the loss, with its gradient; "reward": subtract it from the reward, of each token
    with a critic, of each row without (arXiv 2203.02155, eq. 2). ``estimator``: k1, k2 or k3. In the reward, k1 is
    usual and unbiased. In the loss, k2 has the gradient of the KL itself for on-policy tokens, k3 has another
    gradient and is never negative, and k1 has gradient 0 in expectation."""

    coef: float = 0.001
    estimator: Literal["k1", "k2", "k3"] = "k3"
    where: Literal["loss", "reward"] = "loss"
    column: str = "ref_logprobs"

    def __post_init__(self) -> None:
        check_fields(self)
        check_least(0, coef=self.coef)

    def estimate_tensors(self, logprobs: Any, reference: Any) -> Any:
        """Return the estimate of each token, with gradient through ``logprobs``."""
        return ESTIMATORS[self.estimator](clamp_log_ratio(reference - logprobs), lambda d: d.exp())

    def estimate_arrays(
        self, logprobs: npt.NDArray[np.floating[Any]], reference: npt.NDArray[np.floating[Any]]
    ) -> npt.NDArray[np.float64]:
        """Return the estimate of each token for numpy arrays, in float64."""
        apart = np.asarray(reference, np.float64) - logprobs
        return np.asarray(ESTIMATORS[self.estimator](np.clip(apart, -LOG_RATIO_BOUND, LOG_RATIO_BOUND), np.exp))


@dataclass(frozen=True, kw_only=True)
class OffPolicy(UserConfig):
    """Decoupled policy ratios: the clipped ratio is relative to the proximal policy, the weights at the start of the
    step. Each token is weighted by w_t = π_proximal / π_behaviour, without gradient; π_behaviour generated the token
    (arXiv 2110.00641, section 3; arXiv 2505.24298, eq. 5).

    ``weight``: "plain": w_t, decoupled PPO. "truncate": min(w_t, ``high``), truncated importance sampling (arXiv
    1802.01561, eq. 1; between engines: arXiv 2505.24034). "mask": w_t from ``low`` to ``high``, 0 outside, IcePop
    (arXiv 2510.18855). Tokens of weight 0 count in the mean. ``proximal``: "computed" by the engine, or
    "interpolated" between the behaviour policy and the policy being trained by the versions between them, without a
    forward pass (arXiv 2512.06547)."""

    weight: Literal["plain", "truncate", "mask"] = "truncate"
    low: float = 0.5
    high: float = 2.0
    proximal: Literal["computed", "interpolated"] = "computed"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.low < self.high:
            raise ConfigError(f"off_policy: low={self.low} must be 0 or more and below high={self.high}")

    @property
    def asks(self) -> str:
        """The quantity required of the engine."""
        return "proximal_logprobs" if self.proximal == "computed" else "staleness"

    def proximal_logprobs(self, tokens: PackedTokens) -> Any:
        """Return log-probs under the proximal policy, without gradient. Interpolated: log π_behaviour + d / (d + 1) ·
        (log π - log π_behaviour) for a token generated d versions before the step's first version."""
        given = computed(tokens.columns.get(self.asks), self.asks)
        if self.proximal == "computed":
            return given
        return tokens.behaviour + given / (given + 1) * clamp_log_ratio(tokens.logprobs.detach() - tokens.behaviour)

    def weights(self, proximal: Any, behaviour: Any) -> tuple[Any, Any]:
        """Return each token's weight, from both log-probs, and a mask of weights other than w_t."""
        weight = clamp_log_ratio(proximal - behaviour).exp()
        if self.weight == "truncate":
            return weight.clamp(max=self.high), weight > self.high
        outside = (weight < self.low) | (weight > self.high)
        if self.weight == "mask":
            return weight * ~outside, outside
        return weight, weight < 0


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


@dataclass(frozen=True, kw_only=True)
class Overlong(UserConfig):
    """Soft punishment of long responses (arXiv 2503.14476, eq. 13): adds 0 to the reward up to ``max_tokens`` -
    ``buffer`` tokens, -1 beyond ``max_tokens``, linear between; nothing without both. ``mask_truncated``: leave
    responses that end for ``length`` out of the loss, after the advantages of their groups."""

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
