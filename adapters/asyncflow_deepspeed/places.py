"""Where a rank has its part of each parameter: what the optimizer steps on, and what is computed with.

for place in masters(engine):                           # float32, of all ranks together each element once, but at stage 0
    place.values                                        # a run of the parameter's elements, from number place.start on
for place in shards(engine): ...                        # the same of the model's own weights

ZeRO cuts flat: at stage 3 each parameter into as many runs as there are ranks; at stages 1 and 2 all of them, behind one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """``count`` elements of the parameter ``name``, which has ``shape``, from number ``start`` on; they lie in ``tensor`` from
    ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    start: int
    count: int
    tensor: Any
    offset: int

    @property
    def values(self) -> Any:
        """Live, flat."""
        return self.within(self.tensor)

    def within(self, like: Any) -> Any:
        """The same elements of another tensor that goes with this one, as a moment of the optimizer."""
        return like.detach().view(-1)[self.offset : self.offset + self.count]


def shape_of(weight: Any) -> tuple[int, ...]:
    """Of the whole parameter, of which a rank may hold a part."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def masters(engine: Any) -> Iterator[Place]:
    """Of a DeepSpeed engine on this rank, in the order of the model's parameters; ``tensor`` is what the optimizer's state goes by."""
    named, stage = engine.module.named_parameters(), engine.zero_optimization_stage()
    if stage == 3:
        zero = engine.optimizer
        for name, weight in named:
            group, offset, _ = zero.grad_position[zero.get_param_id(weight)]
            start, count = _run(weight)
            if count:
                yield Place(name, shape_of(weight), start, count, zero.fp32_partitioned_groups_flat[group], offset)
    elif stage:
        for name, weight in named:
            part = weight._hp_mapping
            if part is not None:
                (flat,) = engine.basic_optimizer.param_groups[part.param_group_index]["params"]
                run, offset = part.lp_fragment_address, part.hp_fragment_address.start
                yield Place(name, shape_of(weight), run.start, run.numel, flat, offset)
    else:
        whole = [master for group in engine.basic_optimizer.param_groups for master in group["params"]]
        for (name, weight), master in zip(named, whole, strict=True):
            yield Place(name, shape_of(weight), 0, weight.numel(), master, 0)


def shards(engine: Any) -> Iterator[Place]:
    """At stage 3, of the model's own weights."""
    for name, weight in engine.module.named_parameters():
        start, count = _run(weight)
        if count:
            yield Place(name, shape_of(weight), start, count, weight.ds_tensor.data, 0)


def give_weights(engine: Any) -> None:
    """Make the model's weights what the masters are, rounded, on all ranks. A collective."""
    stage = engine.zero_optimization_stage()
    with torch.no_grad():
        if stage == 3:
            for master, shard in zip(masters(engine), shards(engine), strict=True):
                shard.values.copy_(master.values)
            engine.empty_partition_cache()  # parameters that are kept whole are those of before
        elif stage:
            engine.optimizer.update_lp_params()
        else:
            weights = dict(engine.module.named_parameters())
            for master in masters(engine):
                weights[master.name].data.view(-1).copy_(master.values)


def _run(weight: Any) -> tuple[int, int]:
    """The elements that this rank has at stage 3: the first, and how many. The last runs may be shorter, or empty."""
    each = weight.ds_tensor.ds_numel
    start = each * torch.distributed.get_rank(weight.ds_process_group)
    return start, max(0, min(each, weight.ds_numel - start))
