"""Checkpoints and exports of a model under ZeRO: each rank writes and reads its own elements, at
any stage. Format: `asyncflow_torch.checkpoint`. DeepSpeed's own checkpoints are pickles, and of
a fixed number of ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_torch.checkpoint import RANDOM_STATE, open_checkpoint, write_checkpoint
from asyncflow_torch.export import export_folder
from asyncflow_torch.folder_map import FolderMap
from asyncflow_torch.policy import stored_tensors, trained
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.schedules import steps_made
from asyncflow_torch.sharded_files import FileParts, Kind, Piece, kind_of

from .partitions import FlatSlice, give_weights, masters, shape_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, engine: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Write masters, optimizer, and the random state of rank 0 below ``path``, a directory
    visible to all ranks. A collective."""
    optimizer, buffers = engine.basic_optimizer, _buffers(engine)
    parameters = _parameter_kinds(engine)
    held = list(_own(engine, ranks))
    weights = FileParts(
        parameters | {name: kind_of(each) for name, each in buffers.items()},
        [*((part.name, part.values, part.start) for part in held), *_once(buffers, ranks)],
    )
    state = {RANDOM_STATE: torch.get_rng_state()}
    kinds: dict[str, Kind] = {}
    pieces: list[Piece] = []
    if steps := steps_made(optimizer):
        state |= {f"step/{name}": torch.tensor(float(steps)) for name in parameters}
        kinds = _moment_kinds(parameters)
        pieces = [
            (f"{key}/{part.name}", part.within(optimizer.state[part.tensor][key]), part.start)
            for key in _MOMENTS
            for part in held
        ]
    kinds |= {name: kind_of(each) for name, each in state.items()}
    parts = FileParts(kinds, [*pieces, *_once(state, ranks)])
    write_checkpoint(path, weights, parts, ranks, bucket_bytes=bucket_bytes)


def load(path: Path, engine: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Restore a checkpoint in place. Raises ConfigError, before any change, if it is not one of
    this model. A collective."""
    parameters, buffers = _parameter_kinds(engine), _buffers(engine)
    kinds = parameters | {name: kind_of(each) for name, each in buffers.items()}

    def read() -> None:
        optimizer = engine.basic_optimizer
        held = list(masters(engine))
        steps = max((int(state.whole(name)) for name in state.kinds if name.startswith("step/")), default=0)
        if steps or optimizer.state:
            _set_steps(optimizer, held, steps)
        for part in held:
            saved.read(part.name, part.values, part.start, bucket_bytes=bucket_bytes)
            for key in _MOMENTS if steps else ():
                into = part.within(optimizer.state[part.tensor][key])
                state.read(f"{key}/{part.name}", into, part.start, bucket_bytes=bucket_bytes)
        for name, buffer in buffers.items():
            saved.read(name, buffer, bucket_bytes=bucket_bytes)
        torch.set_rng_state(state.whole(RANDOM_STATE))

    with open_checkpoint(path, kinds, ranks, moments=_moment_kinds(parameters)) as (saved, state):
        ranks.together(read)
    give_weights(engine)


def take(engine: Any, folder: FolderMap, update: WeightUpdate, ranks: Ranks) -> None:
    """Copy a version into the masters, reset the optimizer, and round the masters into the
    model's weights. Raises WeightMismatch before any change. A collective."""

    def fill() -> None:
        held = list(masters(engine))
        if engine.basic_optimizer.state:
            _set_steps(engine.basic_optimizer, held, 0)
        runs = {part.name: part.run for part in held}
        for name, tensor in update:
            folder.fill(name, tensor, runs)

    ranks.together(lambda: folder.check(update))
    ranks.together(fill)
    give_weights(engine)


def export(path: Path, engine: Any, folder: FolderMap, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Write a Hugging Face folder, trained tensors from the masters in the published dtypes. A collective."""
    runs = [(part.name, part.run) for part in _own(engine, ranks)]
    export_folder(path, folder, runs, ranks, bucket_bytes=bucket_bytes)


def _own(engine: Any, ranks: Ranks) -> Iterator[FlatSlice]:
    """Yield the masters written by this rank: its partition, or at stage 0 an equal part of each."""
    for part in masters(engine):
        if engine.zero_optimization_stage():
            yield part
            continue
        low, high = (part.count * each // ranks.size for each in (ranks.rank, ranks.rank + 1))
        if low < high:
            yield dataclasses.replace(part, start=low, count=high - low, offset=low)


def _once(tensors: Mapping[str, Any], ranks: Ranks) -> list[Piece]:
    """Return pieces of whole tensors, written by rank 0."""
    return [(name, tensor, 0) for name, tensor in tensors.items()] if ranks.first else []


def _set_steps(optimizer: Any, held: list[FlatSlice], steps: int) -> None:
    """Set the number of steps and zero the moments, in place where they exist: DeepSpeed refers to the tensors."""
    for master in {id(part.tensor): part.tensor for part in held}.values():
        state = optimizer.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state |= {key: torch.zeros_like(master) for key in _MOMENTS}
        state["step"].fill_(steps)
        for key in _MOMENTS:
            state[key].zero_()


def _shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    return {name: shape_of(weight) for name, weight in trained(engine.module)}


def _parameter_kinds(engine: Any) -> dict[str, Kind]:
    return {name: (torch.float32, shape) for name, shape in _shapes(engine).items()}


def _moment_kinds(parameters: Mapping[str, Kind]) -> dict[str, Kind]:
    return {f"{key}/{name}": kind for key in _MOMENTS for name, kind in parameters.items()}


def _buffers(engine: Any) -> dict[str, Any]:
    """Return stored tensors other than parameters. They are the same on all ranks."""
    parameters = {name for name, _ in engine.module.named_parameters()}
    return {name: tensor for name, tensor in stored_tensors(engine.module) if name not in parameters}
