"""Checkpoints of a model in shards: each rank writes and reads its own rows. Format:
`asyncflow_torch.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncflow_torch.checkpoint import RANDOM_STATE, open_checkpoint, state_by_name, write_checkpoint
from asyncflow_torch.policy import stored_tensors
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import FileParts, Piece, Reader, kind_of

from .shards import as_shards, local


def save(path: Path, model: Any, optimizer: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Write model, optimizer, and the random state of rank 0 below ``path``, a directory visible
    to all ranks. A collective."""
    state = state_by_name(optimizer, as_shards(model).named_parameters())
    weights = _parts(dict(stored_tensors(model)), ranks)
    write_checkpoint(path, weights, _parts(state, ranks), ranks, bucket_bytes=bucket_bytes)


def load(path: Path, model: Any, optimizer: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Restore a checkpoint in place. Raises ConfigError, before any change, if it is not one of
    this model. A collective."""
    weights = dict(stored_tensors(as_shards(model)))

    def read() -> None:
        for name, tensor in weights.items():
            _read(saved, name, tensor, ranks, bucket_bytes)
        optimizer.state.clear()
        torch.set_rng_state(state.whole(RANDOM_STATE))
        parameters = dict(model.named_parameters())
        for name in state.kinds.keys() - {RANDOM_STATE}:
            key, _, owner = name.partition("/")
            dtype, shape = state.kinds[name]
            parameter = parameters[owner]
            if shape == tuple(parameter.shape):
                value = torch.zeros_like(parameter, dtype=dtype)
                _read(state, name, value, ranks, bucket_bytes)
            else:
                value = state.whole(name).to(parameter.device)
            optimizer.state[parameter][key] = value

    kinds = {name: kind_of(tensor) for name, tensor in weights.items()}
    with open_checkpoint(path, kinds, ranks) as (saved, state):
        ranks.together(read)


def _parts(tensors: Mapping[str, Any], ranks: Ranks) -> FileParts:
    return FileParts({name: kind_of(tensor) for name, tensor in tensors.items()}, _pieces(tensors, ranks))


def _pieces(tensors: Mapping[str, Any], ranks: Ranks) -> Iterator[Piece]:
    for name, tensor in tensors.items():
        shard = local(tensor, ranks.rank)
        if shard is not None:
            yield name, shard.tensor, shard.first_element


def _read(file: Reader, name: str, tensor: Any, ranks: Ranks, bucket_bytes: int) -> None:
    """Read this rank's rows of a sharded tensor; all of another tensor."""
    shard = local(tensor, ranks.rank if isinstance(tensor, DTensor) else 0)
    if shard is not None:
        file.read(name, shard.tensor, shard.first_element, bucket_bytes=bucket_bytes)
