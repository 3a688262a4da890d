"""Checkpoint: which tensors an SGLang server has places for, and in which types it takes them.

SGLang skips what it has no place for, keeps what did not come, and converts, all without a word. So a version is compared with
the model's folder before the server hears of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncflow_sdk.errors import ConfigError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types.dtypes import SAFETENSORS_CODES
from asyncflow_sdk.types.safetensors import read_header

_TIED = "lm_head.weight"
_SHOWN = 10


class Checkpoint:
    """A Hugging Face folder with weights in safetensors, as a server loads it with floating-point weights of ``dtype``; None: that of
    the folder. Raises ConfigError for what is none.

    ``context``: the most tokens of prompt and response, None if the model does not say. ``vocabulary``: token ids run below it.
    """

    def __init__(self, folder: str, dtype: str | None = None) -> None:
        path = Path(folder)
        config = _config(path)
        self._folder, self._kind = folder, config.get("architectures")
        text = config | next((config[key] for key in ("text_config", "llm_config") if key in config), {})
        self.vocabulary = int(text["vocab_size"])
        context = text.get("max_position_embeddings")
        self.context = int(context) if context else None
        self._saved = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        self.dtype = dtype or self._saved
        self._tied = bool(text.get("tie_word_embeddings", False))
        self._tensors = _tensors(path)

    def check(self, update: WeightUpdate) -> None:
        """Raise WeightMismatch, listing all that does not fit."""
        problems = []
        for name, given in update.tensors.items():
            held = self._tensors.get(name)
            if held is None:
                if not (self._tied and name.endswith(_TIED)):
                    problems.append(f"{name}: the model has no such weight")
            elif given.shape != held.shape or given.dtype not in self._taken(held.dtype):
                wanted = f"{self._taken(held.dtype)[0]}{list(held.shape)}"
                problems.append(
                    f"{name}: the version has {given.dtype}{list(given.shape)}, the server takes {wanted}"
                )
            if given.dtype not in SAFETENSORS_CODES:
                problems.append(f"{name}: safetensors has no dtype {given.dtype}")
        missing = self._tensors.keys() - update.tensors.keys()
        problems += [
            f"{name}: missing from the version" for name in missing if not (self._tied and name.endswith(_TIED))
        ]
        if problems:
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise WeightMismatch(
                f"version {update.version} does not fit this model, nothing was loaded:\n  "
                + "\n  ".join(sorted(problems)[:_SHOWN]) + more
            )  # fmt: skip

    def check_alike(self, held: Checkpoint, name: str) -> None:
        """Raise ConfigError, listing all, unless the SGLang called ``name``, which was started with the folder ``held``, has a place for
        each tensor of this one, of its shape, and for no other."""
        problems = []
        if self._kind != held._kind:
            problems.append(f"it computes {held._kind}, the folder is of {self._kind}")
        for tensor in self._tensors.keys() | held._tensors.keys():
            ours, theirs = self._tensors.get(tensor), held._tensors.get(tensor)
            if ours is None:
                problems.append(f"{tensor}: the folder has no such weight")
            elif theirs is None:
                problems.append(f"{tensor}: the server's model has no such weight")
            elif ours.shape != theirs.shape:
                problems.append(f"{tensor}: {list(ours.shape)} in the folder, {list(theirs.shape)} in the server")
        if problems:
            more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise ConfigError(
                f"{name} serves {held._folder}, which is another model than {self._folder}; nothing in it was touched:\n  "
                + "\n  ".join(sorted(problems)[:_SHOWN]) + more
            )  # fmt: skip

    def context_of(self, longest: int) -> int:
        """The most tokens of prompt and response in an SGLang whose prompts are shorter than ``longest``."""
        return longest if self.context is None else min(self.context, longest)

    def _taken(self, dtype: str) -> tuple[str, ...]:
        """As which a server takes a tensor of the folder. Models keep some, such as biases of routers, in a dtype of their own."""
        if dtype == self._saved:
            return (self.dtype,)
        return (dtype, self.dtype) if dtype in ("float16", "bfloat16", "float32", "float64") else (dtype,)


def served_checkpoint(model: str, revision: str | None, name: str) -> Checkpoint:
    """Of what the SGLang called ``name`` was started with: a folder, or a model of the hub, which is looked for where it was downloaded to.
    Raises ConfigError where that cannot be read here."""
    folder = model
    if not Path(model).is_dir():
        try:
            from huggingface_hub import snapshot_download

            folder = snapshot_download(model, revision=revision, local_files_only=True)
        except Exception as error:
            raise ConfigError(
                f"{name} serves {model!r}, which cannot be read here ({type(error).__name__}), so that nobody knows whether versions fit it;"
                " start it with a model folder of this host"
            ) from None
    try:
        return Checkpoint(folder)
    except ConfigError as error:
        raise ConfigError(f"{name} serves {model!r}, and nobody knows whether versions fit it: {error}") from None


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_bytes())
        if "vocab_size" not in (config | config.get("text_config", {}) | config.get("llm_config", {})):
            raise ValueError("it says no vocab_size")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model folder {str(path)!r} has no config.json that can be used: {error}; give the path of a Hugging Face model folder"
        ) from None
    return dict(config)


def _tensors(path: Path) -> dict[str, TensorType]:
    """What is in the folder's files."""
    found: dict[str, TensorType] = {}
    try:
        index = path / "model.safetensors.index.json"
        names = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else None
        files = [file for file in sorted(path.glob("*.safetensors")) if names is None or file.name in names]
        for file in files:
            with file.open("rb") as opened:
                tensors = read_header(opened).tensors
            found |= {name: TensorType(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the weights in {str(path)!r} cannot be read: {error}") from None
    if not found:
        raise ConfigError(
            f"model folder {str(path)!r} has no weights in safetensors files, by whose names versions are checked"
        )
    return found
