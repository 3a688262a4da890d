"""Shards: this rank's rows of each tensor.

runs = runs_of(model, rank=0)                                # for `FolderMap`, which publishes, loads and exports them
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncflow_torch.folder_map import FlatRun


class LocalRows(NamedTuple):
    """``tensor``: rows from ``start`` on of a tensor of shape ``whole``, or all of an unsharded one. A live view."""

    tensor: Any
    start: int
    whole: tuple[int, ...]

    @property
    def first_element(self) -> int:
        """Index of the first element in the flattened whole."""
        return self.start * math.prod(self.whole[1:])


def local(tensor: Any, rank: int) -> LocalRows | None:
    """Return the rows of ``rank``; None if it has none. FSDP splits rows evenly, the last ranks
    get fewer or none. Unsharded tensors belong to rank 0."""
    if not isinstance(tensor, DTensor):
        return None if rank else LocalRows(tensor.detach(), 0, tuple(tensor.shape))
    placement = tensor.placements[0]
    assert placement.is_shard(0), placement
    rows, whole = tensor.detach().to_local(), tuple(tensor.shape)
    per_rank = -(-whole[0] // tensor.device_mesh.size())
    return LocalRows(rows, min(rank * per_rank, whole[0]), whole) if rows.numel() else None


def as_shards(model: Any) -> Any:
    """Return ``model`` with its parameters in shards. With ``reshard_after_forward=False`` they are whole after a
    pass without a backward pass: what is written into them then would be lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def runs_of(model: Any, *, rank: int) -> dict[str, FlatRun]:
    """Return the elements of each parameter on this rank, by the model's names, tied ones once. No communication."""
    found = ((name, local(parameter, rank)) for name, parameter in as_shards(model).named_parameters())
    return {name: FlatRun(rows.tensor, rows.first_element) for name, rows in found if rows is not None}
