"""Trained: a model in shards and the AdamW that steps on them, as the policy is one and a critic another.

norm = policy.norm()                                     # of all ranks' gradients
if isfinite(norm): policy.step(norm)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncflow_torch.critic import ValueCritic
from asyncflow_torch.ranks import Ranks

from . import checkpoint


class Trained:
    """Steps are clipped to ``max_grad_norm``, of the whole model."""

    def __init__(
        self, model: Any, *, lr: float, betas: Sequence[float], weight_decay: float, max_grad_norm: float
    ) -> None:  # fmt: skip
        self.model, self._max_grad_norm = model, max_grad_norm
        self._parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=lr, betas=tuple(betas), weight_decay=weight_decay, fused=True
        )

    def norm(self) -> Any:
        """Of the gradients of all ranks, a scalar tensor, the same on all. A collective."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, norm: Any) -> None:
        """``norm``: by which gradients are clipped."""
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        self.optimizer.step()


class FsdpCritic(ValueCritic):
    """In shards as the policy is."""

    def __init__(self, trained: Trained, ranks: Ranks, *, bucket_bytes: int) -> None:
        super().__init__(trained.model)
        self.trained, self._ranks, self._bucket_bytes = trained, ranks, bucket_bytes

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        values.backward(gradient)

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self.trained.optimizer, self._ranks, bucket_bytes=self._bucket_bytes)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self.trained.optimizer, self._ranks, bucket_bytes=self._bucket_bytes)
