"""ModelFolder: tensors and configuration of a Hugging Face folder, and the check of a version
before an engine sees it.

Inference engines silently load part of a version, convert it, or keep the tensors it lacks.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncflow_sdk.errors import ConfigError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.interfaces.weights import FilePlace
from asyncflow_sdk.types.safetensors import read_header

_SHOWN = 20


class ModelFolder:
    """``folder``: a Hugging Face folder with weights in safetensors. ``tensors``: dtype and
    shape by name; ``places``: their files. Raises ConfigError."""

    def __init__(self, folder: str) -> None:
        self.folder, path = folder, Path(folder)
        self.tensors: dict[str, TensorType] = {}
        self.places: dict[str, FilePlace] = {}
        index = path / "model.safetensors.index.json"
        file = index
        try:
            named = indexed_files(index) if index.is_file() else None
            for file in sorted(path.resolve().glob("*.safetensors")):
                if named is None or file.name in named:
                    with file.open("rb") as opened:
                        found = read_header(opened).tensors
                    self.tensors |= {name: TensorType(each.dtype, each.shape) for name, each in found.items()}
                    self.places |= {name: FilePlace(str(file), each.start) for name, each in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        if not self.tensors:
            why = "has no weights in *.safetensors" if path.is_dir() else "does not exist"
            raise ConfigError(f"model folder {folder!r} {why}; versions are compared with them")

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """config.json. Raises ConfigError if it is missing or has no vocab_size."""
        try:
            config = json.loads(Path(self.folder, "config.json").read_bytes())
            int(text_config(config)["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"model folder {self.folder!r} has no config.json with a vocab_size: {error!r}; give the path of a"
                " Hugging Face model folder"
            ) from None
        return dict(config)

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return int(text_config(self.config)["vocab_size"])


def indexed_files(index: Path) -> set[str]:
    """Return the files named in a folder's index of weights. Raises ValueError for one outside the folder."""
    files = set(json.loads(index.read_bytes())["weight_map"].values())
    if outside := [each for each in files if Path(each).name != each]:
        raise ValueError(f"it names {outside[0]!r}, which is no file of its folder")
    return files


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the fields of the language model of a multimodal one."""
    return config | next((config[key] for key in ("text_config", "llm_config") if key in config), {})


def end_tokens(folder: str) -> list[int]:
    """Return the end tokens by the model folder's configuration, not by its tokenizer."""
    for file in ("generation_config.json", "config.json"):
        path = Path(folder, file)
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def check_version(
    update: WeightUpdate, tensors: Mapping[str, TensorType], dtypes: Callable[[str], tuple[str, ...]], *,
    holder: str = "the model", tied: Callable[[str], bool] = lambda name: False, shown: int = _SHOWN,
) -> None:  # fmt: skip
    """Raise WeightMismatch for tensors that are missing, unknown, or of another shape or dtype; the
    message lists them.

    ``tensors``: of the model. ``dtypes``: accepted dtypes for one of theirs, the engine's own
    first. ``holder``: in the message. ``tied``: True for names that may be additional or missing,
    since they share memory with another tensor. ``shown``: at most this many problems are listed.
    """
    problems, hint, untrained = [], "", set(update.untrained)
    for name, given in update.tensors.items():
        held = tensors.get(name)
        if name in untrained:
            problems.append(f"{name}: the version has it, and says that it is not trained")
        if held is None:
            if not tied(name):
                problems.append(f"{name}: the model has no such weight")
            continue
        accepted = dtypes(held.dtype)
        if given.shape != held.shape or given.dtype not in accepted:
            wanted = f"{accepted[0]}{list(held.shape)}"
            if given.dtype not in accepted:
                hint = "\nThe publisher's dtype and the engine's must be the same."
            problems.append(f"{name}: the version has {given.dtype}{list(given.shape)}, {holder} {wanted}")
    missing = tensors.keys() - update.tensors.keys() - untrained
    problems += [f"{name}: missing from the version" for name in missing if not tied(name)]
    if problems:
        raise WeightMismatch(
            f"version {update.version} does not fit this model, nothing was loaded:\n  {listed(problems, shown)}{hint}"
        )


def listed(problems: list[str], shown: int = _SHOWN) -> str:
    """Return the sorted problems, one per line, at most ``shown``."""
    more = f"\n  and {len(problems) - shown} more" if len(problems) > shown else ""
    return "\n  ".join(sorted(problems)[:shown]) + more
