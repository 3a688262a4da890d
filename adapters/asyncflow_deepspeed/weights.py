"""Weights for a publisher: each rank gives its share, and asks no other for anything.

for name, tensor in published(engine, rank=0, size=2): ...      # tensors, or a Shard of one
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from asyncflow_sdk.types import Shard
from asyncflow_torch.policy import named_weights

from .boxes import boxes
from .places import shards


def published(engine: Any, *, rank: int, size: int) -> Iterator[tuple[str, Any]]:
    """(name, tensor or Shard) of this rank's share of the policy: views of what it has, tied weights once.

    At stage 3 that is its run of each parameter, in rectangles; stored buffers are rank 0's. Below, where each rank has all, it is
    about as many bytes of whole tensors as the others give.
    """
    if engine.zero_optimization_stage() < 3:
        given = [0] * size
        for name, tensor in named_weights(engine.module):
            owner = given.index(min(given))
            given[owner] += tensor.numel() * tensor.element_size()
            if owner == rank:
                yield name, tensor
        return
    for place in shards(engine):
        for offset, start, shape in boxes(place.start, place.count, place.shape):
            piece = place.values[offset : offset + math.prod(shape)].view(shape)
            yield place.name, piece if shape == place.shape else Shard(piece, start, place.shape)
    if not rank:
        parameters = {name for name, _ in engine.module.named_parameters()}
        yield from ((name, each) for name, each in named_weights(engine.module) if name not in parameters)
