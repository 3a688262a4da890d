"""TorchEngine: trains a Hugging Face model with AdamW in this process, by GRPO or another algorithm.

engine = TorchEngine("runs/demo/model", learning_rate=2e-4)
result = engine.train_step(batch)                        # result.metrics["reward"]
publisher.publish(version, engine.named_weights(), untrained=engine.untrained)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.interfaces import WeightUpdate

from . import checkpoint
from .critic import TorchCritic
from .data_parallel import DataParallelEngine
from .export import export_folder
from .folder_map import FlatRun
from .masters import Masters
from .policy import context_of, load_policy, trained, vocabulary_of
from .ranks import Ranks
from .recomputation import recompute_activations
from .train_options import TrainOptions, keywords_of


class TorchEngine(DataParallelEngine):
    """Train engine of one process and one device. Options: `TrainOptions`."""

    check_options = TrainOptions

    @keywords_of(TrainOptions)
    def __init__(self, options: TrainOptions) -> None:
        options.prepare_torch()
        self._max_grad_norm = options.max_grad_norm
        loaded = load_policy(
            options.model, dtype=options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
        if options.gradient_checkpointing:
            recompute_activations(loaded)
        self._folder = options.trained_part(loaded)
        self.untrained = self._folder.untrained
        self._masters = Masters(loaded, dtypes=self._folder.dtypes, frozen=options.frozen)
        if not options.frozen:
            rounded = (name for name, each in trained(loaded) if each.dtype.itemsize < torch.float32.itemsize)
            self._folder.exact({name: FlatRun(self._masters.named[name]) for name in rounded})
        optimizer = torch.optim.AdamW(self._masters.named.values(), lr=options.learning_rate, **options.adamw)
        self._values = TorchCritic(options) if options.needs_critic else None
        super().__init__(
            loaded, options, optimizer, ranks=Ranks.alone(), vocabulary=vocabulary_of(loaded), context=context_of(loaded),
            device=loaded.device, critic=self._values,
        )  # fmt: skip

    def zero_gradients(self) -> None:
        """Clear the gradients of policy and critic."""
        self._model.zero_grad()
        self._optimizer.zero_grad()
        if self._values is not None:
            self._values.zero_gradients()

    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradients of ``loss`` to the float32 masters."""
        loss.backward()
        self._masters.take_gradients()

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients of the float32 masters."""
        self._masters.divide_gradients(number)
        if self._values is not None:
            self._values.divide_gradients(number)

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients and step. Returns their norms before clipping."""
        norms = {
            "grad_norm": float(torch.nn.utils.clip_grad_norm_(self._masters.named.values(), self._max_grad_norm))
        }
        if self._values is not None:
            norms["critic_grad_norm"] = self._values.clip()
        if not all(map(math.isfinite, norms.values())):
            self.zero_gradients()
            return norms
        self._optimizer.step()
        self._masters.give_weights()
        if self._values is not None:
            self._values.optimizer_step()
        return norms

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        """Return the trained tensors of the model folder: live views where the model has them in the folder's
        dtype."""
        return self._folder.published(self._published())

    def _published(self) -> Iterator[tuple[str, FlatRun]]:
        """Yield weights in the published dtype; of a higher one, their masters."""
        dtypes = self._folder.dtypes
        for name, weight in trained(self._model):
            low = weight.dtype.itemsize < dtypes[name].itemsize
            yield name, FlatRun(self._masters.named[name] if low else weight)

    def save_policy(self, path: Path) -> None:
        """Write master weights, optimizer and random state."""
        checkpoint.save(path, self._model, self._masters, self._optimizer)

    def restore_policy(self, path: Path) -> None:
        """Restore master weights, optimizer and random state."""
        checkpoint.load(path, self._model, self._masters, self._optimizer)

    def replace_weights(self, update: WeightUpdate) -> None:
        """Copy the weights of ``update`` and reset the optimizer."""
        self._folder.check(update)
        runs = {name: FlatRun(each) for name, each in self._masters.named.items()}
        for name, tensor in update:
            self._folder.fill(name, tensor, runs)
        self._masters.give_weights()
        self._optimizer.state.clear()

    def export_folder(self, path: Path) -> None:
        """Write the Hugging Face folder."""
        export_folder(path, self._folder, list(self._published()), self._ranks)
