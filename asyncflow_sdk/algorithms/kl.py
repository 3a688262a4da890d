"""KL: a penalty on the divergence from a reference policy, in the reward or in the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.validation import UserConfig, check_fields, check_least
from .terms import LOG_RATIO_BOUND, clamp_log_ratio

Estimator = Literal["k1", "k2", "k3"]

ESTIMATORS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: -d,
    "k2": lambda d, exp: d * d / 2,
    "k3": lambda d, exp: exp(d) - 1 - d,
}
"""Estimators of KL(π ‖ ref) from one token sampled from π; d = log ref - log π (Schulman,
"Approximating KL divergence"; k3: arXiv 2402.03300, eq. 4). The second argument is the exponential
function for d's array type."""


@dataclass(frozen=True, kw_only=True)
class KL(UserConfig):
    """A penalty of ``coef`` times the estimated KL to a reference. ``column``: the reference's
    log-probs, from a stage ``af.Stage(af.Logprobs("torch", model=path), gives=["ref_logprobs"])``.

    ``where``: "loss": add it to the loss, with its gradient; "reward": subtract it from the reward,
    of each token with a critic, of each row without (arXiv 2203.02155, eq. 2). ``estimator``: k1,
    k2 or k3. In the reward, k1 is usual and unbiased. In the loss, k2 has the gradient of the KL
    itself for on-policy tokens, k3 has another gradient and is never negative, and k1 has gradient
    0 in expectation.
    """

    coef: float = 0.001
    estimator: Estimator = "k3"
    where: Literal["loss", "reward"] = "loss"
    column: str = "ref_logprobs"

    def __post_init__(self) -> None:
        check_fields(self)
        check_least(0, coef=self.coef)
        if self.estimator not in ESTIMATORS:
            raise ConfigError(f"kl: estimator must be k1, k2 or k3, not {self.estimator!r}")
        if self.where not in ("loss", "reward"):
            raise ConfigError(f'kl: where must be "loss" or "reward", not {self.where!r}')

    def estimate_tensors(self, logprobs: Any, reference: Any) -> Any:
        """Return the estimate of each token, with gradient through ``logprobs``."""
        return ESTIMATORS[self.estimator](clamp_log_ratio(reference - logprobs), lambda d: d.exp())

    def estimate_arrays(
        self, logprobs: npt.NDArray[np.floating[Any]], reference: npt.NDArray[np.floating[Any]]
    ) -> npt.NDArray[np.float64]:
        """Return the estimate of each token for numpy arrays, in float64."""
        apart = np.asarray(reference, np.float64) - logprobs
        return np.asarray(ESTIMATORS[self.estimator](np.clip(apart, -LOG_RATIO_BOUND, LOG_RATIO_BOUND), np.exp))
