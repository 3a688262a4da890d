"""TrainEngine: the interface of training engines."""

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
"""Columns read by train engines. prompt_ids, response_ids: ragged int32; logprobs: ragged float32,
of the response under the policy that generated it; version_spans: ragged int64 (3,); reward: fixed
floating point. Optional: loss_mask, ragged bool, one value a response token; tokens with False are
context and are not trained."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step. ``metrics``: numbers by name. ``filtered``: bool (rows,), True for rows
    left out because they have no gradient; None if all rows were used."""

    metrics: dict[str, float] = field(default_factory=dict)
    filtered: npt.NDArray[np.bool_] | None = None


class TrainEngine(abc.ABC):
    """Trains the policy on batches of whole groups.

    The plugin's factory makes it in the worker's process, as ``factory(model=PATH,
    algorithm=ALGORITHM, **options)`` with an ``Algorithm``. Not thread-safe: one thread calls it.
    ``computes``: supported values of ``Algorithm.asks``. ``restores``: True if it implements
    ``load_weights``.
    """

    computes: tuple[str, ...] = ()
    restores: bool = False

    @abc.abstractmethod
    def train_step(self, batch: Batch) -> StepResult:
        """Do one optimizer step on the rows of ``batch`` (TRAIN_COLUMNS). Blocks until the weights
        are updated.

        Raises SchemaError for invalid rows (NaN rewards, a response without log-probs) and then
        leaves the weights unchanged.
        """

    @abc.abstractmethod
    def logprobs(self, batch: Batch) -> Ragged:
        """Return log-probs of ``response_ids`` under the current weights: float32, one row a
        response, natural log of softmax(logits / temperature) over the whole vocabulary. The
        temperature is that of the rollouts; default 1.

        All ranks of a sharded engine are called together, each with rows of its own: a rank may have
        none."""

    @abc.abstractmethod
    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Return (name, tensor) of the whole policy, in the names and dtypes of the Hugging Face
        checkpoint, tied weights once.

        The optimizer should step on float32 copies if the checkpoint is less precise: small steps
        would be rounded away. The tensors may be views of live parameters: they are read before the
        next train_step.
        """

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write the full training state (weights, optimizer, random state) below ``path``."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Restore the state written by ``save``; the next step equals that of an uninterrupted run."""

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the policy's weights by a version published by this run, and reset the optimizer
        to a new one. Called after a rollback, between steps, on every rank with whole tensors.
        Optional, declared by ``restores``; without it the run refuses rollbacks.

        The optimizer's master weights are made from the published weights. Afterwards
        ``named_weights`` returns the published bytes, and the next step starts from them. The
        tensors are valid until this method returns. Raises WeightMismatch for a missing or unknown
        tensor or another shape, and then changes nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot load a version's weights")

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face model folder. ``path`` exists and may be empty.
        Optional; default: refuse."""
        raise NotImplementedError(f"{type(self).__name__} cannot export a model folder")

    def close(self) -> None:
        """Free the engine's resources."""
