"""ValueCritic: a value model that a train engine has beside its policy, trained in the same passes.

critic = ValueCritic("models/mine", lr=1e-5)
values = critic.of_batch(batch, tokens=16384)              # before the step: column "values"
loss = ... critic.values(part) ...; loss.backward(); critic.take_gradients()
critic.optimizer_step()                                    # {"critic_grad_norm": ...}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncflow_sdk.types import Batch, Ragged

from . import checkpoint
from .collate import MicroBatch, micro_batches
from .masters import Masters
from .policy import load_policy


class ValueModel(torch.nn.Module):  # type: ignore[misc]
    """The layers of a causal language model below its output layer, and a number for each position: 0 of everything at first."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.backbone = policy.base_model
        hidden = policy.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(hidden, 1, bias=False, dtype=policy.dtype, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, part: MicroBatch) -> Any:
        """Of what is before each response token: float32 (tokens,)."""
        places = {} if part.position_ids is None else {"position_ids": part.position_ids}
        hidden = self.backbone(input_ids=part.input_ids, use_cache=False, **places).last_hidden_state
        return self.head(hidden.flatten(0, 1)[part.predicted_at])[:, 0].float()


class ValueCritic:
    """``model``: the Hugging Face folder that its layers begin as. Optimizer and master weights are float32."""

    def __init__(
        self, model: str, *, lr: float, betas: tuple[float, ...], weight_decay: float, max_grad_norm: float,
        dtype: str, device: str,
    ) -> None:  # fmt: skip
        self.model = ValueModel(load_policy(model, dtype=dtype, device=device)).eval()
        self._masters, self._max_grad_norm = Masters(self.model), max_grad_norm
        self._optimizer = torch.optim.AdamW(
            self._masters.named.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True
        )

    def of_batch(self, batch: Batch, *, tokens: int | None) -> Ragged:
        """Of each response token, without gradient, in the batch's order; in passes of at most ``tokens`` input tokens."""
        rows, found = [], []
        with torch.no_grad():
            for part in micro_batches(batch, tokens=tokens, device=self.model.head.weight.device):
                rows.append(part.rows)
                found.append(self.model(part).cpu().numpy())
        order = np.concatenate(rows)
        lengths = batch.ragged("response_ids").lengths
        return Ragged.from_lengths(np.concatenate(found), lengths[order]).take(np.argsort(order))

    def values(self, part: MicroBatch) -> Any:
        """Of its response tokens, with gradient."""
        return self.model(part)

    def zero_gradients(self) -> None:
        self.model.zero_grad()
        self._optimizer.zero_grad()

    def take_gradients(self) -> None:
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
