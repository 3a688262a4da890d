"""FsdpEngine: trains a Hugging Face model whose weights, gradients and optimizer lie in shards over
N processes (FSDP2).

engine = FsdpEngine("models/mine", learning_rate=1e-5)              # in each process, under torchrun or the SDK's own launcher
result = engine.train_step(batch)                        # each rank with its rows; metrics are of the whole step
publisher.publish(version, engine.named_weights(), untrained=engine.untrained)       # each rank its shards
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_torch.critic import ValueModel
from asyncflow_torch.data_parallel import DataParallelEngine
from asyncflow_torch.devices import device_of
from asyncflow_torch.export import export_folder
from asyncflow_torch.folder_map import FlatRun, FolderMap
from asyncflow_torch.packed_rows import packs
from asyncflow_torch.policy import context_of, load_policy, trained, vocabulary_of
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.train_options import ShardedOptions, keywords_of

from . import checkpoint
from .sharded_model import FsdpCritic, ShardedModel, widen
from .shards import runs_of


@dataclass(frozen=True, kw_only=True)
class FsdpOptions(ShardedOptions):
    """``reshard_after_forward``: free each layer's gathered weights after its forward pass;
    False keeps them for the backward pass. ``offload``: keep the shards of weights and optimizer on
    the CPU."""

    reshard_after_forward: bool = True


class FsdpEngine(DataParallelEngine):
    """Train engine in shards: weights are gathered one layer at a time. Weights and optimizer
    are float32, gradients are summed over ranks in float32. The critic is sharded like the
    policy. Options: `FsdpOptions`, `ShardedOptions`, `TrainOptions`."""

    check_options = FsdpOptions

    @keywords_of(FsdpOptions)
    def __init__(self, options: FsdpOptions) -> None:
        options.prepare_torch()
        self.bucket_bytes = options.bucket_bytes
        device = device_of(options.device)
        # On the CPU first: the device gets only shards, and each rank one layer at a time.
        load = partial(
            load_policy,
            dtype=options.dtype,
            device="cpu",
            attn_implementation=options.attention,
            trust_remote_code=options.trust_remote_code,
        )
        plain = load(options.model)
        self._folder = options.trained_part(plain)
        self.untrained = self._folder.untrained
        vocabulary, context, compute = vocabulary_of(plain), context_of(plain), plain.dtype
        if not options.frozen:
            _widen_rounded(plain, self._folder)
        ranks = Ranks.join(str(device), timeout_s=options.collective_timeout_s)
        try:
            with ranks.calling("make"):
                shard = partial(
                    ShardedModel, mesh=init_device_mesh(device.type, (ranks.size,)), options=options, compute=compute,
                    reshard=options.reshard_after_forward,
                )  # fmt: skip
                self._policy = shard(plain, learning_rate=options.learning_rate)
                self._values: FsdpCritic | None = None
                if options.needs_critic:
                    values = ranks.together(lambda: ValueModel(load(options.critic or options.model)).eval())
                    sharded = shard(values, learning_rate=options.critic_learning_rate or options.learning_rate)
                    self._values = FsdpCritic(sharded, ranks, bucket_bytes=options.bucket_bytes)
                packed = packs(options, plain, plain, self._values, ranks=ranks, vocabulary=vocabulary, device=device)
            super().__init__(
                self._policy.model, options, self._policy.optimizer, ranks=ranks, vocabulary=vocabulary, context=context,
                device=device, packed=packed, critic=self._values,
            )  # fmt: skip
        except BaseException:
            ranks.close()
            raise

    def zero_gradients(self) -> None:
        """Clear the gradients of policy and critic."""
        for each in self._models().values():
            each.optimizer.zero_grad()

    def backward(self, loss: Any, *, last: bool) -> None:
        """Add the gradients of ``loss``. FSDP averages over ranks, so the loss is multiplied by their number."""
        (loss * self._ranks.size).backward()

    def divide_gradients(self, number: float) -> None:
        """Divide the gradients of policy and critic, each rank its shards."""
        for each in self._models().values():
            each.divide_gradients(number)

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients and step. Return their norms before clipping."""
        models = self._models()
        norms = {name: each.norm() for name, each in models.items()}
        if all(map(torch.isfinite, norms.values())):
            for name, each in models.items():
                each.step(norms[name])
        else:
            self.zero_gradients()
        return {name: float(norm) for name, norm in norms.items()}

    def _models(self) -> dict[str, ShardedModel]:
        """Return the models by the metric of their norm."""
        critic = {} if self._values is None else {"critic_grad_norm": self._values.sharded}
        return {"grad_norm": self._policy} | critic

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield this rank's shards of the trained tensors of the model folder. No communication."""
        return self._folder.published(self._runs().items(), bucket_bytes=self.bucket_bytes)

    def _runs(self) -> dict[str, FlatRun]:
        return runs_of(self._model, rank=self._ranks.rank)

    def save_policy(self, path: Path) -> None:
        """Write weights, optimizer and random state, each rank its shards."""
        checkpoint.save(path, self._model, self._optimizer, self._ranks, bucket_bytes=self.bucket_bytes)

    def restore_policy(self, path: Path) -> None:
        """Restore weights, optimizer and random state, each rank its shards."""
        checkpoint.load(path, self._model, self._optimizer, self._ranks, bucket_bytes=self.bucket_bytes)

    def replace_weights(self, update: WeightUpdate) -> None:
        """Copy this rank's shards of ``update``, one tensor at a time, and reset the optimizer."""

        def fill() -> None:
            runs = self._runs()
            for name, tensor in update:
                self._folder.fill(name, tensor, runs)

        self._ranks.together(lambda: self._folder.check(update))
        self._ranks.together(fill)
        self._optimizer.state.clear()

    def export_folder(self, path: Path) -> None:
        """Write the Hugging Face folder, each rank its shards of common files."""
        export_folder(path, self._folder, self._runs().items(), self._ranks, bucket_bytes=self.bucket_bytes)


def _widen_rounded(model: Any, folder: FolderMap) -> None:
    """Make parameters float32, with the folder's numbers, where the folder has them so and the model rounded them."""
    rounded = {name: each for name, each in trained(model) if each.dtype.itemsize < folder.dtypes[name].itemsize}
    widen(rounded.values())
    folder.exact({name: FlatRun(each) for name, each in rounded.items()})
