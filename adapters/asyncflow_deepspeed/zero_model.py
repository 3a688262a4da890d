"""ZeroModel: a model under ZeRO and the AdamW that steps on it, for the policy and for the critic.

policy.backward(loss, last=True)
norm = policy.step(lambda: critic_steps())               # both step, or neither
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.errors import EngineError
from asyncflow_torch.critic import ValueCritic
from asyncflow_torch.policy import trained
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.train_options import TrainOptions

from . import checkpoint


class CheckedAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """AdamW that skips its step if ``norm()`` is not finite.

    DeepSpeed computes the norm over all ranks, clips by it and calls ``step`` without a check in
    float32 and bfloat16. ``norm`` returns the same on all ranks, so all step or none. Until it is
    set no step is made: stage 0 begins with a step of zeros, which would count and decay the
    weights.
    """

    norm: Callable[[], float] = staticmethod(lambda: math.nan)

    def step(self, closure: Any = None) -> Any:
        """Step if the norm is finite."""
        return super().step(closure) if math.isfinite(float(self.norm())) else None


class ZeroModel:
    """``settings``: DeepSpeed's configuration. ``engine``: DeepSpeed's engine, called like the model."""

    def __init__(
        self, deepspeed: Any, model: Any, settings: Mapping[str, Any], options: TrainOptions, *, learning_rate: float
    ) -> None:
        self.optimizer = CheckedAdamW([each for _, each in trained(model)], lr=learning_rate, **options.adamw)
        # Without an optimizer stage 3 only gathers weights: no masters, no gradients. Lower stages refuse that.
        bare = options.frozen and settings["zero_optimization"]["stage"] == 3
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=None if bare else self.optimizer, config=copy.deepcopy(dict(settings))
        )
        self._in_step, self._in_backward = False, False
        self._norm, self._has_scale = math.nan, self.engine.optimizer is not self.optimizer
        self._allow_step: Callable[[], bool] = lambda: False  # refuses the step of zeros of stage 0
        self.optimizer.norm = self._checked_norm

    def check(self) -> None:
        """Raise EngineError after an interrupted step."""
        if self._in_step:
            raise EngineError(
                "a step broke off, and DeepSpeed holds part of its gradients: make a new engine and load a checkpoint"
            )

    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradients of ``loss``, averaged over ranks by DeepSpeed. ``last``: True for
        the last pass of the step."""
        self._in_step = self._in_backward = True
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss)
        self._in_backward = False

    @property
    def can_discard(self) -> bool:
        """True if there are gradients, all of completed passes."""
        return self._in_step and not self._in_backward

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients before they are clipped, by DeepSpeed's loss scale of the next step.
        The optimizer of stage 0 in float32 has none."""
        if self._has_scale:
            self.engine.optimizer.loss_scale = number
            return
        for weight in self.engine.module.parameters():
            if weight.grad is not None:
                weight.grad.div_(number)

    def step(self, allow: Callable[[], bool]) -> float:
        """Step if the norm of the gradients is finite and ``allow()`` is true, called only then
        and possibly several times. Clear the gradients and return their norm over all ranks. A
        collective."""
        self._norm = math.nan if self.engine.zero_optimization_stage() else self._compute_norm()
        self._allow_step = allow
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self._in_step = False
        if self._has_scale:
            self.engine.optimizer.loss_scale = 1.0
        return self._current_norm()

    def _checked_norm(self) -> float:
        norm = self._current_norm()
        return norm if math.isfinite(norm) and self._allow_step() else math.nan

    def _current_norm(self) -> float:
        if self.engine.zero_optimization_stage():
            return float(self.engine.optimizer._global_grad_norm)
        return self._norm

    def _compute_norm(self) -> float:
        """Return the norm at stage 0: every rank has all gradients, and DeepSpeed keeps no norm."""
        gradients = [weight.grad for weight in self.engine.module.parameters() if weight.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = float(torch.linalg.vector_norm(torch.stack(norms)))
        return norm / self.engine.optimizer.loss_scale if self._has_scale else norm


class DeepSpeedCritic(ValueCritic):
    """Critic under the policy's stage."""

    def __init__(self, zero: ZeroModel, ranks: Ranks, *, bucket_bytes: int) -> None:
        super().__init__(zero.engine)
        self.zero, self._ranks, self._bucket_bytes = zero, ranks, bucket_bytes

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        """Add the gradients through DeepSpeed's backward pass."""
        self.zero.backward((values * gradient).sum(), last=last)

    def save(self, path: Path) -> None:
        """Write weights and optimizer. A collective."""
        checkpoint.save(path, self.model, self._ranks, bucket_bytes=self._bucket_bytes)

    def load(self, path: Path) -> None:
        """Restore weights and optimizer. A collective."""
        checkpoint.load(path, self.model, self._ranks, bucket_bytes=self._bucket_bytes)
