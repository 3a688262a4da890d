"""The policy: a causal language model from a Hugging Face folder, its weights by name.

model = load_policy("runs/demo/model", dtype="auto", device="cpu")
dict(stored_tensors(model))            # {"model.embed_tokens.weight": tensor, ...}
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.workflow.model_folder import OWN_CODE, ModelFolder, own_model

from .devices import check_device, device_of

_SHOWN = 400
"""Characters of a message of transformers."""
_loading = threading.Lock()
"""Hazard: transformers replaces methods of its classes during a load. Of two concurrent threads,
one would restore the other's replacement, and no later model of this process would be tied."""


def check_loading(dtype: str, device: str, attention: str | None = None) -> None:
    """Raise ConfigError for an unknown name of a dtype, a device or an attention."""
    element(dtype)
    check_device(device)
    if attention is None or attention == "eager" or not attention.isidentifier():  # kernels of the hub: "name/repo"
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # takes a second

    known = [name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if name.isidentifier()]
    if attention not in known:
        raise ConfigError(f"attention {attention!r} is none of transformers: eager, {', '.join(sorted(known))}")


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


def stored_tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of each trained parameter and stored buffer by the model's own name: live views without
    gradient, tied weights once."""
    seen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def trained(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, parameter) of the trained parameters by the model's own name, tied ones once."""
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def context_of(model: Any) -> int | None:
    """Return the maximum of tokens by the model's configuration, None if it has none."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(context) if context else None


def vocabulary_of(model: Any) -> int:
    """Return the size of the vocabulary: token ids are below it."""
    return int(model.get_input_embeddings().weight.shape[0])


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
