"""Options of an SGLang started by the engine: the user's, and those required by this adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow_sdk.errors import ConfigError

from .served_folder import ServedFolder

EXTRA_CONTEXT = 7
"""SGLang reserves six tokens of its context; one more lets a full context be scored."""
_OURS = {
    "model", "model_path", "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "weight_version",
    "sampling_defaults", "preferred_sampling_params", "is_embedding",
}  # fmt: skip
_UNSET = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES")
"""Variables that change the meaning of a request."""


def own_options(
    model: str, options: Mapping[str, Any], *, dtype: str, context: int | None, version: int
) -> dict[str, Any]:
    """Return the options by the names of SGLang's ServerArgs. Raises ConfigError for options set by this adapter."""
    odd = sorted(name for name in options if name.replace("-", "_") in _OURS)
    if odd:
        raise ConfigError(
            f"option {odd[0]!r} of SGLang is set by this adapter; to use a server started by you, give url= to"
            " 'sglang'"
        )
    given = {"dtype": dtype, "log_level": "warning"} | {
        name.replace("-", "_"): value for name, value in options.items()
    }
    if context is not None:
        given["context_length"] = context + EXTRA_CONTEXT
    return given | {
        "model_path": model, "weight_version": str(version), "skip_tokenizer_init": True, "sampling_defaults": "openai",
    }  # fmt: skip


def own_arguments(
    model: str, options: Mapping[str, Any], *, port: int, key: str, dtype: str, context: int | None, version: int
) -> list[str]:
    """Return the command line of ``sglang.launch_server``. Raises ConfigError for options set by this adapter."""
    given = own_options(model, options, dtype=dtype, context=context, version=version)
    given |= {"host": "127.0.0.1", "port": port, "api_key": key}
    arguments = []
    for option, value in given.items():
        name = option.replace("_", "-")
        if value is True:
            arguments.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def folder_and_options(model: str, options: Mapping[str, Any]) -> tuple[ServedFolder, dict[str, Any]]:
    """Return the folder with the dtype and context of ``options``, and the other options."""
    left = {name.replace("-", "_"): value for name, value in options.items()}
    dtype, length = left.pop("dtype", None), left.pop("context_length", None)
    folder = ServedFolder(model, None if dtype in (None, "auto") else str(dtype))
    if length:
        folder.context = int(length)
    return folder, left


def own_environment() -> dict[str, str]:
    """Return environment variables that override the worker's."""
    return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | dict.fromkeys(_UNSET, "0")
