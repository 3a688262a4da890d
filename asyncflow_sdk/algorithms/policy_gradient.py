"""PolicyGradient: the base of all algorithms of the SDK, configured by options; under the names of their papers, with
other defaults.

    af.PolicyGradient(ratio="sequence", mean="rows", clip_low=3e-4, clip_high=4e-4)       # equals af.GSPO()
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..interfaces import Advantages, Algorithm, PackedTokens
from ..types import Batch, Ragged, loss_mask
from ..types.spans import FINISH_REASON
from ..types.validation import UserConfig, check_fields, check_least
from .advantages import gae, group_advantages, row_sums, standardise
from .parts import KL, Critic, OffPolicy, Overlong
from .terms import clip, computed, row_mean, sequence_ratio, token_mean, token_ratio, truncate

VALUES, ENTROPY, RETURNS = "values", "entropy", "returns"
METHODS = ("advantages", "advantages_of_share", "loss")
PARTS: dict[str, Any] = {"overlong": Overlong, "critic": Critic, "kl": KL, "off_policy": OffPolicy}


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(UserConfig, Algorithm):
    """The loss is -mean(w · surrogate(ratio, A)) + kl.coef · mean(KL) - entropy · mean(H) +
    critic.coef · mean(value loss).

    ``ratio``: of each "token", or of the whole response, "sequence" (arXiv 2507.18071, eq. 7). ``surrogate``: "clip",
    min(r A, clip(r) A) (arXiv 1707.06347, eq. 7), or "truncate", the clipped ratio as a weight of log π (arXiv
    2506.13585, eq. 4). Both clip to [1 - ``clip_low``, 1 + ``clip_high``]. ``dual_clip``: upper bound of the ratio of
    tokens with A < 0. ``mean``: over the step's "tokens", over "rows" of their token means, or "length": the sum over
    all tokens divided by rows times ``length``.

    Advantage of a row: (reward - mean of its group) / (standard deviation of its group + ``epsilon``), without the
    division if ``normalize_std=False``. With a ``critic``, a token's advantage is its GAE, normalised over the step's
    tokens to mean 0 and spread 1 unless ``normalize_std=False``. ``overlong``: penalty for long responses, or
    advantage 0 for truncated ones. ``drop_zero_advantage``: skip the forward pass of rows with advantage 0 and count
    them as filtered; KL and entropy then leave them out too. ``off_policy``: correction for tokens of older weights;
    see each class. ``entropy``: weight of the entropy bonus.

    A step can be trained in parts unless a critic's advantages are normalised. A subclass with an `advantages` or
    `loss` of its own declares its own ``normaliser``."""

    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clip", "truncate"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    mean: Literal["tokens", "rows", "length"] = "tokens"
    length: int = 1
    normalize_std: bool = True
    epsilon: float = 1e-4
    overlong: Overlong | None = None
    critic: Critic | None = None
    kl: KL | None = None
    off_policy: OffPolicy | None = None
    entropy: float = 0.0
    drop_zero_advantage: bool = True

    def __post_init__(self) -> None:
        for name, part in PARTS.items():  # a decoded AlgorithmSpec has mappings
            if isinstance(given := getattr(self, name), Mapping):
                object.__setattr__(self, name, part(**given))
        check_fields(self)
        nothing = self.clip_low == 1 and self.surrogate == "truncate"
        if not (0 <= self.clip_low < 1 or nothing) or not self.clip_high >= 0:
            raise ConfigError(f"clip range [1 - {self.clip_low}, 1 + {self.clip_high}] is empty or negative")
        if self.dual_clip is not None and not self.dual_clip > 1 + self.clip_high:
            raise ConfigError(f"dual_clip={self.dual_clip} must be above 1 + clip_high = {1 + self.clip_high}")
        check_least(0, epsilon=self.epsilon, entropy=self.entropy)
        check_least(1, length=self.length)
        masks = self.overlong is not None and self.overlong.mask_truncated
        own_asks = getattr(self.off_policy, "asks", "")
        asked = (self.off_policy, own_asks), (self.critic, VALUES), (self.entropy, ENTROPY)
        needed = (self.kl, getattr(self.kl, "column", "")), (masks, FINISH_REASON)
        object.__setattr__(self, "asks", tuple(name for part, name in asked if part))
        object.__setattr__(self, "needs", tuple(name for part, name in needed if part))
        if masks and (self.critic is not None or not self.drop_zero_advantage):
            raise ConfigError(
                "mask_truncated leaves rows out by an advantage of 0: say drop_zero_advantage=True, and no critic"
            )
        own = {name for name in METHODS if getattr(type(self), name) is not getattr(PolicyGradient, name)}
        scaled = self.critic and self.normalize_std and "advantages" not in own  # a subclass scales its own
        object.__setattr__(self, "standardise", self.epsilon if scaled else None)
        if not own and self.normaliser is None:
            object.__setattr__(self, "normaliser", "tokens" if self.mean == "tokens" else "rows")

    def check(self, *, group_size: int) -> None:
        if group_size == 1 and self.critic is None:
            raise ConfigError(
                "group_size is 1: advantages relative to the group are then always 0 and nothing is"
                " learned; use groups of 2 or more"
            )

    # ---- advantages

    def advantages(self, batch: Batch) -> Advantages:
        found: Any = self.advantages_of_share(batch)
        if self.critic is None:
            return found  # type: ignore[no-any-return]
        each, offsets = {name: column.values for name, column in found.items()}, batch.ragged(VALUES).offsets
        if self.normalize_std:
            drawn = _drawn(batch, offsets[-1])
            each["advantages"] = _spread(standardise(each["advantages"][drawn], epsilon=self.epsilon), drawn)
        return {name: Ragged(column.astype(np.float32), offsets) for name, column in each.items()}

    def advantages_of_share(self, batch: Batch) -> Advantages:
        rewards = np.asarray(batch.array("reward"), np.float64)
        if self.overlong is not None:
            rewards = rewards + self.overlong.penalties(batch.ragged("response_ids").lengths)
        penalty = self._penalty(batch)
        if self.critic is not None:
            return self._estimated(batch, self.critic, rewards, penalty)
        if penalty is not None:
            rewards = rewards - row_sums(penalty, batch.ragged("logprobs"))
        found = group_advantages(rewards, batch.groups, epsilon=self.epsilon if self.normalize_std else None)
        if FINISH_REASON in self.needs:
            found[np.array(batch.texts(FINISH_REASON)) == "length"] = 0
        return found

    def _penalty(self, batch: Batch) -> npt.NDArray[np.float64] | None:
        """Return the KL penalty of each response token; None if there is none in the reward."""
        if self.kl is None or self.kl.where != "reward":
            return None
        penalty = self.kl.coef * self.kl.estimate_arrays(
            batch.ragged("logprobs").values, batch.ragged(self.kl.column).values
        )
        return np.where(_drawn(batch, len(penalty)), penalty, 0.0)

    def _estimated(
        self, batch: Batch, critic: Critic, rewards: npt.NDArray[np.float64], penalty: npt.NDArray[np.float64] | None
    ) -> dict[str, Ragged]:
        """Return GAE and returns of the policy's own tokens; masked ones are skipped and get 0."""
        values = batch.ragged(VALUES)
        drawn = _drawn(batch, len(values.values))
        lengths = row_sums(drawn.astype(np.float64), values).astype(np.int64)
        each = np.zeros(int(lengths.sum())) if penalty is None else -penalty[drawn]
        each[np.cumsum(lengths)[lengths > 0] - 1] += rewards[lengths > 0]
        expected = values.values[drawn].astype(np.float64)
        found = gae(each, expected, lengths, discount=critic.discount, decay=critic.decay)
        return {
            name: Ragged(_spread(column, drawn), values.offsets)
            for name, column in (("advantages", found), (RETURNS, found + expected))
        }

    # ---- the loss

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """Return the loss (see the class) and metrics, means over tokens: ``clip_fraction``, share of tokens cut by
        the clip; ``logprob_drift``, |logprobs - behaviour|; and, if configured, ``kl``, ``off_policy_weight``,
        ``off_policy_cut`` (share of tokens with a changed weight), ``value_loss``."""
        older, mean = tokens.behaviour, self._mean
        if self.off_policy is not None:
            older = self.off_policy.proximal_logprobs(tokens)
        ratio = (token_ratio if self.ratio == "token" else sequence_ratio)(tokens.logprobs - older, tokens)
        if self.surrogate == "clip":
            gain, cut = clip(ratio, tokens.advantages, low=self.clip_low, high=self.clip_high, dual=self.dual_clip)
        else:
            gain, cut = truncate(ratio, tokens.advantages, tokens.logprobs, low=self.clip_low, high=self.clip_high)
        metrics = {
            "clip_fraction": token_mean(cut, tokens),
            "logprob_drift": token_mean((tokens.logprobs - tokens.behaviour).detach().abs(), tokens),
        }
        if self.off_policy is not None:
            weights, outside = self.off_policy.weights(older, tokens.behaviour)
            gain = gain * weights
            metrics["off_policy_weight"] = token_mean(weights, tokens)
            metrics["off_policy_cut"] = token_mean(outside, tokens)
        loss = -mean(gain, tokens)
        if self.kl is not None:
            estimates = self.kl.estimate_tensors(tokens.logprobs, tokens.columns[self.kl.column])
            metrics["kl"] = token_mean(estimates.detach(), tokens)
            if self.kl.where == "loss":
                loss = loss + self.kl.coef * mean(estimates, tokens)
        if self.entropy:
            loss = loss - self.entropy * mean(computed(tokens.entropy, ENTROPY), tokens)
        if self.critic is not None:
            values, before = computed(tokens.values, VALUES), tokens.columns[VALUES]
            losses = self.critic.losses(values, before, tokens.columns[RETURNS])
            metrics["value_loss"] = token_mean(losses.detach(), tokens)
            loss = loss + self.critic.coef * mean(losses, tokens)
        return loss, metrics

    def _mean(self, values: Any, tokens: PackedTokens) -> Any:
        if self.mean == "tokens":
            return token_mean(values, tokens)
        if self.mean == "rows":
            return row_mean(values, tokens)
        return values.sum() / (max(tokens.total_rows, 1) * self.length)


