"""ValueCritic: a value model that a train engine has beside its policy, trained in the same passes.

values = critic.values(part)                               # of a pass, with gradient
given = values.detach().requires_grad_()                   # what the loss is of
loss.backward(); critic.backward(values, given.grad, last=True)

So the backward pass of each model is its own: sharded ones meet other ranks in it, and an order that a loss decides could be another on
each.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .collate import MicroBatch
from .masters import Masters
from .policy import load_policy


class ValueModel(torch.nn.Module):  # type: ignore[misc]
    """The layers of a causal language model below its output layer, and a number for each position: 0 of everything at first."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.backbone = policy.base_model
        self._no_split_modules = policy._no_split_modules
        hidden = policy.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(hidden, 1, bias=False, dtype=policy.dtype, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Any, predicted_at: Any, position_ids: Any = None) -> Any:
        """Of what is before each response token: float32 (tokens,). As `MicroBatch` has them."""
        places = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **places).last_hidden_state
        return self.head(hidden.flatten(0, 1)[predicted_at]).float().sum(-1)  # no view, which FSDP would warn of


class ValueCritic(abc.ABC):
    """``model``: a ValueModel, wrapped as its engine wants it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def values(self, part: MicroBatch) -> Any:
        """Of its response tokens, with gradient: float32 (tokens,). All ranks call it together."""
        return self.model(part.input_ids, part.predicted_at, part.position_ids)

    @abc.abstractmethod
    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        """Add up the gradients of its weights. ``gradient``: of the loss by ``values``, as the engine's own backward pass left it, with
        the factor that it has for other ranks. ``last``: of this step's passes. All ranks call it together."""

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """As the engine's own."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """As the engine's own."""


class TorchCritic(ValueCritic):
    """``model``: the Hugging Face folder that its layers begin as. Optimizer and master weights are float32."""

    def __init__(
        self, model: str, *, lr: float, betas: tuple[float, ...], weight_decay: float, max_grad_norm: float,
        dtype: str, device: str,
    ) -> None:  # fmt: skip
        super().__init__(ValueModel(load_policy(model, dtype=dtype, device=device)).eval())
        self._masters, self._max_grad_norm = Masters(self.model), max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._masters.named.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True
        )

    def zero_gradients(self) -> None:
        self.model.zero_grad()
        self._optimizer.zero_grad()

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        values.backward(gradient)
        self._masters.take_gradients()

    def clip(self) -> float:
        """Clip the gradients. Returns their norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self._max_grad_norm))

    def optimizer_step(self) -> None:
        self._optimizer.step()
        self._masters.give_weights()

    def save(self, path: Path) -> None:
        checkpoint.save(path, self.model, self._masters, self._optimizer)

    def load(self, path: Path) -> None:
        checkpoint.load(path, self.model, self._masters, self._optimizer)
