"""TrainEngine: what a training engine implements to train for a run."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch, Ragged
from .weights import WeightUpdate

TRAIN_COLUMNS = ("prompt_ids", "response_ids", "logprobs", "version_spans", "reward")
"""What a train engine reads: prompt_ids, response_ids: ragged int32; logprobs: ragged float32, of the
response under the policy that drew it; version_spans: ragged int64 (3,); reward: fixed floating point. A batch may have the
column loss_mask too (ragged bool, one value a response token): where it is False, a token is read and not trained."""


@dataclass(frozen=True)
class StepResult:
    """What came of a step. ``metrics``: numbers by name. ``filtered``: bool (rows,), True for rows that
    were left out because they carry no gradient; None when all were used."""

    metrics: dict[str, float] = field(default_factory=dict)
    filtered: npt.NDArray[np.bool_] | None = None


class TrainEngine(abc.ABC):
    """Trains the policy on batches of whole groups.

    Made by its plugin's factory as ``factory(model=PATH, algorithm=ALGORITHM, **options)`` in the worker's
    process, with an ``Algorithm``. Not thread-safe: one thread calls it. ``computes``: what it can compute of all that an
    algorithm may ask for (``Algorithm.asks``). ``restores``: it has ``load_weights``.
    """

    computes: tuple[str, ...] = ()
    restores: bool = False

    @abc.abstractmethod
    def train_step(self, batch: Batch) -> StepResult:
        """One optimizer step on the rows of ``batch`` (TRAIN_COLUMNS). Blocks until the weights are new.

        Raises SchemaError for rows it cannot train on (NaN rewards, a response without log-probs); the
        weights are then unchanged.
        """

    @abc.abstractmethod
    def logprobs(self, batch: Batch) -> Ragged:
        """Log-probs of ``response_ids`` under the current weights: float32, one row a response; natural log of
        softmax(logits / temperature) over the whole vocabulary, at the temperature that the rollouts are drawn at, 1 by default."""

    @abc.abstractmethod
    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """(name, tensor) of the whole policy, in the names and dtypes of the Hugging Face checkpoint, tied weights once.

        What the optimizer steps on should be float32 where the checkpoint is less precise: small steps would be rounded away.
        The tensors may be views of live parameters: they are read before the next train_step.
        """

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write everything needed to continue (weights, optimizer, random state) below ``path``."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Continue from what ``save`` wrote; the next step is as if there had been no pause."""

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the policy's weights by those of a version that this run published; the optimizer begins anew. Called after a
        rollback, between steps; of several ranks on each, with whole tensors. Optional, declared by ``restores``: without it
        the run refuses rollbacks.

        What the optimizer steps on is made from the published weights, and its state is that of a new optimizer.
        Afterwards ``named_weights`` gives the published bytes, and the next step starts from them. The tensors are valid
        until this returns. A tensor that is missing, unknown or of another shape raises WeightMismatch, and nothing has changed.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load a version's weights")

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face model folder. ``path`` is there, maybe empty. Optional; the default refuses."""
        raise NotImplementedError(f"{type(self).__name__} cannot export a model folder")

    def close(self) -> None:
        """Free what the engine holds."""