def _drawn(batch: Batch, tokens: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the policy's own tokens: all, unless the batch has a loss mask."""
    mask = loss_mask(batch)
    return np.ones(tokens, np.bool_) if mask is None else mask.values.astype(np.bool_)


def _spread(values: npt.NDArray[np.float64], where: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    column = np.zeros(len(where))
    column[where] = values
    return column


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group-relative policy optimisation (arXiv 2402.03300, eq. 3) with the clip-higher range and the token-mean loss
    of DAPO (arXiv 2503.14476, eq. 8). As in the GRPO paper: ``mean="rows", clip_high=0.2, kl=af.KL(coef=0.04)``."""


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """GRPO without its biases (arXiv 2503.20783, section 3.2): advantages are not divided by the
    group's spread, and losses are divided by the constant ``length`` (for example the token limit
    of a response), not by the response's length. Rows with advantage 0 count too."""

    clip_high: float = 0.2
    mean: Literal["tokens", "rows", "length"] = "length"
    normalize_std: bool = False
    drop_zero_advantage: bool = False


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """Clip-higher and the mean over tokens (arXiv 2503.14476, eq. 8). ``overlong=af.Overlong(...)``
    adds its soft punishment (eq. 13). Groups with equal rewards (eq. 11) are dropped before the
    forward pass; a stage ``af.dynamic_sampling`` replaces them by others."""


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """Group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7): one ratio a response, clipped as a
    whole in the range of section 5.1. Stale rows then need proximal log-probs: ``off_policy=af.OffPolicy()``."""

    ratio: Literal["token", "sequence"] = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    mean: Literal["tokens", "rows", "length"] = "rows"


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """Clipped importance-sampling weights (arXiv 2506.13585, eq. 4 and 5): every token keeps its
    gradient. As in the paper, no lower bound. Its upper bound is not given; 5 is our choice."""

    surrogate: Literal["clip", "truncate"] = "truncate"
    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """Proximal policy optimisation (arXiv 1707.06347, eq. 7 and 9) with a critic in the trainer and
    GAE (arXiv 1506.02438, eq. 16). Allows groups of one row."""

    clip_high: float = 0.2
    critic: Critic | None = field(default_factory=Critic)
    drop_zero_advantage: bool = False
