"""Algorithms as a user writes them, in a module that workers can import."""

from dataclasses import dataclass, field

import numpy as np

import asyncflow_sdk as af


@dataclass(frozen=True)
class Reinforce(af.Algorithm):
    """One number a row, no clip; a penalty by a column of the reference's log-probs."""

    baseline: float = 0.5
    beta: float = 0.1
    needs = ("ref_logprobs",)

    def check(self, *, group_size):
        if group_size > 100:
            raise af.ConfigError("groups of more than 100 are too much for Reinforce")

    def advantages(self, batch):
        return batch.array("reward") - self.baseline

    def loss(self, tokens):
        ratio = (tokens.logprobs - tokens.behaviour).exp()
        penalty = (tokens.logprobs - tokens.columns["ref_logprobs"]).square().sum() / tokens.total_tokens
        loss = -(ratio * tokens.advantages).sum() / tokens.total_tokens + self.beta * penalty
        return loss, {"penalty": penalty.detach(), "rows": tokens.row_count}


@dataclass(frozen=True)
class Sequences(af.Algorithm):
    """Advantages of tokens, a mean over rows, and ratios of whole rows; rows without an advantage are left out."""

    discount: float = 0.9
    drop_zero_advantage: bool = True

    def advantages(self, batch):
        lengths = batch.ragged("response_ids").lengths
        back = np.concatenate([np.arange(n)[::-1] for n in lengths])
        return af.Ragged.from_lengths(np.repeat(batch.array("reward"), lengths) * self.discount**back, lengths)

    def loss(self, tokens):
        zeros = tokens.logprobs.new_zeros(tokens.row_count)
        count = zeros.index_add(0, tokens.rows, tokens.logprobs * 0 + 1)
        ratio = (zeros.index_add(0, tokens.rows, tokens.logprobs - tokens.behaviour) / count).exp()
        gain = zeros.index_add(0, tokens.rows, tokens.advantages) / count
        return -(ratio * gain).sum() / tokens.total_rows, {"share": tokens.row_count / tokens.total_rows}


class Bad(Sequences):
    """Gives what is no advantage: ``discount`` says which."""

    def advantages(self, batch):
        rows = batch.rows
        return {0: np.zeros(rows + 1), 1: np.full(rows, np.nan), 2: af.Ragged.of([[1.0]] * rows)}[int(self.discount)]


class NoDataclass(af.Algorithm):
    def advantages(self, batch):
        return batch.array("reward")

    def loss(self, tokens):
        return tokens.logprobs.sum(), {}


@dataclass(frozen=True)
class Noting(af.Algorithm):
    """Asks for everything an engine computes, gives a column beside its advantages, and notes what its loss was given."""

    given: list = field(default_factory=list, compare=False)
    asks = ("proximal_logprobs", "entropy", "values")

    def advantages(self, batch):
        return {
            "advantages": batch.array("reward"),
            "twice": af.Ragged(2 * batch.ragged("values").values, batch.ragged("values").offsets),
        }

    def loss(self, tokens):
        self.given.append(tokens)
        each = tokens.logprobs * tokens.advantages + 0.1 * tokens.entropy + (tokens.values - 1).square()
        return each.sum() / tokens.total_tokens, {}


@dataclass(frozen=True)
class InfiniteAt(Reinforce):
    """Its gradient is infinite at these calls of its loss, counted from 1. ``infinite`` may be added to."""

    calls: tuple = ()
    needs = ()
    infinite: set = field(default_factory=set, compare=False)
    made: list = field(default_factory=list, compare=False)

    def loss(self, tokens):
        self.made.append(len(self.made) + 1)
        ratio = (tokens.logprobs - tokens.behaviour).exp()
        loss = -(ratio * tokens.advantages).sum() / tokens.total_tokens
        return loss * (float("inf") if self.made[-1] in {*self.calls, *self.infinite} else 1.0), {}


@dataclass(frozen=True, kw_only=True)
class InfiniteValues(af.PPO):
    """Its critic's gradient is infinite, its policy's is not."""

    def loss(self, tokens):
        loss, metrics = super().loss(tokens)
        return loss + (tokens.values - tokens.values.detach()).sum() * float("inf"), metrics
