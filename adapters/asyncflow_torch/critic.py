"""Critics: a value model trained beside the policy, in the same passes.

    values = critic.values(part)                               # of a pass, with gradient
    given = values.detach().requires_grad_()                   # input of the loss
    loss.backward(); critic.backward(values, given.grad, last=True)

Each model has a backward pass of its own: sharded models run collectives in it, in the same order
on all ranks.
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
from .recomputation import recompute_activations
from .train_options import TrainOptions


class ValueModel(torch.nn.Module):  # type: ignore[misc]
    """The layers of a causal language model below its output layer, and a linear head with one
    value per position, initially 0."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.backbone = policy.base_model
        self._no_split_modules = policy._no_split_modules
        hidden = policy.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(hidden, 1, bias=False, dtype=policy.dtype, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Any, predicted_at: Any, position_ids: Any = None) -> Any:
        """Return the values at the positions that predict response tokens: float32 (tokens,).
        Arguments: fields of `MicroBatch`."""
        positions = {} if position_ids is None else {"position_ids": position_ids}
        hidden = self.backbone(input_ids=input_ids, use_cache=False, **positions).last_hidden_state
        return self.head(hidden.flatten(0, 1)[predicted_at]).float().sum(-1)  # no view: FSDP would warn


class ValueCritic(abc.ABC):
    """``model``: a ValueModel, possibly wrapped by its engine."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def values(self, part: MicroBatch) -> Any:
        """Return the values of the pass's response tokens, with gradient: float32 (tokens,). All
        ranks call it together."""
        return self.model(part.input_ids, part.predicted_at, part.position_ids)

    @abc.abstractmethod
    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        """Add the gradients of the weights to the step's. ``gradient``: of the loss with respect
        to ``values``, scaled as the loss was. ``last``: True for the last pass of the step. All
        ranks call it together."""

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write weights and optimizer below ``path``, as the engine does."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Restore weights and optimizer, as the engine does."""


class TorchCritic(ValueCritic):
    """Critic of one process. Optimizer and master weights are float32."""

    def __init__(self, options: TrainOptions) -> None:
        policy = load_policy(
            options.critic or options.model,
            dtype=options.computed_dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )
        if options.gradient_checkpointing:
            recompute_activations(policy)
        super().__init__(ValueModel(policy).eval())
        self._masters, self._max_grad_norm = Masters(self.model), options.max_grad_norm
        learning_rate = options.critic_learning_rate or options.learning_rate
        self._optimizer = torch.optim.AdamW(self._masters.named.values(), lr=learning_rate, **options.adamw)

    def zero_gradients(self) -> None:
        """Clear all gradients."""
        self.model.zero_grad()
        self._optimizer.zero_grad()

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        """Add the gradients to the float32 masters."""
        values.backward(gradient)
        self._masters.take_gradients()

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients of the masters."""
        self._masters.divide_gradients(number)

    def clip(self) -> float:
        """Clip the gradients. Return their norm before clipping."""
        return float(torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self._max_grad_norm))

    def optimizer_step(self) -> None:
        """Step, and round the masters into the weights."""
        self._optimizer.step()
        self._masters.give_weights()

    def save(self, path: Path) -> None:
        """Write master weights and optimizer."""
        checkpoint.save(path, self.model, self._masters, self._optimizer)

    def load(self, path: Path) -> None:
        """Restore master weights and optimizer."""
        checkpoint.load(path, self.model, self._masters, self._optimizer)
