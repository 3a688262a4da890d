"""What a server of one's own is started with: options of users, and what this adapter needs whatever they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncflow_sdk.errors import ConfigError

ROOM = 7
"""SGLang keeps six tokens of its context to itself; one more, so that what fills it can be scored."""
_OURS = {
    "model", "model_path", "host", "port", "api_key", "admin_api_key", "skip_tokenizer_init", "weight_version",
    "sampling_defaults", "preferred_sampling_params", "is_embedding",
}  # fmt: skip
_UNSET = ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES")
"""Each changes what a request means."""


def own_arguments(
    model: str, options: Mapping[str, Any], *, port: int, key: str, dtype: str, context: int | None, version: int
) -> list[str]:
    """Of ``sglang.launch_server``. Raises ConfigError for options that are not the user's to set."""
    odd = sorted(name for name in options if name.replace("-", "_") in _OURS)
    if odd:
        raise ConfigError(
            f"server={{{odd[0]!r}: ...}}: that is this adapter's to say; to use a server as you start it, give url="
        )
    given = {name.replace("_", "-"): value for name, value in options.items()}
    if context is not None:
        given["context-length"] = context + ROOM
    given = {"dtype": dtype, "log-level": "warning"} | given
    given |= {
        "model-path": model, "host": "127.0.0.1", "port": port, "api-key": key, "weight-version": version,
        "skip-tokenizer-init": True, "sampling-defaults": "openai",
    }  # fmt: skip
    arguments = []
    for name, value in given.items():
        if value is True:
            arguments.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None and value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def own_environment() -> dict[str, str]:
    """What is set in a server's environment, whatever the worker's says."""
    return {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"} | dict.fromkeys(_UNSET, "0")
