"""A server as it is found: where it may be, and what it says. Blocking, for when an engine is made."""

from __future__ import annotations

import msgspec

from asyncflow_http.calls import base_url, is_loopback
from asyncflow_http.finding import call_now
from asyncflow_sdk.errors import ConfigError

from .info import ServerInfo


def check_url(url: str, key: str | None) -> str:
    """The URL of a server, without what is behind its port. Raises ConfigError for what is none, and for one beyond this
    host without a key: who reaches an SGLang server without one can have it run code."""
    at = base_url(url)
    if not key and not is_loopback(at):
        raise ConfigError(
            f"url={url!r} is another host, and there is no key: start that server with --api-key, and name the environment"
            " variable that holds the key with key_env="
        )
    return at


def server_info(url: str, key: str | None) -> ServerInfo:
    """Raises EngineError, and for what is no SGLang server ConfigError."""
    try:
        return msgspec.json.decode(call_now(url, "/server_info", key), type=ServerInfo)
    except msgspec.DecodeError as error:
        raise ConfigError(f"what answers at {url} is no SGLang server that this adapter knows: {error}") from None
