"""Shards: this rank's rows of each tensor, published and loaded without communication.

for name, shard in published(model, dtypes, rank=0, bucket_bytes=64 << 20): ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_sdk.types import Shard
from asyncflow_torch.policy import named_weights, published_tensors


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


def published(model: Any, dtypes: Mapping[str, Any], *, rank: int, bucket_bytes: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or Shard) of this rank's part of the policy in ``dtypes``, tied weights once.

    Converted tensors come in pieces of at most ``bucket_bytes``, at least one row; all others are
    views. A reader that drops each piece before the next therefore needs one bucket of memory.
    """
    for name, tensor in named_weights(model):
        rows = local(tensor, rank)
        if rows is None:
            continue
        dtype = dtypes[name]
        if rows.tensor.dtype == dtype:
            yield name, _shard(rows.tensor, rows.start, rows.whole)
            continue
        if not rows.whole:
            yield name, rows.tensor.to(dtype)
            continue
        row_bytes = max(1, rows.tensor[:1].numel() * dtype.itemsize)
        start = rows.start
        for piece in rows.tensor.split(max(1, bucket_bytes // row_bytes)):
            yield name, _shard(piece.to(dtype), start, rows.whole)
            start += len(piece)


def take(model: Any, dtypes: Mapping[str, Any], update: WeightUpdate, *, rank: int) -> Callable[[], None]:
    """Check a version and return a function that copies this rank's shards of it. Raises WeightMismatch."""
    weights = dict(named_weights(model))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    tensors = published_tensors(update, shapes, dtypes)

    def copy() -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                rows = local(weights[name], rank if isinstance(weights[name], DTensor) else 0)
                if rows is not None and rows.whole:
                    rows.tensor.copy_(tensor[rows.start : rows.start + len(rows.tensor)])
                elif rows is not None:
                    rows.tensor.copy_(tensor)

    return copy


def _shard(rows: Any, start: int, whole: tuple[int, ...]) -> Any:
    if tuple(rows.shape) == whole:
        return rows
    return Shard(rows, (start, *(0 for _ in whole[1:])), whole)
