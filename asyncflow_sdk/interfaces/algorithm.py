"""Algorithm: advantages of rows and the loss of their tokens, for all train engines with log-probs.

    @dataclass(frozen=True)
    class Reinforce(af.Algorithm):                           # a user's own, in a module that workers can import
        baseline: float = 0.5                                # its options are its fields

        def advantages(self, batch):
            return batch.array("reward") - self.baseline

        def loss(self, tokens):
            ratio = (tokens.logprobs - tokens.behaviour).exp()
            return -(ratio * tokens.advantages).sum() / tokens.total_tokens, {}

    af.Train("torch", model=path, algorithm=Reinforce(baseline=0.2))

Registered as an adapter of kind "algorithm", it is selected by name and options: ``algorithm=("reinforce", {...})``.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..types import Batch, Ragged


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Response tokens of some rows of a step, packed row after row, without tokens excluded by ``loss_mask``. Tensors
    of the engine's framework, on its device, float32 (tokens,) unless stated otherwise. Later SDKs may add fields.

    ``logprobs``: under the policy being trained, with gradient. ``behaviour``: under the policy at generation.
    ``advantages``: of each token. ``rows``: int64, the row of each token, from 0 to ``row_count`` - 1; sums over rows
    are ``tensor.new_zeros(row_count).index_add(0, rows, tensor)``. ``columns``, by name: the algorithm's ``needs``
    beside TRAIN_COLUMNS, its ``asks``, and its arrays beside the advantages; a number per row is repeated for each
    token. ``total_tokens``, ``total_rows``, ``total_groups``: trained tokens, rows and groups of the whole step; all
    1 if the step is trained in parts, see ``Algorithm.normaliser``. ``total_groups`` is 0 if the engine does not
    count groups. ``entropy``: of the distribution of each token, ``values``: of the critic being trained, both with
    gradient, and None unless in ``asks``.
    """

    logprobs: Any
    behaviour: Any
    advantages: Any
    rows: Any
    row_count: int
    total_tokens: int
    total_rows: int
    total_groups: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    entropy: Any = None
    values: Any = None


Advantages = npt.NDArray[np.floating[Any]] | Ragged | Mapping[str, npt.NDArray[np.floating[Any]] | Ragged]
"""Floating point: one a row, (rows,), or ragged with one a response token. Or a mapping with
"advantages" and further arrays of either form, passed to the loss as columns."""


NORMALISERS = ("tokens", "rows", "groups", "constant")
"""Values of ``Algorithm.normaliser`` beside None."""


class Algorithm(abc.ABC):
    """Turns rewards into advantages, and log-probs into a loss. Stateless; called from any thread.

    Make it a dataclass of JSON-serializable fields, its options: it is rebuilt from them in the trainer's worker.
    ``needs``: columns read beside TRAIN_COLUMNS, texts by `advantages` alone; the workflow passes them to the
    trainer. ``drop_zero_advantage``: rows with all advantages 0 skip the forward pass and count as filtered.

    ``asks``: quantities computed by the engine. "proximal_logprobs": log-probs under the weights at the start of the
    step, a column. "values": of a critic trained by the engine, a column with the values before the step (also for
    `advantages`) and ``tokens.values``. "entropy": ``tokens.entropy``. "staleness": a column, each token's age in
    versions relative to the version at the start of the step. An engine without one of these
    (``TrainEngine.computes``) is refused.

    ``standardise``: scale advantages over the tokens of a whole step to mean 0 and spread 1, with this number added
    to the spread; None: no scaling. An engine of several ranks calls `advantages_of_share` for each rank's rows and
    scales itself. ``normaliser``: a step can be trained in parts, of whole groups: the advantages of a part equal
    theirs in the whole step, and the loss is a sum over tokens divided once, by ``total_tokens`` ("tokens"),
    ``total_rows`` ("rows"), ``total_groups`` ("groups") or nothing of the step ("constant"). The engine then passes
    totals of 1, adds up the parts, and divides by the number of the whole step at its end. None: the engine needs
    whole steps. ``metric_normalisers``: the same by name of metric; default of a metric: "tokens".
    """

    needs: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    drop_zero_advantage: bool = False
    standardise: float | None = None
    normaliser: str | None = None
    metric_normalisers: Mapping[str, str] = MappingProxyType({})

    @property
    def whole_step(self) -> str:
        """The reason why a step cannot be trained in parts, in plain words; "" if it can. Raises ConfigError for an
        unknown normaliser."""
        name = type(self).__name__
        for each in (self.normaliser, *self.metric_normalisers.values()):
            if each is not None and each not in NORMALISERS:
                raise ConfigError(f"{name}: normaliser {each!r} is none of {', '.join(NORMALISERS)}")
        if self.standardise is not None:
            return f"{name} scales advantages by their mean and spread over the whole step (standardise)"
        if self.normaliser is None:
            return f"{name} declares no normaliser, by which the losses of a step's parts could be divided at its end"
        return ""

    def check(self, *, group_size: int) -> None:
        """Raise ConfigError, before anything starts, for a run it cannot train. Optional."""

    @abc.abstractmethod
    def advantages(self, batch: Batch) -> Advantages:
        """Return the advantages of a whole step, with all rows of each group (``batch.groups``). See ``Advantages``
        for the forms. A number not finite makes the step fail."""

    def advantages_of_share(self, batch: Batch) -> Advantages:
        """Return the advantages of some of a step's groups, before the scaling of ``standardise``. Called only if
        that is a number."""
        return self.advantages(batch)

    @abc.abstractmethod
    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        """Return the loss of some of a step's tokens, a scalar with gradient, and metrics by name: numbers, or
        scalars without gradient. Called for each part of a step. Losses, gradients and metrics of the parts are
        summed, so means divide by ``tokens.total_tokens`` or ``total_rows``."""
