"""Models by their names on the Hugging Face Hub: downloaded into its cache, by huggingface_hub.

is_name("Qwen/Qwen3-0.6B"), is_name("./models/mine")      # True, False
folder = model_folder("Qwen/Qwen3-0.6B")                  # .../models--Qwen--Qwen3-0.6B/snapshots/c1899de...
snapshot_of(folder)                                       # ("Qwen/Qwen3-0.6B", "c1899de...")
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PluginError
from .model_folder import PICKLED

IGNORED = (
    *PICKLED, "consolidated*.safetensors", "adapter_model*.safetensors", "*/*.safetensors", "model.*.safetensors",
    "*.tflite", "*.task", "*.litertlm", "*.nemo", "*.zip", "*.tar*", "*.npz", "*.llamafile", "*.mlpackage/*",
)  # fmt: skip
"""Files of a repository that are no part of its model: weights in other formats, adapters, copies."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")


def model_folder(model: str | Path, revision: str | None = None) -> str:
    """Return the folder of a model: the given one, or the download of a name "owner/name" at
    ``revision`` (a branch, tag or commit; default: main). A folder of the cache that another host
    downloaded is downloaded at the same commit. The token is of HF_TOKEN or ``hf auth login``. Raises
    ConfigError with the remedy, PluginError without huggingface_hub."""
    path = str(model)
    known = snapshot_of(path)
    if Path(path).exists() or not (known or is_name(path)):
        if revision is not None:
            raise ConfigError(f"model_revision={revision!r} is of a model of the hub, and {path!r} is a folder")
        return path
    name, commit = known or (path, revision)
    try:
        import huggingface_hub
    except ImportError:
        raise PluginError(
            f"there is no folder {path} here, and a model {name!r} of the hub is downloaded by huggingface_hub;"
            " install it with: pip install 'asyncflow-sdk[hub]'"
        ) from None
    try:
        found: str = huggingface_hub.snapshot_download(name, revision=commit, ignore_patterns=list(IGNORED))
    except Exception as error:  # its errors are those of several libraries
        raise ConfigError(_reason(huggingface_hub, path, name, commit, error)) from None
    return found


def is_name(model: str) -> bool:
    """True for a path that may be a name of the hub."""
    return _NAME.fullmatch(model) is not None


def snapshot_of(folder: str) -> tuple[str, str] | None:
    """Return name and commit of a model in the cache; None for another folder."""
    found = _SNAPSHOT.search(folder)
    return None if found is None else (f"{found[1]}/{found[2]}", found[3])


def _reason(hub: Any, path: str, name: str, revision: str | None, error: Exception) -> str:
    """Return what an error of huggingface_hub means, and what to do."""
    at, errors = hub.constants.ENDPOINT, hub.errors
    neither = f"there is no folder {path} here, and no model of that name"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"model {name!r} is gated: accept its terms at {at}/{name}, and log in with `hf auth login` or HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{neither} on the hub: {at} has none for this token; a private one needs `hf auth login` or HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"model {name!r} has no revision {revision!r} at {at}"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else f"{at} cannot be reached"
        return (
            f"{neither} in the cache of the hub ({hub.constants.HF_HUB_CACHE}), and {why}: give the path of a"
            f" folder, or run `hf download {name}` where there is a network, and copy the cache"
        )
    return f"{neither} could be downloaded from {at}: {type(error).__name__}: {error}"
