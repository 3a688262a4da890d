"""Partitions: the elements of each parameter on this rank, of the float32 masters and of the model's weights.

for part in masters(engine):                            # float32; all ranks together hold each element once, except at stage 0
    part.values                                         # a run of the parameter's elements, from index part.start on
for name, tensor in published(engine, folder, rank=0, size=2, bucket_bytes=64 << 20): ...      # tensors, or a Shard of one

ZeRO splits flat ranges: at stage 3 each parameter into one run per rank, at stages 1 and 2 the
concatenation of all parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from asyncflow_torch.folder_map import FlatRun, FolderMap
from asyncflow_torch.policy import trained


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

    @property
    def run(self) -> FlatRun:
        """Live view for the map of the folder."""
        return FlatRun(self.values, self.start)

    def within(self, like: Any) -> Any:
        """Return the same elements of another tensor with the layout of ``tensor``, for example
        a moment of the optimizer."""
        return like.detach().view(-1)[self.offset : self.offset + self.count]


def shape_of(weight: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def masters(engine: Any) -> Iterator[FlatSlice]:
    """Yield this rank's masters in the order of the model's parameters. ``tensor`` is the key of
    the optimizer's state."""
    named, stage = trained(engine.module), engine.zero_optimization_stage()
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


def published(
    engine: Any, folder: FolderMap, *, rank: int, size: int, bucket_bytes: int
) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor or Shard) of this rank's part of the policy by the folder's names, without communication.

    Tensors of the model's dtype are views: at stage 3 of the rank's run of each parameter, at lower stages of whole
    parameters of about 1 / ``size`` of the bytes. Tensors of a higher precision are the masters'.
    """
    weights = dict(engine.module.named_parameters())
    wide = {name for name, dtype in folder.dtypes.items() if dtype.itemsize > weights[name].dtype.itemsize}
    return folder.published(_runs(engine, wide, rank, size), bucket_bytes=bucket_bytes)


def _runs(engine: Any, wide: Collection[str], rank: int, size: int) -> Iterator[tuple[str, FlatRun]]:
    """Yield the elements that this rank publishes. ``wide``: parameters published from their masters."""
    stage, given = engine.zero_optimization_stage(), [0] * size
    owned: dict[str, FlatRun] = {}
    for name, weight in trained(engine.module) if stage < 3 else ():
        owner = given.index(min(given))
        given[owner] += weight.numel() * weight.element_size()
        if owner == rank:
            owned[name] = FlatRun(weight)
    low = owned.items() if stage < 3 else [(part.name, part.run) for part in _shards(engine)]
    high = [(part.name, part.run) for part in masters(engine) if stage or part.name in owned] if wide else []
    yield from ((name, run) for name, run in low if name not in wide)
    yield from ((name, run) for name, run in high if name in wide)


def _shards(engine: Any) -> Iterator[FlatSlice]:
    """Yield this rank's parts of the model's weights. Stage 3 only."""
    for name, weight in trained(engine.module):
        start, count = _run(weight)
        if count:
            yield FlatSlice(name, shape_of(weight), start, count, weight.ds_tensor.data, 0)


def _run(weight: Any) -> tuple[int, int]:
    """Return first element and number of elements on this rank at stage 3. The last runs may be shorter or empty."""
    per_rank = weight.ds_tensor.ds_numel
    start = per_rank * torch.distributed.get_rank(weight.ds_process_group)
    return start, max(0, min(per_rank, weight.ds_numel - start))
