"""A sharded engine's state on disk, in the format of the plain engine's: any number of ranks goes on from what any other saved.

PATH/weights.safetensors      float32, named as in named_weights
PATH/optimizer.safetensors    "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" and "random_state"
PATH/state.json               written last: without it the checkpoint is not complete
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncflow_sdk.errors import ConfigError
from asyncflow_torch.checkpoint import FORMAT, RANDOM_STATE, check_format
from asyncflow_torch.policy import copy_tokenizer, named_weights
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.sharded_files import Kind, Reader, nbytes_of, write_together

from .shards import local

FILE_BYTES = 5 << 30
"""Of an exported file, unless a single tensor is larger."""


def save(path: Path, model: Any, optimizer: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Write the state of both, and rank 0's random state, below ``path``, which all ranks see. A collective."""

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            (path / "state.json").unlink(missing_ok=True)

    ranks.together(begin)
    _write(path / "weights.safetensors", dict(named_weights(model)), ranks, bucket_bytes)
    state = {RANDOM_STATE: torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}/{name}"] = value
    _write(path / "optimizer.safetensors", state, ranks, bucket_bytes)

    def end() -> None:
        if ranks.first:
            (path / "state.json").write_text(json.dumps({"format": FORMAT}))

    ranks.together(end)


def load(path: Path, model: Any, optimizer: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Restore what ``save`` wrote, or a plain TorchEngine did. Raises ConfigError for what is no checkpoint of this model, before
    anything is changed. A collective."""
    weights = dict(named_weights(model))

    def look() -> tuple[Reader, Reader]:
        check_format(path)
        saved = Reader(path / "weights.safetensors")
        kinds = {name: _kind(tensor) for name, tensor in weights.items()}
        unlike = [name for name in kinds.keys() | saved.kinds.keys() if kinds.get(name) != saved.kinds.get(name)]
        if unlike:
            saved.close()
            raise ConfigError(f"checkpoint {path} is of another model; these differ: {', '.join(sorted(unlike))}")
        return saved, Reader(path / "optimizer.safetensors")

    def read() -> None:
        for name, tensor in weights.items():
            _read(saved, name, tensor, ranks, bucket_bytes)
        optimizer.state.clear()
        torch.set_rng_state(state.whole(RANDOM_STATE))
        parameters = dict(model.named_parameters())
        for name, (dtype, shape) in state.kinds.items():
            key, _, of = name.partition("/")
            if name == RANDOM_STATE:
                continue
            parameter = parameters[of]
            if shape == tuple(parameter.shape):
                value = torch.zeros_like(parameter, dtype=dtype)
                _read(state, name, value, ranks, bucket_bytes)
            else:
                value = state.whole(name).to(parameter.device)
            optimizer.state[parameter][key] = value

    saved, state = ranks.together(look)
    with saved, state:
        ranks.together(read)


def export(
    path: Path, model: Any, dtypes: Mapping[str, Any], source: str, ranks: Ranks, *, bucket_bytes: int,
    file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Write the policy as a Hugging Face folder, in ``dtypes``, with the tokenizer of ``source``. A collective."""

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            model.config.save_pretrained(path)
            copy_tokenizer(source, path, "generation_config.json")

    ranks.together(begin)
    weights = dict(named_weights(model))
    files: list[dict[str, Any]] = [{}]
    room = file_bytes
    for name, tensor in weights.items():
        size = nbytes_of((dtypes[name], tuple(tensor.shape)))
        if files[-1] and size > room:
            files.append({})
            room = file_bytes
        files[-1][name] = tensor
        room -= size
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for file, tensors in zip(names, files, strict=True):
        _write(path / file, tensors, ranks, bucket_bytes, dtypes)

    def end() -> None:
        if ranks.first and len(files) > 1:
            where = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
            size = sum(nbytes_of((dtypes[name], tuple(tensor.shape))) for name, tensor in weights.items())
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    ranks.together(end)


def _write(
    path: Path, tensors: Mapping[str, Any], ranks: Ranks, bucket_bytes: int, dtypes: Mapping[str, Any] | None = None
) -> None:  # fmt: skip
    def pieces() -> Iterator[tuple[str, Any, int]]:
        for name, tensor in tensors.items():
            mine = local(tensor, ranks.rank)
            if mine is not None:
                yield name, mine.tensor, mine.begins

    kinds = {name: _kind(tensor, dtypes and dtypes[name]) for name, tensor in tensors.items()}
    write_together(path, kinds, pieces(), ranks, bucket_bytes=bucket_bytes)


def _read(file: Reader, name: str, tensor: Any, ranks: Ranks, bucket_bytes: int) -> None:
    """This rank's rows of it; what is not sharded, all."""
    mine = local(tensor, ranks.rank if isinstance(tensor, DTensor) else 0)
    if mine is not None:
        file.read(name, mine.tensor, mine.begins, bucket_bytes=bucket_bytes)


def _kind(tensor: Any, dtype: Any = None) -> Kind:
    return dtype or tensor.dtype, tuple(tensor.shape)
