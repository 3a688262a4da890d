"""ShardedModel: a model in shards and the AdamW that steps on them, for the policy and for the critic.

sharded = ShardedModel(model, mesh, options, learning_rate=1e-5, compute=torch.bfloat16)
norm = sharded.norm()                                    # of the gradients of all ranks
if isfinite(norm): sharded.step(norm)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncflow_torch.critic import ValueCritic
from asyncflow_torch.policy import trained
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.recomputation import layers_of, recompute_activations
from asyncflow_torch.train_options import ShardedOptions

from . import checkpoint


class ShardedModel:
    """``model`` is sharded in place, layer by layer: a process holds its shards and one whole layer at a time.
    ``compute``: dtype of forward and backward passes; weights and sums of gradients are float32, and weights of a
    frozen model as they are. ``reshard``: gather each layer again for its backward pass."""

    def __init__(
        self, model: Any, mesh: Any, options: ShardedOptions, *, learning_rate: float, compute: Any, reshard: bool
    ) -> None:  # fmt: skip
        precision = MixedPrecisionPolicy()
        if compute.itemsize < torch.float32.itemsize:
            precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if options.offload else OffloadPolicy()
        given: dict[str, Any] = {
            "mesh": mesh, "mp_policy": precision, "reshard_after_forward": reshard, "offload_policy": offload,
        }  # fmt: skip
        if options.gradient_checkpointing:
            recompute_activations(model)
        # FSDP shards weights of one dtype only.
        widened = not options.frozen or len({each.dtype for each in model.parameters()}) > 1
        for layer in layers_of(model):
            if widened:
                widen(layer.parameters())
            fully_shard(layer, **given)
        if widened:
            widen(model.parameters())
        self.model = fully_shard(model, **given)
        self._max_grad_norm, self._parameters = options.max_grad_norm, [each for _, each in trained(self.model)]
        self.optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, **options.adamw)

    def divide_gradients(self, number: float) -> None:
        """Divide this rank's shards of the gradients."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(number)

    def norm(self) -> Any:
        """Return the norm of the gradients of all ranks: a scalar tensor, the same on all. A collective."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, norm: Any) -> None:
        """Clip the gradients, whose norm is ``norm``, and step."""
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
        self.optimizer.step()


class FsdpCritic(ValueCritic):
    """Critic in shards."""

    def __init__(self, sharded: ShardedModel, ranks: Ranks, *, bucket_bytes: int) -> None:
        super().__init__(sharded.model)
        self.sharded, self._ranks, self._bucket_bytes = sharded, ranks, bucket_bytes

    def backward(self, values: Any, gradient: Any, *, last: bool) -> None:
        """Add the gradients, averaged over ranks by FSDP; ``gradient`` is scaled for it."""
        values.backward(gradient)

    def save(self, path: Path) -> None:
        """Write weights and optimizer. A collective."""
        checkpoint.save(path, self.model, self.sharded.optimizer, self._ranks, bucket_bytes=self._bucket_bytes)

    def load(self, path: Path) -> None:
        """Restore weights and optimizer. A collective."""
        checkpoint.load(path, self.model, self.sharded.optimizer, self._ranks, bucket_bytes=self._bucket_bytes)


def widen(parameters: Iterable[Any]) -> None:
    """Convert trained parameters to float32. Layers in shards are float32 already."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.dtype.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()
