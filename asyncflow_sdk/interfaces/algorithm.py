"""Algorithm: advantages of rows and the loss of their tokens, for all train engines that compute
log-probs.

    @dataclass(frozen=True)
    class Reinforce(af.Algorithm):                           # a user's own, in a module that workers can import
        baseline: float = 0.5                                # its options are its fields

        def advantages(self, batch):
            return batch.array("reward") - self.baseline

        def loss(self, tokens):
            ratio = (tokens.logprobs - tokens.behaviour).exp()
            return -(ratio * tokens.advantages).sum() / tokens.total_tokens, {}

    af.Train("torch", model=path, algorithm=Reinforce(baseline=0.2))

Registered as an adapter of kind "algorithm", it is selected by name and options:
``algorithm=("reinforce", {...})``.
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
    """Response tokens of some rows of a step, packed row after row, without tokens excluded by
    ``loss_mask``. Tensors of the engine's framework, on its device, float32 (tokens,) unless stated
    otherwise. Later SDKs may add fields.

    ``logprobs``: under the policy being trained, with gradient. ``behaviour``: under the policy
    that generated the tokens. ``advantages``: of each token. ``rows``: int64, the row of each
    token, from 0 to ``row_count`` - 1; sums over rows are
    ``tensor.new_zeros(row_count).index_add(0, rows, tensor)``. ``columns``, by name: the
    algorithm's ``needs`` beside TRAIN_COLUMNS, its ``asks``, and its arrays beside the advantages;
    a number per row is repeated for each token. ``total_tokens``, ``total_rows``: of the whole
    step.

    ``entropy``: of the distribution of each token, with gradient. ``values``: of the critic being
    trained, with gradient. Both None unless in ``asks``.
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
"""Floating point: one a row, (rows,), or ragged with one a response token. Or a mapping with
"advantages" and further arrays of either form, passed to the loss as columns."""


class Algorithm(abc.ABC):
    """Turns rewards into advantages, and log-probs into a loss. Stateless; called from any thread.

    Make it a dataclass of JSON-serializable fields, its options: it is rebuilt from them in the
    trainer's worker. ``needs``: columns read beside TRAIN_COLUMNS; the workflow passes them to the
    trainer. ``drop_zero_advantage``: rows with all advantages 0 skip the forward pass and count as
    filtered.

    ``asks``: quantities computed by the engine. "proximal_logprobs": log-probs under the weights at
    the start of the step, a column. "values": of a critic trained by the engine, a column with the
    values before the step (also for `advantages`) and ``tokens.values``. "entropy":
    ``tokens.entropy``. "staleness": a column, each token's age in versions relative to the version
    at the start of the step. An engine without one of these (``TrainEngine.computes``) is refused.

    ``standardise``: scale advantages over the tokens of a whole step to mean 0 and spread 1, with
    this number added to the spread; None: no scaling. An engine of several ranks calls
    `advantages_of_share` for each rank's rows and scales itself.
    """

    needs: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    drop_zero_advantage: bool = False
    standardise: float | None = None

    def check(self, *, group_size: int) -> None:
        """Raise ConfigError, before anything starts, for a run it cannot train. Optional."""

    @abc.abstractmethod
    def advantages(self, batch: Batch) -> Advantages:
        """Return the advantages of a whole step, with all rows of each group (``batch.groups``).
        See ``Advantages`` for the forms. Numbers that are not finite make the step fail."""

    def advantages_of_share(self, batch: Batch) -> Advantages:
        """Return the advantages of some of a step's groups, before the scaling of ``standardise``.
        Called only if ``standardise`` is a number."""
        return self.advantages(batch)

    @abc.abstractmethod
    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """Return the loss of some of a step's tokens, a scalar with gradient, and metrics by name:
        numbers, or scalars without gradient.

        Called for each part of a step. Losses, gradients and metrics of the parts are summed, so
        means divide by ``tokens.total_tokens`` or ``total_rows``.
        """
