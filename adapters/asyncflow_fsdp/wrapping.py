"""Wrapping: a plain model becomes one in shards. Its weights are float32 from then on, whatever is computed with.

sharded = shard(model, mesh, compute=torch.bfloat16, offload=True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asyncflow_torch.recomputing import compute_again, layers_of


def shard(
    model: Any, mesh: Any, *, compute: Any, offload: bool = False, reshard_after_forward: bool = True,
    checkpointing: bool = False,
) -> Any:  # fmt: skip
    """Shard ``model`` in place, layer by layer: of more than its shards, a process holds one layer at a time.

    ``compute``: the dtype of the forward and backward pass; gradients are summed over ranks in float32. ``offload``: shards and
    optimizer stay on the CPU. ``reshard_after_forward``: layers are gathered for the backward pass once more (False keeps
    them). ``checkpointing``: what is within a layer is computed again for the backward pass, and not kept.
    """
    precision = MixedPrecisionPolicy()
    if compute != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh, "mp_policy": precision, "reshard_after_forward": reshard_after_forward,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
    }  # fmt: skip
    if checkpointing:
        compute_again(model)
    for layer in layers_of(model):
        _widen(layer)
        fully_shard(layer, **options)
    _widen(model)
    return fully_shard(model, **options)


def _widen(module: Any) -> None:
    """Parameters only: a buffer is computed with as it is. Those of layers that are sharded already are float32."""
    for parameter in module.parameters():
        if parameter.dtype.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()
