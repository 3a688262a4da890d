"""The policy: a causal language model from a Hugging Face folder, its weights by name, its export.

model = load_policy("runs/demo/model", dtype="auto", device="cpu")
dict(named_weights(model))             # {"model.embed_tokens.weight": tensor, ...}
assign(model, update)                  # writes a WeightUpdate in place, all of it or nothing
export_policy(model, "runs/demo/model", Path("trained"))
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncflow_http.model_folder import check_version, listed
from asyncflow_sdk.errors import ConfigError, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import TensorType, WeightUpdate
from asyncflow_sdk.types.dtypes import FLOATS
from asyncflow_sdk.workflow.model_folder import OWN_CODE, ModelFolder, copy_small_files, own_model

from .devices import device_of

_SHOWN = 400
"""Characters of a message of transformers."""
_loading = threading.Lock()
"""Hazard: transformers replaces methods of its classes during a load. Of two concurrent threads,
one would restore the other's replacement, and no later model of this process would be tied."""


def load_policy(
    folder: str, *, dtype: str, device: str, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return the model in ``folder``, in eval mode on ``device``, weights in ``dtype``; "auto": the
    folder's. ``trust_remote_code``: run the folder's own Python for a model that transformers does not have.

    Never uses the network. Raises ConfigError for an incomplete model folder, and for a dtype or
    device that torch lacks here.
    """
    wanted, place = element(dtype), device_of(device)
    path = Path(folder)
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise ConfigError(f"model folder {folder!r} {what}; give the path of a Hugging Face model folder")
    options = {"dtype": wanted} | (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    ModelFolder(path)  # transformers reads also outside the folder, and pickles
    try:
        with _loading, no_progress_bar():
            model, found = _loader(folder, trust_remote_code).from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise ConfigError(f"model folder {folder!r} cannot be loaded: {_reason(path, error)}") from error
    # Hazard: transformers fills weights the folder lacks with random numbers and only warns.
    if found["missing_keys"]:
        raise ConfigError(f"model folder {folder!r} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    weights = ((name, each) for name, each in model.state_dict().items() if each.is_floating_point())
    if odd := [name for name, each in weights if each.itemsize > 1 and each.isnan().any()]:
        raise ConfigError(f"model folder {folder!r} has NaN in {', '.join(odd[:5])}")
    return model.to(place).eval()


def _loader(folder: str, trust_remote_code: bool) -> Any:
    """Return transformers' class for the model of a folder: for a multimodal one without a class for text alone, the
    whole model."""
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    config = type(transformers.AutoConfig.from_pretrained(folder, **options))
    text = config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    whole = config in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return transformers.AutoModelForImageTextToText if whole and not text else transformers.AutoModelForCausalLM


def _reason(folder: Path, error: Exception) -> str:
    """Return one line on an error of transformers, whose messages list all its classes, with a way out."""
    kind, own = own_model(folder)
    text = " ".join(str(error).split())
    of = f"transformers {transformers.__version__}"
    if "Unrecognized configuration class" in text:
        return f"{of} has no language model of type {kind!r}: save its language model as a folder of its own, and use that"
    if own and ("trust_remote_code" in text or "does not recognize this architecture" in text):
        return f"{of} has no model of type {kind!r}, and {OWN_CODE}"
    if "does not recognize this architecture" in text:
        return f"{of} does not know the model type {kind!r}: a newer one may (pip install --upgrade transformers)"
    return f"{type(error).__name__}: {text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}"


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of each parameter and stored buffer: live views without gradient, tied
    weights once."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def assign(model: Any, update: WeightUpdate) -> dict[str, Any]:
    """Write all tensors of ``update`` into the model, in place. Return the written weights by the
    names of the update.

    Raises WeightMismatch, with all problems and before any write, for a version with a missing or
    unknown weight, another shape or dtype, or two different tensors for a tied weight. A later
    error leaves a mixture of versions and raises `PartialLoad`.
    """
    targets, second = _targets(model, update)
    left = targets.keys() - second
    try:
        with torch.no_grad():
            for name, tensor in update:
                if name in second:
                    continue
                target = targets.get(name)
                # Hazard: copy_ broadcasts and converts, so it would accept an update unlike its announcement.
                if target is None or _type_of(tensor) != _type_of(target):
                    wanted = "nothing" if target is None else _type_of(target)
                    raise WeightMismatch(f"{name} came as {_type_of(tensor)}, and {wanted} was announced")
                target.copy_(tensor)
                left -= {name}
        if left:
            raise WeightMismatch(f"it did not bring {', '.join(sorted(left))}")
    except BaseException as error:
        raise PartialLoad(f"version {update.version} was written in part: {type(error).__name__}: {error}") from error
    return targets


def published_tensors(
    update: WeightUpdate, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of a version published by this trainer, in the trainer's ``dtypes``:
    whole tensors, each valid until the next.

    ``shapes``: of all weights, by published name. Raises WeightMismatch, before the first tensor,
    for a missing or unknown weight, or one of another shape or kind of number.
    """
    held = {name: TensorType(str(dtypes[name]).removeprefix("torch."), shape) for name, shape in shapes.items()}
    check_version(update, held, lambda dtype: (dtype, *FLOATS) if dtype in FLOATS else (dtype,))
    return ((name, tensor.to(dtypes[name])) for name, tensor in update)


def take(model: Any, update: WeightUpdate) -> None:
    """Copy a version published by this trainer into its weights. Raises WeightMismatch before any
    change."""
    weights = dict(named_weights(model))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    with torch.no_grad():
        for name, tensor in published_tensors(update, shapes, {name: each.dtype for name, each in weights.items()}):
            weights[name].copy_(tensor)


class PartialLoad(WeightError):
    """Raised when a load failed half-way: the model holds a mixture of versions and must not be
    used."""


def export_policy(model: Any, source: str, path: Path) -> None:
    """Write the model as a Hugging Face folder at ``path``, with the small files of ``source``."""
    path.mkdir(parents=True, exist_ok=True)
    copy_small_files(source, path)
    with no_progress_bar():
        model.save_pretrained(path)


def context_of(model: Any) -> int | None:
    """Return the maximum of tokens by the model's configuration, None if it has none."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(context) if context else None


def vocabulary_of(model: Any) -> int:
    """Return the size of the vocabulary: token ids are below it."""
    return int(model.get_input_embeddings().weight.shape[0])


def _targets(model: Any, update: WeightUpdate) -> tuple[dict[str, Any], set[str]]:
    """Return the weight of each tensor of an update, and the second names of tied weights. Raises
    WeightMismatch with all problems."""
    canonical = dict(named_weights(model))
    alias = _aliases(model)
    given = {name: alias.get(name, name) for name in update.tensors}
    targets = {name: canonical[weight] for name, weight in given.items() if weight in canonical}
    lacking = {name: canonical[name] for name in canonical.keys() - set(given.values())}
    held = {name: TensorType(_dtype_of(weight), tuple(weight.shape)) for name, weight in (targets | lacking).items()}
    check_version(update, held, lambda dtype: (dtype,), shown=len(held) + len(given))
    first: dict[str, str] = {}
    second = {name: first[weight] for name, weight in given.items() if first.setdefault(weight, name) != name}
    if second and (problems := _unequal(update, second)):
        raise WeightMismatch(
            f"version {update.version} does not fit this model, nothing was loaded:\n  {listed(problems)}"
        )
    return targets, set(second)


def _unequal(update: WeightUpdate, second: dict[str, str]) -> list[str]:
    """Return problems of tensors given under two names of one weight: they must be equal to the
    bit."""
    names = {*second, *second.values()}
    found = {name: tensor for name, tensor in update if name in names}
    return [
        f"{name}: differs from {other}, which is the same weight in this model"
        for name, other in second.items()
        if name not in found or other not in found or not _same(found[name], found[other])
    ]


def _same(one: Any, other: Any) -> bool:
    if _type_of(one) != _type_of(other):
        return False
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    return bool(torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other))))


def _aliases(model: Any) -> dict[str, str]:
    """Return second names of tied weights: {"lm_head.weight": "model.embed_tokens.weight"}."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: first[id(t)] for name, t in named if first.setdefault(id(t), name) != name}


def _type_of(tensor: Any) -> str:
    return f"{_dtype_of(tensor)}{list(tensor.shape)}"


def _dtype_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def element(name: str) -> Any:
    """Return the dtype of torch, or "auto". Raises ConfigError for another name than that of a
    floating-point dtype."""
    if name == "auto":
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype {name!r} is no floating-point dtype of torch; use float32, bfloat16, float16 or auto"
        )
    return dtype


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """Hide the progress bars of transformers within the block: they would fill a worker's log."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()
