"""What an SGLang of one's own is started with: options of users, and what this adapter needs whatever they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow_sdk.errors import ConfigError

from .checkpoint import Checkpoint

ROOM = 7
"""SGLang keeps six tokens of its context to itself; one more, so that what fills it can be scored."""
_OURS = {
    "model", "model_path", "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "weight_version",
    "sampling_defaults", "preferred_sampling_params", "is_embedding",
}  # fmt: skip
_UNSET = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES")
"""Each changes what a request means."""


def own_options(
    model: str, options: Mapping[str, Any], *, dtype: str, context: int | None, version: int
) -> dict[str, Any]:
    """Of an SGLang, by the names of its ServerArgs. Raises ConfigError for options that are not the user's to set."""
    odd = sorted(name for name in options if name.replace("-", "_") in _OURS)
    if odd:
        raise ConfigError(
            f"option {odd[0]!r} of SGLang is this adapter's to say; to use a server as you start it, give url= to 'sglang'"
        )
    given = {"dtype": dtype, "log_level": "warning"} | {
        name.replace("-", "_"): value for name, value in options.items()
    }
    if context is not None:
        given["context_length"] = context + ROOM
    return given | {
        "model_path": model, "weight_version": str(version), "skip_tokenizer_init": True, "sampling_defaults": "openai",
    }  # fmt: skip


def own_arguments(
    model: str, options: Mapping[str, Any], *, port: int, key: str, dtype: str, context: int | None, version: int
) -> list[str]:
    """Of ``sglang.launch_server``, on its command line. Raises ConfigError for options that are not the user's to set."""
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


def served(model: str, options: Mapping[str, Any]) -> tuple[Checkpoint, dict[str, Any]]:
    """The folder as an SGLang with these options serves it, and the options that are left."""
    left = {name.replace("-", "_"): value for name, value in options.items()}
    dtype, length = left.pop("dtype", None), left.pop("context_length", None)
    checkpoint = Checkpoint(model, None if dtype in (None, "auto") else str(dtype))
    if length:
        checkpoint.context = int(length)
    return checkpoint, left


def own_environment() -> dict[str, str]:
    """What is set in its environment, whatever the worker's says."""
    return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | dict.fromkeys(_UNSET, "0")
