"""Masters: float32 weights for the optimizer, whatever the dtype of computed and published weights.

masters = Masters(model)
optimizer = torch.optim.AdamW(masters.named.values(), lr=1e-6)
loss.backward(); masters.take_gradients()               # after each part of a step
optimizer.step(); masters.give_weights()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .policy import trained


class Masters:
    """A float32 twin of each weight of lower precision; other weights, and all of a ``frozen`` model, are their own
    masters. ``named``: by the model's parameter names, tied ones once. ``dtypes``: published, by the same names; a
    float32 weight published in less has a twin, and is rounded as the published one.

    bfloat16 has 8 bits: beside a weight of 0.1, a step of 1e-6 is a four-hundredth of its
    resolution and would be rounded away each time.
    """

    def __init__(self, model: Any, *, dtypes: Mapping[str, Any] | None = None, frozen: bool = False) -> None:
        self.named: dict[str, Any] = {}
        self._twins: list[tuple[Any, Any, Any]] = []
        for name, weight in trained(model):
            master, rounded = (
                weight,
                min(weight.dtype, (dtypes or {}).get(name, weight.dtype), key=lambda each: each.itemsize),
            )
            if rounded.itemsize < torch.float32.itemsize and not frozen:
                master = weight.detach().to(torch.float32, copy=True).requires_grad_(weight.requires_grad)
                self._twins.append((weight, master, rounded))
            self.named[name] = master

    def take_gradients(self) -> None:
        """Move the weights' gradients to their twins, added in float32."""
        for weight, master, _ in self._twins:
            if weight.grad is not None:
                part = weight.grad.float()
                master.grad = part if master.grad is None else master.grad.add_(part)
                weight.grad = None

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients of all masters."""
        for master in self.named.values():
            if master.grad is not None:
                master.grad.div_(number)

    def give_weights(self) -> None:
        """Copy the twins to their weights, rounded."""
        with torch.no_grad():
            for weight, master, rounded in self._twins:
                weight.copy_(master if rounded == weight.dtype else master.to(rounded))
