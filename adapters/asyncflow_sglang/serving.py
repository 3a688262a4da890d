"""A server as it is found: what it says of itself, and whether that will do. Blocking, for when an engine is made."""

from __future__ import annotations

import msgspec
from packaging.version import InvalidVersion, Version

from asyncflow_http.calls import base_url, is_loopback
from asyncflow_http.finding import call_now
from asyncflow_sdk.errors import ConfigError

OLDEST = "0.5.23"


class ServerInfo(msgspec.Struct):
    """Of /server_info: what it was started with, as far as it matters here. ``max_req_input_len``: prompts are shorter."""

    version: str
    max_req_input_len: int
    dtype: str = "auto"
    is_embedding: bool = False
    disaggregation_mode: str = "null"
    speculative_algorithm: str | None = None
    weight_cache_mode: str = "off"
    hicache_storage_backend: str | None = None
    tokenizer_worker_num: int = 1
    enable_deterministic_inference: bool = False

    def check(self, name: str) -> None:
        """Raise ConfigError, with all reasons, unless versions can be loaded into it and told apart."""
        problems = []
        try:
            old = Version(self.version) < Version(OLDEST)
        except InvalidVersion:
            old = False  # one that somebody built
        if old:
            problems.append(
                f"it is SGLang {self.version}, and {OLDEST} is the first that says which version drew each token"
            )
        if self.is_embedding:
            problems.append("it serves embeddings")
        if self.disaggregation_mode != "null":
            problems.append(
                "it only prefills or only decodes (disaggregation_mode), so that what runs cannot be read anew"
            )
        if self.speculative_algorithm:
            problems.append(
                "it drafts tokens (speculative_algorithm), and a version has no weights for its draft model"
            )
        if self.weight_cache_mode != "off":
            problems.append("it shares its weights with others (weight_cache_mode)")
        if self.hicache_storage_backend:
            problems.append("its cache outlives an update (hicache_storage_backend)")
        if self.tokenizer_worker_num != 1:
            problems.append(
                "it has several tokenizer workers, of which only one hears of a pause (tokenizer_worker_num)"
            )
        if problems:
            raise ConfigError(f"{name} cannot be used: " + "; ".join(problems))


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
