"""A DeepSpeed engine's state on disk, in the format of the plain engine's: any number of ranks, at any stage, goes on from what any other
saved.

PATH/weights.safetensors      float32, named as in named_weights
PATH/optimizer.safetensors    "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" and "random_state"
PATH/state.json               written last: without it the checkpoint is not complete

Each rank writes what it steps on, and reads what it will step on: nothing is gathered, and nothing pickled. DeepSpeed's own
checkpoints are pickles, and of one number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.interfaces import WeightUpdate
from asyncflow_torch.checkpoint import FORMAT, RANDOM_STATE, check_format
from asyncflow_torch.policy import copy_tokenizer, named_weights, published_tensors
from asyncflow_torch.ranks import Ranks
from asyncflow_torch.schedules import steps_made
from asyncflow_torch.sharded_files import Kind, Reader, nbytes_of, write_together

from .places import Place, give_weights, masters, shape_of

FILE_BYTES = 5 << 30
"""Of an exported file, unless a single tensor is larger."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(path: Path, engine: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Write what is needed to go on, and rank 0's random state, below ``path``, which all ranks see. A collective."""

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            (path / "state.json").unlink(missing_ok=True)

    ranks.together(begin)
    optimizer, shapes = engine.basic_optimizer, _shapes(engine)
    held = list(_own(engine, ranks))
    weights = {name: (torch.float32, shape) for name, shape in shapes.items()}
    buffers = _buffers(engine)
    _write(
        path / "weights.safetensors", weights | {name: _kind(each) for name, each in buffers.items()},
        [(place.name, place.values, place.start) for place in held], buffers, ranks, bucket_bytes,
    )  # fmt: skip
    state = {RANDOM_STATE: torch.get_rng_state()}
    moments: dict[str, Kind] = {}
    pieces: list[tuple[str, Any, int]] = []
    if steps := steps_made(optimizer):
        state |= {f"step/{name}": torch.tensor(float(steps)) for name in shapes}
        for key in _MOMENTS:
            moments |= {f"{key}/{name}": kind for name, kind in weights.items()}
            pieces += [(f"{key}/{p.name}", p.within(optimizer.state[p.tensor][key]), p.start) for p in held]
    kinds = moments | {name: _kind(each) for name, each in state.items()}
    _write(path / "optimizer.safetensors", kinds, pieces, state, ranks, bucket_bytes)

    def end() -> None:
        if ranks.first:
            (path / "state.json").write_text(json.dumps({"format": FORMAT}))

    ranks.together(end)


def load(path: Path, engine: Any, ranks: Ranks, *, bucket_bytes: int) -> None:
    """Restore what ``save`` wrote, here or in a TorchEngine. Raises ConfigError for what is no checkpoint of this model, before
    anything is changed. A collective."""
    weights = {name: (torch.float32, shape) for name, shape in _shapes(engine).items()}
    buffers = _buffers(engine)
    kinds = weights | {name: _kind(each) for name, each in buffers.items()}

    def look() -> tuple[Reader, Reader]:
        check_format(path)
        with contextlib.ExitStack() as opened:
            saved, state = (
                opened.enter_context(Reader(path / f"{each}.safetensors")) for each in ("weights", "optimizer")
            )
            moments = {f"{key}/{name}": kind for key in _MOMENTS for name, kind in weights.items()}
            unlike = _unlike(kinds, saved.kinds)
            if any(name.startswith(f"{_MOMENTS[0]}/") for name in state.kinds):
                unlike += _unlike(moments, {name: state.kinds[name] for name in state.kinds.keys() & moments.keys()})
            if unlike:
                raise ConfigError(f"checkpoint {path} is of another model; these differ: {', '.join(unlike)}")
            opened.pop_all()
            return saved, state

    def read() -> None:
        optimizer = engine.basic_optimizer
        held = list(masters(engine))
        steps = max((int(state.whole(name)) for name in state.kinds if name.startswith("step/")), default=0)
        if steps or optimizer.state:
            for master in {id(place.tensor): place.tensor for place in held}.values():
                _set_state(optimizer, master, steps)
        for place in held:
            saved.read(place.name, place.values, place.start, bucket_bytes=bucket_bytes)
            for key in _MOMENTS if steps else ():
                into = place.within(optimizer.state[place.tensor][key])
                state.read(f"{key}/{place.name}", into, place.start, bucket_bytes=bucket_bytes)
        for name, buffer in buffers.items():
            saved.read(name, buffer, bucket_bytes=bucket_bytes)
        torch.set_rng_state(state.whole(RANDOM_STATE))

    saved, state = ranks.together(look)
    with saved, state:
        ranks.together(read)
    give_weights(engine)


