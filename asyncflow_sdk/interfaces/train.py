"""TrainEngine: the interface of training engines.

A plugin implements it, and a worker of the run calls it:

    class Mine(af.TrainEngine):                                     # in a plugin
        def train_step(self, batch):                                # whole groups, TRAIN_COLUMNS
            return af.StepResult({"loss": self.model.step(batch)})
        def named_weights(self):
            return self.model.named_parameters()

    result = engine.train_step(batch)                               # in the trainer's worker
    publisher.publish(version + 1, engine.named_weights(), untrained=engine.untrained)
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..types import Batch, Ragged
from .weights import WeightUpdate

TRAIN_COLUMNS = ("prompt_ids", "response_ids", "logprobs", "version_spans", "reward")
"""Columns read by train engines. prompt_ids, response_ids: ragged int32; logprobs: ragged float32, of the response
under its generating policy; version_spans: ragged int64 (3,); reward: fixed floating point. Optional: loss_mask, ragged
bool, one value a response token; tokens with False are context and are not trained."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step. ``metrics``: numbers by name. ``filtered``: bool (rows,), True for rows left out because they
    have no gradient; None if all rows were used."""

    metrics: dict[str, float] = field(default_factory=dict)
    filtered: npt.NDArray[np.bool_] | None = None


class TrainEngine(abc.ABC):
    """Trains the policy on batches of whole groups.

    The plugin's factory makes it in the worker's process, as ``factory(model=PATH, algorithm=ALGORITHM, **options)``
    with an ``Algorithm``. Not thread-safe: one thread calls it. ``computes``: supported values of ``Algorithm.asks``.
    ``restores``: True if it implements ``load_weights``. ``streams``: True if it implements ``begin_step``,
    ``accumulate``, ``end_step`` and ``abort_step``. ``sampling_mask``: True if log-probs are over the kept ids of
    rows with SAMPLING_MASK. ``reshards``: True if ``load`` accepts the state that another number of ranks has saved.
    ``untrained``: names of the model folder that ``named_weights`` leaves out, because they never change.

    A step can be trained in parts, while the rest of its rows is still being generated:

        engine.begin_step(7)
        for part in parts:
            engine.accumulate(part)                          # gradients are added up
        result = engine.end_step()                           # the weights change here
    """

    computes: tuple[str, ...] = ()
    restores: bool = False
    streams: bool = False
    sampling_mask: bool = False
    reshards: bool = False
    untrained: Sequence[str] = ()

    @property
    def whole_step(self) -> str:
        """The reason why this engine, with its algorithm and options, needs whole steps, in plain words; "" if not."""
        return "" if self.streams else f"{type(self).__name__} trains whole steps only"

    @abc.abstractmethod
    def train_step(self, batch: Batch) -> StepResult:
        """Do one optimizer step on the rows of ``batch`` (TRAIN_COLUMNS). Blocks until the weights are updated. Raises
        SchemaError for invalid rows (NaN rewards, a response without log-probs) and then leaves the weights unchanged."""

    def begin_step(self, step: int) -> None:
        """Begin step number ``step`` in parts. Optional, declared by ``streams``. Raises EngineError if a step is open,
        or with the reason if ``whole_step`` is not ""."""
        raise NotImplementedError(f"{type(self).__name__} cannot train a step in parts")

    def accumulate(self, batch: Batch) -> None:
        """Add the gradients of one part of the open step: whole groups (TRAIN_COLUMNS), possibly no rows on some
        ranks. All ranks call it together. The weights do not change. Raises SchemaError for invalid rows, as
        ``train_step``, and EngineError without an open step. An error on one rank is raised on all, and ends the step
        as ``abort_step`` does. If another rank has aborted the step: StepAborted."""
        raise NotImplementedError(f"{type(self).__name__} cannot train a step in parts")

    def end_step(self) -> StepResult:
        """Do one optimizer step with the gradients of all parts. Weights and result equal ``train_step``'s on all rows,
        up to rounding; ``filtered`` is over the rows of all ``accumulate`` calls, in order. Raises EngineError without
        an open step or without rows, StepAborted as ``accumulate``. The step is closed after an error, too."""
        raise NotImplementedError(f"{type(self).__name__} cannot train a step in parts")

    def abort_step(self) -> None:
        """Discard the open step: its gradients; random state and loss scale are as before ``begin_step``. Without an
        open step: no effect. Ranks need not call it at the same place: the ``accumulate`` or ``end_step`` of the others
        raises StepAborted."""

    @abc.abstractmethod
    def logprobs(self, batch: Batch) -> Ragged:
        """Return log-probs of ``response_ids`` under the current weights: float32, one row a response, natural log of
        softmax(logits / temperature) over the whole vocabulary, or kept ids, at the rollouts' temperature; default 1.
        All ranks of a sharded engine are called together, each with rows of its own: a rank may have none."""

    @abc.abstractmethod
    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Return (name, tensor) of the whole policy, in the names and dtypes of the Hugging Face checkpoint, tied
        weights once. The tensors may be views of live parameters: they are read before the next train_step. The
        optimizer should step on float32 copies if the checkpoint is less precise: small steps would be rounded
        away."""

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write the full training state (weights, optimizer, random state) below ``path``."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Restore the state written by ``save``; the next step equals an uninterrupted run's."""

    def load_weights(self, update: WeightUpdate) -> None:
        """Replace the policy's weights by a version published by this run, and reset the optimizer to a new one, with
        master weights made from the published ones. Called after a rollback, between steps, on every rank with whole
        tensors, valid until this method returns. Afterwards ``named_weights`` returns the published bytes, and the
        next step starts from them. Optional, declared by ``restores``; without it the run refuses rollbacks. Raises
        WeightMismatch for a missing or unknown tensor or another shape, and then changes nothing."""
        raise NotImplementedError(f"{type(self).__name__} cannot load a version's weights")

    def export(self, path: Path) -> None:
        """Write the policy as a Hugging Face model folder. ``path`` exists and may be empty. Optional; default:
        refuse."""
        raise NotImplementedError(f"{type(self).__name__} cannot export a model folder")

    def close(self) -> None:
        """Free the engine's resources."""
