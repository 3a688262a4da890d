"""Algorithm: what rows are worth, and the loss of their tokens. One for all train engines that compute log-probs.

    @dataclass(frozen=True)
    class Reinforce(af.Algorithm):                           # a user's own, in a module that workers can import
        baseline: float = 0.5                                # its options are its fields

        def advantages(self, batch):
            return batch.array("reward") - self.baseline

        def loss(self, tokens):
            ratio = (tokens.logprobs - tokens.behaviour).exp()
            return -(ratio * tokens.advantages).sum() / tokens.total_tokens, {}

    af.Train("torch", model=path, algorithm=Reinforce(baseline=0.2))

It is registered as an adapter of kind "algorithm", and then chosen by its name and options: ``algorithm=("reinforce", {...})``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch, Ragged


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Response tokens of some rows of a step, packed row after row; those that ``loss_mask`` leaves out are not among them.
    Tensors of the engine's framework, on its device, float32 (tokens,) where nothing else is said. Later SDKs may add fields.

    ``logprobs``: of the policy being trained, with gradient. ``behaviour``: of the policy that drew them.
    ``advantages``: of each token. ``rows``: int64, the row of each token, from 0 to ``row_count`` - 1: sums over rows are
    ``tensor.new_zeros(row_count).index_add(0, rows, tensor)``. ``columns``: what the algorithm ``needs`` beside
    TRAIN_COLUMNS, what it ``asks`` its engine for, and what it gave beside its advantages, by name; of one number a row, that number
    for each token. ``total_tokens``, ``total_rows``: of the whole step, of which these are a part.

    ``entropy``: of the distribution each token was drawn from, with gradient; ``values``: of the critic being trained, with
    gradient. None where the algorithm did not ask for them.
    """

    logprobs: Any
    behaviour: Any
    advantages: Any
    rows: Any
    row_count: int
    total_tokens: int
    total_rows: int
    columns: Mapping[str, Any] = field(default_factory=dict)
    entropy: Any = None
    values: Any = None


Advantages = npt.NDArray[np.floating[Any]] | Ragged | Mapping[str, npt.NDArray[np.floating[Any]] | Ragged]
"""One a row, floating point (rows,), or ragged, one for each response token; or by name, "advantages" and others of either form,
which the loss gets as columns."""


class Algorithm(abc.ABC):
    """Turns rewards into advantages, and log-probs into a loss. Keeps nothing from step to step; any thread may call it.

    A dataclass, so that it travels to the trainer's worker: fields that JSON can hold, which are its options. ``needs``: columns
    that it reads beside TRAIN_COLUMNS; a workflow has them given to its trainer. ``drop_zero_advantage``: rows whose
    advantages are all 0 are left out of the forward pass, and counted as filtered.

    ``asks``: what its engine is to compute. "proximal_logprobs": log-probs under the weights that the step begins with, a column;
    "values": of a critic that the engine trains beside the policy, a column as they are before the step, which `advantages` may read
    too, and ``tokens.values``; "entropy": ``tokens.entropy``; "staleness": a column, how many versions older than the one that the
    step begins with each token's is. An engine that cannot (``TrainEngine.computes``) is refused.

    ``standardise``: advantages are of mean 0 and spread 1 over the tokens of a whole step, this number added to the spread; None: as they
    are. An engine of several ranks, each with its rows, takes `advantages_of_share`, and does that itself.
    """

    needs: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    drop_zero_advantage: bool = False
    standardise: float | None = None

    def check(self, *, group_size: int) -> None:
        """Raises ConfigError, before anything starts, for a run that it cannot train. Optional."""

    @abc.abstractmethod
    def advantages(self, batch: Batch) -> Advantages:
        """Of a whole step, with all rows of each group (``batch.groups``): one a row, floating point (rows,), or ragged, one
        for each response token; or a mapping with these as "advantages", and further numbers of rows or tokens, which `loss` gets
        as columns. Finite, else the step is refused."""

    def advantages_of_share(self, batch: Batch) -> Advantages:
        """The same of some of a step's groups, while others are elsewhere: before what ``standardise`` says. Only for algorithms that
        say a number there."""
        return self.advantages(batch)

    @abc.abstractmethod
    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """The loss of some of a step's tokens, a scalar with gradient, and metrics by name: numbers or scalars without.

        Called for each part of a step; losses, gradients and metrics of the parts are added up, so means are over
        ``tokens.total_tokens`` or ``total_rows``.
        """
