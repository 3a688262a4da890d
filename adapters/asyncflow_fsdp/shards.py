"""Shards: what this rank has of each tensor, and how it is given to a publisher, without a word to the other ranks.

for name, shard in published(model, dtypes, rank=0, bucket_bytes=64 << 20): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.types import Shard
from asyncflow_torch.policy import named_weights, published_tensors


class Local(NamedTuple):
    """``tensor``: rows ``start`` and on of one of shape ``whole``; all of it where it is not sharded. A live view."""

    tensor: Any
    start: int
    whole: tuple[int, ...]

    @property
    def begins(self) -> int:
        """The number of its first element in the whole."""
        size = 1
        for length in self.whole[1:]:
            size *= length
        return self.start * size


def local(tensor: Any, rank: int) -> Local | None:
    """What rank ``rank`` has of a tensor, of which FSDP gives each rank rows, the last ones perhaps fewer or none; None where that is nothing.
    What is not sharded is rank 0's."""
    if not isinstance(tensor, DTensor):
        return None if rank else Local(tensor.detach(), 0, tuple(tensor.shape))
    placement = tensor.placements[0]
    assert placement.is_shard(0), placement
    mine, whole = tensor.detach().to_local(), tuple(tensor.shape)
    each = -(-whole[0] // tensor.device_mesh.size())
    return Local(mine, min(rank * each, whole[0]), whole) if mine.numel() else None


def published(model: Any, dtypes: Mapping[str, Any], *, rank: int, bucket_bytes: int) -> Iterator[tuple[str, Any]]:
    """(name, tensor or Shard) of this rank's part of the policy, in the dtypes of ``dtypes``, tied weights once.

    What is converted comes in pieces of at most ``bucket_bytes``, or of one row where that is larger; everything else is a view. So
    beyond its shards a rank holds one bucket, if whoever reads lets go of each piece before the next.
    """
    for name, tensor in named_weights(model):
        mine = local(tensor, rank)
        if mine is None:
            continue
        dtype = dtypes[name]
        if mine.tensor.dtype == dtype:
            yield name, _given(mine.tensor, mine.start, mine.whole)
            continue
        if not mine.whole:
            yield name, mine.tensor.to(dtype)
            continue
        row = max(1, mine.tensor[:1].numel() * dtype.itemsize)
        start = mine.start
        for rows in mine.tensor.split(max(1, bucket_bytes // row)):
            yield name, _given(rows.to(dtype), start, mine.whole)
            start += len(rows)


def take(model: Any, dtypes: Mapping[str, Any], update: WeightUpdate, *, rank: int) -> Callable[[], None]:
    """Check that a version fits. Returns what makes this rank's shards those of the version. Raises WeightMismatch."""
    weights = dict(named_weights(model))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    tensors = published_tensors(update, shapes, dtypes)

    def fill() -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                mine = local(weights[name], rank if isinstance(weights[name], DTensor) else 0)
                if mine is not None and mine.whole:
                    mine.tensor.copy_(tensor[mine.start : mine.start + len(mine.tensor)])
                elif mine is not None:
                    mine.tensor.copy_(tensor)

    return fill


def _given(rows: Any, start: int, whole: tuple[int, ...]) -> Any:
    if tuple(rows.shape) == whole:
        return rows
    return Shard(rows, (start, *(0 for _ in whole[1:])), whole)
