"""Masters: the weights that an optimizer steps on, in float32 whatever the model computes and publishes in.

masters = Masters(model)
optimizer = torch.optim.AdamW(masters.named.values(), lr=1e-6)
loss.backward(); masters.take_gradients()               # after each part of a step
optimizer.step(); masters.give_weights()
"""

from __future__ import annotations

from typing import Any

import torch


class Masters:
    """Of a weight that is less precise than float32, a twin in float32; any other weight is its own master.

    bfloat16 has 8 bits: beside a weight of 0.1, a step of 1e-6 is a four-hundredth of what it can tell apart, and would be
    rounded away each time. ``named``: by the names of the model's parameters, tied ones once.
    """

    def __init__(self, model: Any) -> None:
        self.named: dict[str, Any] = {}
        self._twins: list[tuple[Any, Any]] = []
        for name, weight in model.named_parameters():
            master = weight
            if weight.dtype.itemsize < torch.float32.itemsize:
                master = weight.detach().float().requires_grad_(weight.requires_grad)
                self._twins.append((weight, master))
            self.named[name] = master

    def take_gradients(self) -> None:
        """Add the weights' gradients to their twins', in float32, and take them from the weights."""
        for weight, master in self._twins:
            if weight.grad is not None:
                part = weight.grad.float()
                master.grad = part if master.grad is None else master.grad.add_(part)
                weight.grad = None

    def take_weights(self) -> None:
        """Make the twins what the weights are."""
        with torch.no_grad():
            for weight, master in self._twins:
                master.copy_(weight)

    def give_weights(self) -> None:
        """Make the weights what their twins are, rounded."""
        with torch.no_grad():
            for weight, master in self._twins:
                weight.copy_(master)
