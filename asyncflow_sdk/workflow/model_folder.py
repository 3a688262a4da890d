"""Model folders: the weights in a Hugging Face folder, and a version written as one, complete or absent.

ModelFolder("models/base").tensors["lm_head.weight"]              # TensorType("bfloat16", (151936, 4096))
with whole_folder(path) as part:                                  # written beside, then renamed
    engine.export(part)
with fetch_version(queue, 20).fetch() as update:
    write_model_folder(update, "models/base", Path("runs/first/best"))
folder = model_folder("Qwen/Qwen3-0.6B")                          # .../models--Qwen--Qwen3-0.6B/snapshots/c1899de...
snapshot_of(folder)                                               # ("Qwen/Qwen3-0.6B", "c1899de...")
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, PluginError
from ..interfaces import TensorType, WeightUpdate
from ..interfaces.weights import FilePlace
from ..memory import make_private_directory
from ..types.dtypes import carrier, floating_name
from ..types.safetensors import plan, read_header

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.gguf")
"""Weights in other formats than safetensors."""
_SMALL_BYTES = 64 << 20
_COMPARED_BYTES = 16 << 20
_TIED = ("gemma", "cohere")
"""Beginnings of model types that tie their embeddings unless the configuration says otherwise."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embeddings|embed_in)\.weight$")
_TRAINED = ("bfloat16", "float16", "float32", "float64")
_OTHER_FORMATS = [
    "*.tflite",
    "*.task",
    "*.litertlm",
    "*.nemo",
    "*.zip",
    "*.tar*",
    "*.npz",
    "*.llamafile",
    "*.mlpackage/*",
]
_COPIES = ["consolidated*.safetensors", "adapter_model*.safetensors", "*/*.safetensors", "model.*.safetensors"]
_IGNORED = [*PICKLED, *_COPIES, *_OTHER_FORMATS]
"""Files of a repository of the hub that are no part of its model: weights in other formats, adapters, copies."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
OWN_CODE = "the folder has Python of its own for it: trust_remote_code=True of Train or Rollout runs that"


class ModelFolder:
    """Weights of a Hugging Face folder, of its index or of ``model.safetensors``: other files of weights in it are
    copies in another format, or adapters.

    ``tensors``: dtype and shape by name; ``places``: their files. ``redundant``: names of an ``lm_head`` tied to the
    embedding and equal to it to the bit; the folder could do without. Raises ConfigError without such weights, and
    for an unequal ``lm_head`` in a tied configuration."""

    def __init__(self, folder: str | Path) -> None:
        self.folder, path = str(folder), Path(folder)
        self.tensors: dict[str, TensorType] = {}
        self.places: dict[str, FilePlace] = {}
        file = path / WEIGHTS[1]
        try:
            for file in weight_files(path.resolve()):
                with file.open("rb") as opened:
                    found = read_header(opened).tensors
                self.tensors |= {name: TensorType(each.dtype, each.shape) for name, each in found.items()}
                self.places |= {name: FilePlace(str(file), each.start) for name, each in found.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        if not self.tensors:
            why = "has no model.safetensors and no index of such files: save_pretrained of transformers writes them"
            raise ConfigError(f"model folder {self.folder!r} {why if path.is_dir() else 'does not exist'}")
        self.redundant = frozenset(self._tied_heads())

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """config.json. Raises ConfigError if it cannot be read."""
        try:
            return dict(json.loads(Path(self.folder, "config.json").read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"model folder {self.folder!r} has no config.json that can be read: {error!r}; give the path of a"
                " Hugging Face model folder"
            ) from None

    @property
    def vocabulary(self) -> int:
        """Token ids are below it: of the configuration, else of the embedding (multimodal ones leave defaults out).
        Raises ConfigError if both are unknown."""
        with contextlib.suppress(KeyError, ValueError, TypeError):
            return int(text_config(self.config)["vocab_size"])
        rows = [kind.shape[0] for name, kind in self.tensors.items() if _EMBEDDING.search(name) and kind.shape]
        if not rows:
            raise ConfigError(
                f"model folder {self.folder!r} has neither a vocab_size in its config.json nor an embedding"
            )
        return max(rows)

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor."""
        (dtype, shape), (file, offset) = self.tensors[name], self.places[name]
        raw = np.fromfile(file, np.uint8, math.prod(shape) * carrier(dtype).itemsize, offset=offset)
        return raw.view(carrier(dtype)).reshape(shape)

    def check_unquantised(self, names: Iterable[str] = ()) -> None:
        """Raise ConfigError for a quantised model, by its configuration or the dtypes of ``names``: it can be loaded,
        and trained weights cannot be written back to these tensors."""
        found = [
            f"{self.tensors[name].dtype} in {name}" for name in names if self.tensors[name].dtype not in _TRAINED
        ]
        with contextlib.suppress(ConfigError):  # without a configuration the dtypes tell
            if text_config(self.config).get("quantization_config"):
                found.insert(0, "quantization_config in config.json")
        if found:
            raise ConfigError(
                f"model folder {self.folder!r} is quantised ({found[0]}), and a trainer cannot write its weights back: save"
                " it dequantised"
            )

    def differences(self, other: ModelFolder, own: str, others: str) -> list[str]:
        """Return other names and shapes in another folder, one a line. A redundant head may be missing."""
        found = []
        for name in sorted((self.tensors.keys() | other.tensors.keys()) - self.redundant - other.redundant):
            held, given = (each.tensors.get(name) for each in (self, other))
            if held is None or given is None:
                found.append(f"{name}: {own if held is None else others} has no such weight")
            elif held.shape != given.shape:
                found.append(f"{name}: {list(held.shape)} in {own}, {list(given.shape)} in {others}")
        return found

    def embeddings(self, head: str) -> list[str]:
        """Return the tensors that a head may be tied to: embeddings of its shape."""
        shape = self.tensors[head].shape
        return [name for name, kind in self.tensors.items() if kind.shape == shape and _EMBEDDING.search(name)]

    def _tied_heads(self) -> Iterator[str]:
        heads = [name for name in self.tensors if f".{name}".endswith(".lm_head.weight")]
        tied_by_default, is_tied = False, None
        with contextlib.suppress(ConfigError):  # without a configuration nothing is tied
            tied_by_default = str(self.config.get("model_type")).startswith(_TIED)
            is_tied = text_config(self.config).get("tie_word_embeddings")
        for head in heads if (tied_by_default if is_tied is None else is_tied) else ():
            tied = self.embeddings(head)
            if tied and not any(self._is_equal(head, each) for each in tied):
                raise ConfigError(
                    f"model folder {self.folder!r} has tie_word_embeddings=true in its config.json, and its {head} is not"
                    f" its {tied[0]}: engines differ in which of them they compute with. Set tie_word_embeddings=false"
                )
            yield from [head] if tied else []

    def _is_equal(self, one: str, other: str) -> bool:
        kind = self.tensors[one]
        if kind != self.tensors[other]:
            return False
        size = math.prod(kind.shape) * carrier(kind.dtype).itemsize
        raw = [np.memmap(at.path, np.uint8, "r", at.offset, (size,)) for at in (self.places[one], self.places[other])]
        starts = range(0, size, _COMPARED_BYTES)
        return all(
            np.array_equal(raw[0][at : at + _COMPARED_BYTES], raw[1][at : at + _COMPARED_BYTES]) for at in starts
        )


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights. Raises ValueError for an index with a file outside the folder, or
    beside a model.safetensors of its own."""
    single, index = (folder / name for name in WEIGHTS)
    if not index.is_file():
        return [single] if single.is_file() else []
    files = set(json.loads(index.read_bytes())["weight_map"].values())
    if outside := [each for each in files if Path(each).name != each]:
        raise ValueError(f"it names {outside[0]!r}, which is no file of its folder")
    if single.is_file() and files != {single.name}:
        raise ValueError(
            f"it lists {min(files)!r}, and engines may read model.safetensors instead: remove one of both"
        )
    return [folder / each for each in sorted(files)]


def own_model(folder: str | Path) -> tuple[str, bool]:
    """Return the model type of a folder, "" without a configuration, and True if the folder has Python for it."""
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
        own = {"AutoConfig", "AutoModelForCausalLM"} & (config.get("auto_map") or {}).keys()
        return str(config.get("model_type") or ""), bool(own)
    except (OSError, ValueError, AttributeError):
        return "", False


def stored_dtype(folder: str | Path) -> str:
    """Return the dtype of a folder by its configuration, else by its weights; "" if neither tells."""
    try:
        config = text_config(json.loads(Path(folder, "config.json").read_bytes()))
        if named := floating_name(config.get("dtype") or config.get("torch_dtype")):
            return named
        found = {each.dtype for each in ModelFolder(folder).tensors.values()}
    except (OSError, ValueError, AttributeError, ConfigError):
        return ""
    return next((dtype for dtype in ("bfloat16", "float16", "float32") if dtype in found), "")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a configuration with another dtype, also in its parts."""

    def changed(part: dict[str, Any]) -> dict[str, Any]:
        named = {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in part.items()}
        return {key: changed(value) if isinstance(value, dict) else value for key, value in named.items()}

    return changed(config) | {"dtype": dtype}


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the fields of the language model of a multimodal one."""
    return config | (config.get("text_config") or config.get("llm_config") or {})


def copy_small_files(source: str | Path, path: Path) -> None:
    """Copy the files of a model folder to another one, except its weights: configuration, tokenizer, templates,
    processor, Python, licence. Hidden files, files above 64 MiB, directories with weights and one with ``path``
    stay."""
    for file in [*_small_files(Path(source), path.resolve())]:
        target = path / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)  # writable, where the source is not


def _small_files(folder: Path, target: Path) -> Iterator[Path]:
    for each in sorted(folder.iterdir()):
        if each.name.startswith(".") or each.name == "__pycache__" or _holds_weights(each):
            continue
        if each.is_file() and each.stat().st_size <= _SMALL_BYTES:
            yield each
        elif not each.is_dir() or each.is_symlink() or target.is_relative_to(each.resolve()):
            continue
        elif not any(map(_holds_weights, each.rglob("*"))):
            yield from _small_files(each, target)


def _holds_weights(file: Path) -> bool:
    return any(file.match(pattern) for pattern in ("*.safetensors", "*.index.json", *PICKLED))


@dataclass(frozen=True)
class StepFolders:
    """The model folders of a trainer: ``step-000020`` after every ``every`` steps. The newest ``limit`` stay; None:
    all."""

    directory: Path
    every: int
    limit: int | None = None

    def due(self, steps: int) -> bool:
        """True if a folder is written after so many steps."""
        return steps % self.every == 0

    def path(self, steps: int) -> Path:
        """Return the folder of the weights after so many steps."""
        return self.directory / f"step-{steps:06d}"

    def trim(self) -> None:
        """Remove the oldest folders beyond the limit."""
        for step in steps_in(self.directory)[: -self.limit] if self.limit is not None else ():
            shutil.rmtree(self.path(step), ignore_errors=True)


def steps_in(directory: Path) -> list[int]:
    """Return the steps of the folders "step-000020" in a directory, in order."""
    names = (re.fullmatch("step-([0-9]{6,})", path.name) for path in directory.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a new folder, renamed to ``path`` after the block, in the place of an earlier one; removed after an
    error."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    make_private_directory(part.parent)
    make_private_directory(part)
    try:
        yield part
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        part.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_model_folder(update: WeightUpdate, model: str, path: Path) -> None:
    """Write a version bit for bit, with the other files of the folder ``model``: configuration, tokenizer, generation
    configuration, and with its untrained weights. Raises OSError, ConfigError."""
    base = ModelFolder(model) if update.untrained else None
    untrained = {} if base is None else {name: base.tensors[name] for name in update.untrained}
    tensors = {**update.tensors, **untrained}
    dtypes = {kind.dtype for kind in update.tensors.values()}
    with whole_folder(path) as part:
        copy_small_files(model, part)
        config = part / "config.json"
        if len(dtypes) == 1 and config.is_file():  # loaded as it was published
            config.write_text(json.dumps(with_dtype(json.loads(config.read_bytes()), dtypes.pop()), indent=2) + "\n")
        layout = plan({name: (kind.dtype, kind.shape) for name, kind in tensors.items()})
        kept = () if base is None else ((name, base.array(name)) for name in untrained)
        with open(part / "model.safetensors", "wb") as weights:
            weights.write(layout.header)
            for name, array in itertools.chain(update.arrays(), kept):
                weights.seek(layout.offsets[name])
                weights.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


# ---- models by their names on the Hugging Face Hub: downloaded into its cache, by huggingface_hub


def model_folder(model: str | Path, revision: str | None = None) -> str:
    """Return the folder of a model: the given one, or the download of a name "owner/name" at ``revision`` (a branch,
    tag or commit; default: main). A folder of the cache that another host downloaded is downloaded at the same
    commit. The token is of HF_TOKEN or ``hf auth login``. Raises ConfigError with the remedy, PluginError without
    huggingface_hub."""
    path = str(model)
    known = snapshot_of(path)
    if Path(path).exists() or not (known or is_hub_name(path)):
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
        found: str = huggingface_hub.snapshot_download(name, revision=commit, ignore_patterns=_IGNORED)
    except Exception as error:  # its errors are those of several libraries
        raise ConfigError(_reason(huggingface_hub, path, name, commit, error)) from None
    return found


def is_hub_name(model: str) -> bool:
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
