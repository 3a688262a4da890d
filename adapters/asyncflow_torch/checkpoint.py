"""Checkpoints of the train engines: weights and optimizer as safetensors, exact, without pickle.

PATH/weights.safetensors      named as in stored_tensors, float32 masters where weights have one
PATH/optimizer.safetensors    "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" and "random_state"
PATH/state.json               written last: without it the checkpoint is incomplete

One format for all engines and any number of ranks: each rank writes and reads only its own
elements.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError

from .masters import Masters
from .policy import stored_tensors
from .ranks import Ranks
from .sharded_files import RANK_BUCKET_BYTES, FileParts, Kind, Reader, kind_of, write_together

FORMAT = 1
RANDOM_STATE = "random_state"


def save(path: Path, model: Any, masters: Masters, optimizer: Any) -> None:
    """Write a model of one process, its optimizer, and torch's random state below ``path``."""
    state = state_by_name(optimizer, masters.named.items())
    weights = {name: tensor.detach() for name, tensor in _weights(model, masters).items()}
    write_checkpoint(path, FileParts.whole(weights), FileParts.whole(state), Ranks.alone())


def load(path: Path, model: Any, masters: Masters, optimizer: Any) -> None:
    """Restore a checkpoint in place. Raises ConfigError, before any change, if it is not one of
    this model."""
    weights = _weights(model, masters)
    kinds = {name: kind_of(tensor) for name, tensor in weights.items()}
    with open_checkpoint(path, kinds, Ranks.alone()) as (saved, state), torch.no_grad():
        torch.set_rng_state(state.whole(RANDOM_STATE))
        for name, tensor in weights.items():
            tensor.copy_(saved.whole(name))
        masters.give_weights()
        optimizer.state.clear()
        for name in state.kinds.keys() - {RANDOM_STATE}:
            key, _, parameter = name.partition("/")
            target = masters.named[parameter]
            optimizer.state[target][key] = state.whole(name).to(target.device)


def state_by_name(optimizer: Any, named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return torch's random state, and the optimizer's values as "key/parameter name"."""
    state: dict[str, Any] = {RANDOM_STATE: torch.get_rng_state()}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}/{name}"] = value
    return state


def write_checkpoint(
    path: Path, weights: FileParts, optimizer: FileParts, ranks: Ranks, *, bucket_bytes: int = RANK_BUCKET_BYTES
) -> None:
    """Write the files of a checkpoint below ``path``, a directory visible to all ranks. A
    collective."""

    def begin() -> None:
        """Create the directory; the old checkpoint is now incomplete."""
        path.mkdir(parents=True, exist_ok=True)
        if ranks.first:
            (path / "state.json").unlink(missing_ok=True)

    def end() -> None:
        """Complete the checkpoint."""
        if ranks.first:
            (path / "state.json").write_text(json.dumps({"format": FORMAT}))

    ranks.together(begin)
    write_together(path / "weights.safetensors", weights, ranks, bucket_bytes=bucket_bytes)
    write_together(path / "optimizer.safetensors", optimizer, ranks, bucket_bytes=bucket_bytes)
    ranks.together(end)


@contextlib.contextmanager
def open_checkpoint(
    path: Path, weights: Mapping[str, Kind], ranks: Ranks, *, moments: Mapping[str, Kind] | None = None
) -> Iterator[tuple[Reader, Reader]]:
    """Open the files of weights and optimizer. ``moments``: expected optimizer entries, if the
    checkpoint has any. Raises ConfigError on all ranks if the checkpoint is incomplete or of
    another model. A collective."""

    def check() -> tuple[Reader, Reader]:
        """Open and compare the files."""
        if not (path / "state.json").is_file():
            raise ConfigError(f"{path} holds no complete checkpoint of a TorchEngine: state.json is missing")
        found = json.loads((path / "state.json").read_text())
        if found.get("format") != FORMAT:
            raise ConfigError(f"checkpoint {path} has format {found.get('format')}; this version reads {FORMAT}")
        with contextlib.ExitStack() as opened:
            saved, state = (
                opened.enter_context(Reader(path / f"{each}.safetensors")) for each in ("weights", "optimizer")
            )
            wanted = dict(moments or {})
            held = {name: kind for name, kind in state.kinds.items() if name in wanted}
            unlike = _unlike(weights, saved.kinds) + (_unlike(wanted, held) if held else [])
            if unlike:
                raise ConfigError(f"checkpoint {path} is of another model; these differ: {', '.join(unlike)}")
            opened.pop_all()
            return saved, state

    saved, state = ranks.together(check)
    with saved, state:
        yield saved, state


def _weights(model: Any, masters: Masters) -> dict[str, Any]:
    """Return masters, other weights and stored buffers by name."""
    return dict(stored_tensors(model)) | masters.named


def _unlike(wanted: Mapping[str, Kind], found: Mapping[str, Kind]) -> list[str]:
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
