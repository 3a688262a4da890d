"""Partitions: the elements of each parameter on this rank, of the float32 masters and of the model's weights.

for part in masters(engine):                            # float32; all ranks together hold each element once, except at stage 0
    part.values                                         # a run of the parameter's elements, from index part.start on
for name, tensor in published(engine, rank=0, size=2): ...      # tensors, or a Shard of one

ZeRO splits flat ranges: at stage 3 each parameter into one run per rank, at stages 1 and 2 the
concatenation of all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncflow_sdk.types import Shard
from asyncflow_torch.policy import named_weights


@dataclass(frozen=True)
class FlatSlice:
    """Elements ``start`` to ``start + count`` of the flattened parameter ``name`` of ``shape``.
    They lie in ``tensor`` from ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    tensor: Any
    offset: int

    @property
    def values(self) -> Any:
        """Flat live view."""
        return self.within(self.tensor)

    def within(self, like: Any) -> Any:
        """Return the same elements of another tensor with the layout of ``tensor``, for example
        a moment of the optimizer."""
        return like.detach().view(-1)[self.offset : self.offset + self.count]


class Rectangle(NamedTuple):
    """Part of a flat range: its first element in the range, its start in the tensor, and its shape."""

    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


def shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def masters(engine: Any) -> Iterator[FlatSlice]:
    """Yield this rank's masters in the order of the model's parameters. ``tensor`` is the key of
    the optimizer's state."""
    named, stage = engine.module.named_parameters(), engine.zero_optimization_stage()
    if stage == 3:
        zero = engine.optimizer
        for name, weight in named:
            group, offset, _ = zero.grad_position[zero.get_param_id(weight)]
            start, count = _run(weight)
            if count:
                yield FlatSlice(
                    name, shape_of(weight), start, count, zero.fp32_partitioned_groups_flat[group], offset
                )
    elif stage:
        for name, weight in named:
            part = weight._hp_mapping
            if part is not None:
                (flat,) = engine.basic_optimizer.param_groups[part.param_group_index]["params"]
                run, offset = part.lp_fragment_address, part.hp_fragment_address.start
                yield FlatSlice(name, shape_of(weight), run.start, run.numel, flat, offset)
    else:
        whole = [master for group in engine.basic_optimizer.param_groups for master in group["params"]]
        for (name, weight), master in zip(named, whole, strict=True):
            yield FlatSlice(name, shape_of(weight), 0, weight.numel(), master, 0)


def give_weights(engine: Any) -> None:
    """Round the masters into the model's weights on all ranks. A collective."""
    stage = engine.zero_optimization_stage()
    with torch.no_grad():
        if stage == 3:
            for master, shard in zip(masters(engine), _shards(engine), strict=True):
                shard.values.copy_(master.values)
            engine.empty_partition_cache()  # parameters kept whole have the old values
        elif stage:
            engine.optimizer.update_lp_params()
        else:
            weights = dict(engine.module.named_parameters())
            for master in masters(engine):
                weights[master.name].data.view(-1).copy_(master.values)


def published(engine: Any, *, rank: int, size: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or Shard) of this rank's part of the policy: views, tied weights once, no communication.

    At stage 3 these are the rectangles of its run of each parameter, and on rank 0 the stored
    buffers. At lower stages each rank holds all weights and yields whole tensors of about 1 /
    ``size`` of the bytes.
    """
    if engine.zero_optimization_stage() < 3:
        given = [0] * size
        for name, tensor in named_weights(engine.module):
            owner = given.index(min(given))
            given[owner] += tensor.numel() * tensor.element_size()
            if owner == rank:
                yield name, tensor
        return
    for part in _shards(engine):
        for offset, start, shape in rectangles(part.start, part.count, part.shape):
            piece = part.values[offset : offset + math.prod(shape)].view(shape)
            yield part.name, piece if shape == part.shape else Shard(piece, start, part.shape)
    if not rank:
        parameters = {name for name, _ in engine.module.named_parameters()}
        yield from ((name, each) for name, each in named_weights(engine.module) if name not in parameters)


def rectangles(start: int, count: int, shape: tuple[int, ...]) -> Iterator[Rectangle]:
    """Split elements ``start`` to ``start + count`` of a flattened tensor of ``shape`` into
    rectangles, at most two per dimension.

    rectangles(5, 9, (4, 4))    # the rest of row 1, row 2, the beginning of row 3
    [(0, (1, 1), (1, 3)), (3, (2, 0), (1, 4)), (7, (3, 0), (1, 2))]
    """
    if len(shape) < 2:
        yield Rectangle(0, (start,) * len(shape), (count,) * len(shape))
        return
    inner = math.prod(shape[1:])
    done = 0
    while done < count:
        row, column = divmod(start + done, inner)
        rows = 0 if column else (count - done) // inner
        if rows:
            yield Rectangle(done, (row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            done += rows * inner
            continue
        size = min(inner - column, count - done)
        for offset, begins, sizes in rectangles(column, size, shape[1:]):
            yield Rectangle(done + offset, (row, *begins), (1, *sizes))
        done += size


def _shards(engine: Any) -> Iterator[FlatSlice]:
    """Yield this rank's parts of the model's weights. Stage 3 only."""
    for name, weight in engine.module.named_parameters():
        start, count = _run(weight)
        if count:
            yield FlatSlice(name, shape_of(weight), start, count, weight.ds_tensor.data, 0)


def _run(weight: Any) -> tuple[int, int]:
    """Return first element and number of elements on this rank at stage 3. The last runs may be shorter or empty."""
    per_rank = weight.ds_tensor.ds_numel
    start = per_rank * torch.distributed.get_rank(weight.ds_process_group)
    return start, max(0, min(per_rank, weight.ds_numel - start))
