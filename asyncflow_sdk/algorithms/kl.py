"""KL: how far the policy may go from a reference, as part of the reward or of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types.typed import Configuration, check_fields
from .terms import LOG_RATIO_BOUND, bounded

Estimator = Literal["k1", "k2", "k3"]

ESTIMATORS: dict[str, Callable[[Any, Any], Any]] = {
    "k1": lambda d, exp: -d,
    "k2": lambda d, exp: d * d / 2,
    "k3": lambda d, exp: exp(d) - 1 - d,
}
"""Of KL(π ‖ ref) by one token that π drew, with d = log ref - log π (Schulman, "Approximating KL divergence"; k3 is arXiv
2402.03300, eq. 4), and the exponential function of what d is."""


@dataclass(frozen=True, kw_only=True)
class KL(Configuration):
    """A penalty of ``coef`` times the estimated KL to a reference, whose log-probs are column ``column``: those of a stage
    ``af.Stage(af.Logprobs("torch", model=path), gives=["ref_logprobs"])``.

    ``where``: "loss", with its gradient, or "reward": taken off the reward of each token by a critic, of each row else (arXiv
    2203.02155, eq. 2). ``estimator``: k1, k2 or k3. In the reward k1 is the usual and unbiased one. In the loss k2 has the gradient
    of the KL itself where tokens are on policy, k3 another that is never negative in value, and k1 none in expectation.
    """

    coef: float = 0.001
    estimator: Estimator = "k3"
    where: Literal["loss", "reward"] = "loss"
    column: str = "ref_logprobs"

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.coef >= 0:
            raise ConfigError(f"kl: coef is a number from 0, not {self.coef}")
        if self.estimator not in ESTIMATORS:
            raise ConfigError(f"kl: estimator is k1, k2 or k3, not {self.estimator!r}")
        if self.where not in ("loss", "reward"):
            raise ConfigError(f'kl: where is "loss" or "reward", not {self.where!r}')

    def of_tensors(self, logprobs: Any, reference: Any) -> Any:
        """The estimate at each token, with the gradient of ``logprobs``."""
        return ESTIMATORS[self.estimator](bounded(reference - logprobs), lambda d: d.exp())

    def of_arrays(
        self, logprobs: npt.NDArray[np.floating[Any]], reference: npt.NDArray[np.floating[Any]]
    ) -> npt.NDArray[np.float64]:
        """The same, of numpy arrays in float64."""
        apart = np.asarray(reference, np.float64) - logprobs
        return np.asarray(ESTIMATORS[self.estimator](np.clip(apart, -LOG_RATIO_BOUND, LOG_RATIO_BOUND), np.exp))
