"""Trained: a model under ZeRO and the AdamW that steps on it, as the policy is one and a critic another.

policy.backward(loss, last=True)
norm = policy.step(lambda: critic_can)                   # both, or neither
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_torch.critic import ValueCritic
from asyncflow_torch.ranks import Ranks

from . import checkpoint
from .optimizer import CheckedAdamW


class Trained:
    """``settings``: DeepSpeed's configuration. ``engine``: its own, which is called as the model."""

    def __init__(
        self, deepspeed: Any, model: Any, settings: Mapping[str, Any], *, lr: float, betas: Sequence[float],
        weight_decay: float,
    ) -> None:  # fmt: skip
        self.optimizer = CheckedAdamW(
            model.parameters(), lr=lr, betas=tuple(betas), weight_decay=weight_decay, fused=True
        )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=copy.deepcopy(dict(settings))
        )
        self._begun, self._norm = False, math.nan
        self._also: Callable[[], bool] = lambda: False  # and so no step of zeros, with which stage 0 begins
        self.optimizer.norm = self._allowed

    def check(self) -> None:
        """Raises EngineError after a step that broke off."""
        if self._begun:
            raise EngineError(
                "a step broke off, and DeepSpeed holds a part of its gradients: make the engine anew and load a checkpoint"
            )

    def backward(self, loss: Any, *, last: bool) -> None:
        """The mean over ranks, of which DeepSpeed makes a sum of passes. ``last``: of the step's."""
        self._begun = True
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)

    def step(self, also: Callable[[], bool]) -> float:
        """If the norm of the gradient is finite, and ``also`` says so, which is asked only then, perhaps several times. Returns the norm,
        of all ranks; the gradients are forgotten. A collective."""
        self._norm = math.nan if self.engine.zero_optimization_stage() else self._norm_of_all()
        self._also = also
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self._begun = False
        return self._known()

    def _allowed(self) -> float:
        norm = self._known()
        return norm if math.isfinite(norm) and self._also() else math.nan

    def _known(self) -> float:
        if self.engine.zero_optimization_stage():
            return float(self.engine.optimizer._global_grad_norm)
        return self._norm

    def _norm_of_all(self) -> float:
        """At stage 0 every rank has the gradient, and DeepSpeed does not say its norm."""
        gradients = [weight.grad for weight in self.engine.module.parameters() if weight.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(norms)))


class DeepSpeedCritic(ValueCritic):
    """Under the stage that the policy is under."""

    def __init__(self, trained: Trained, ranks: Ranks, *, bucket_bytes: int) -> None:
        super().__init__(trained.engine)
        self.trained, self._ranks, self._bucket_bytes = trained, ranks, bucket_bytes

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        self.trained.backward((values * gradient).sum(), last=last)

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self._ranks, bucket_bytes=self._bucket_bytes)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self._ranks, bucket_bytes=self._bucket_bytes)
