"""A training engine's state on disk: weights and optimizer as safetensors, exactly; nothing is pickled.

PATH/weights.safetensors      named as in named_weights, the masters of those that have one
PATH/optimizer.safetensors    "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" and "random_state"
PATH/state.json               written last: without it the checkpoint is not complete
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncflow_sdk.errors import ConfigError

from .masters import Masters
from .policy import named_weights

FORMAT = 1
RANDOM_STATE = "random_state"


def save(path: Path, model: Any, masters: Masters, optimizer: Any) -> None:
    """Write the state of all three, and of torch's random generator, below ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.json").unlink(missing_ok=True)
    state = {RANDOM_STATE: torch.get_rng_state()}
    for name, parameter in masters.named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{key}/{name}"] = value
    weights = {name: tensor.detach().contiguous() for name, tensor in _weights(model, masters).items()}
    save_file(weights, path / "weights.safetensors")
    save_file(state, path / "optimizer.safetensors")
    (path / "state.json").write_text(json.dumps({"format": FORMAT}))


def load(path: Path, model: Any, masters: Masters, optimizer: Any) -> None:
    """Restore what ``save`` wrote, in place. Raises ConfigError for what is no checkpoint of this model."""
    check_format(path)
    saved = load_file(path / "weights.safetensors")
    weights = _weights(model, masters)
    unlike = [n for n in weights.keys() | saved.keys() if _kind(weights.get(n)) != _kind(saved.get(n))]
    if unlike:
        raise ConfigError(f"checkpoint {path} is of another model; these differ: {', '.join(sorted(unlike))}")
    state = load_file(path / "optimizer.safetensors")
    torch.set_rng_state(state.pop(RANDOM_STATE))
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(saved[name])
    masters.give_weights()
    optimizer.state.clear()
    for name, value in state.items():
        key, _, parameter = name.partition("/")
        target = masters.named[parameter]
        optimizer.state[target][key] = value.to(target.device)


def check_format(path: Path) -> None:
    """Raises ConfigError where there is no complete checkpoint, or one that this version does not read."""
    if not (path / "state.json").is_file():
        raise ConfigError(f"{path} holds no complete checkpoint of a TorchEngine: state.json is missing")
    found = json.loads((path / "state.json").read_text())
    if found.get("format") != FORMAT:
        raise ConfigError(f"checkpoint {path} has format {found.get('format')}; this version reads {FORMAT}")


def _weights(model: Any, masters: Masters) -> dict[str, Any]:
    """What is trained, as precise as it is known, and stored buffers."""
    return dict(named_weights(model)) | masters.named


def _kind(tensor: Any) -> tuple[Any, Any] | None:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape))
