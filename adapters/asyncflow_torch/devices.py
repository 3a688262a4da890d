"""Devices of torch by name.

device_of("auto")                  # cuda:0 if torch can use a GPU, else cpu; with LOCAL_RANK=1, cuda:1
"""

from __future__ import annotations

import os
from typing import Any

import torch

from asyncflow_sdk.errors import ConfigError


def device_of(name: str) -> Any:
    """Return the `torch.device` for ``name``, see `local_device`. Raises ConfigError for a device
    unusable here."""
    try:
        return torch.empty(0, device=local_device(name)).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def check_device(name: str) -> None:
    """Raise ConfigError for a name unknown to torch, and for a GPU if torch is built without CUDA. Touches no
    device: it may be another host's."""
    try:
        kind = torch.device("cpu" if name == "auto" else name).type
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    if kind == "cuda" and not torch.backends.cuda.is_built():
        raise ConfigError(f"device {name!r} cannot be used here: this torch is built without CUDA")


def local_device(name: str) -> str:
    """Return the name of this rank's device, and make it torch's current one: "cuda" is "cuda:1"
    for LOCAL_RANK 1 if two GPUs are visible. "auto": see `device_kind`. Names with an index are
    returned unchanged."""
    kind = device_kind(name)
    module: Any = getattr(torch, kind, None)
    if kind == "cpu" or ":" in kind or not hasattr(module, "device_count") or not module.is_available():
        return kind
    place = f"{kind}:{int(os.environ.get('LOCAL_RANK', '0')) % module.device_count()}"
    module.set_device(place)
    return place


def device_kind(name: str) -> str:
    """Return ``name``; for "auto", "cuda" if torch can use a GPU, else "cpu"."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