def take(engine: Any, update: WeightUpdate, ranks: Ranks) -> None:
    """Make the masters those of a version, of a new optimizer, and the model's weights what they are. Raises WeightMismatch if the
    version does not fit, before anything is changed. A collective."""
    buffers = _buffers(engine)
    dtypes = {name: weight.dtype for name, weight in engine.module.named_parameters()}
    dtypes |= {name: buffer.dtype for name, buffer in buffers.items()}
    shapes = _shapes(engine) | {name: tuple(buffer.shape) for name, buffer in buffers.items()}

    def fill() -> None:
        held: dict[str, list[Place]] = {}
        for place in masters(engine):
            held.setdefault(place.name, []).append(place)
        optimizer = engine.basic_optimizer
        if optimizer.state:
            for master in {id(each.tensor): each.tensor for places in held.values() for each in places}.values():
                _set_state(optimizer, master, 0)
        with torch.no_grad():
            for name, tensor in tensors:
                if name in buffers:
                    buffers[name].copy_(tensor)
                for place in held.get(name, ()):
                    place.values.copy_(tensor.reshape(-1)[place.start : place.start + place.count])

    tensors = ranks.together(lambda: published_tensors(update, shapes, dtypes))
    ranks.together(fill)
    give_weights(engine)


def export(
    path: Path, engine: Any, source: str, ranks: Ranks, *, bucket_bytes: int, file_bytes: int = FILE_BYTES
) -> None:
    """Write the policy as a Hugging Face folder, in the dtypes that are published, with the tokenizer of ``source``; each rank what it
    steps on. A collective."""
    module = engine.module
    dtypes = {name: tensor.dtype for name, tensor in named_weights(module)}
    shapes = {name: tuple(tensor.shape) for name, tensor in _buffers(engine).items()} | _shapes(engine)
    kinds: dict[str, Kind] = {name: (dtypes[name], shapes[name]) for name in dtypes}
    files: list[list[str]] = [[]]
    room = file_bytes
    for name, kind in kinds.items():
        if files[-1] and nbytes_of(kind) > room:
            files.append([])
            room = file_bytes
        files[-1].append(name)
        room -= nbytes_of(kind)
    titles = ["model.safetensors"]
    if len(files) > 1:
        titles = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            module.config.save_pretrained(path)
            copy_tokenizer(source, path, "generation_config.json")

    ranks.together(begin)
    held, buffers = list(_own(engine, ranks)), _buffers(engine)
    for title, names in zip(titles, files, strict=True):
        pieces = [(place.name, place.values, place.start) for place in held if place.name in names]
        rest = {name: buffers[name] for name in names if name in buffers}
        _write(path / title, {name: kinds[name] for name in names}, pieces, rest, ranks, bucket_bytes)

    def end() -> None:
        if ranks.first and len(files) > 1:
            where = {name: title for title, names in zip(titles, files, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(map(nbytes_of, kinds.values()))}, "weight_map": where}
            (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    ranks.together(end)


def _own(engine: Any, ranks: Ranks) -> Iterator[Place]:
    """The masters that this rank writes: what only it has, or its share of what all have."""
    for place in masters(engine):
        if engine.zero_optimization_stage():
            yield place
            continue
        low, high = (place.count * each // ranks.size for each in (ranks.rank, ranks.rank + 1))
        if low < high:
            yield dataclasses.replace(place, start=low, count=high - low, offset=low)


def _write(
    path: Path, kinds: Mapping[str, Kind], pieces: Sequence[tuple[str, Any, int]], once: Mapping[str, Any], ranks: Ranks,
    bucket_bytes: int,
) -> None:  # fmt: skip
    """``once``: tensors that rank 0 writes."""
    whole = [(name, tensor, 0) for name, tensor in once.items()] if ranks.first else []
    write_together(path, kinds, [*pieces, *whole], ranks, bucket_bytes=bucket_bytes)


def _set_state(optimizer: Any, master: Any, steps: int) -> None:
    """As after so many steps, of nothing yet. In place where it can be: DeepSpeed knows the tensors."""
    state = optimizer.state[master]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state |= {key: torch.zeros_like(master) for key in _MOMENTS}
    state["step"].fill_(steps)
    for key in _MOMENTS:
        state[key].zero_()


def _shapes(engine: Any) -> dict[str, tuple[int, ...]]:
    return {name: shape_of(weight) for name, weight in engine.module.named_parameters()}


def _buffers(engine: Any) -> dict[str, Any]:
    """What is stored beside the parameters, and is the same on all ranks."""
    parameters = {name for name, _ in engine.module.named_parameters()}
    return {name: tensor for name, tensor in named_weights(engine.module) if name not in parameters}


def _kind(tensor: Any) -> Kind:
    return tensor.dtype, tuple(tensor.shape)


def _unlike(want: Mapping[str, Kind], have: Mapping[str, Kind]) -> list[str]:
    return sorted(name for name in want.keys() | have.keys() if want.get(name) != have.get(name))
