"""A server as it is found: what it says of itself, and whether that will do. Blocking, for when an engine is made."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from asyncflow_sdk.errors import ConfigError, EngineError

from .calls import ANSWER_BYTES, CALL_S, said

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


class Claim:
    """That an engine of this host has the server at ``url``: versions of two in one would be nobody's. It ends with its process.
    Raises ConfigError where another has it."""

    def __init__(self, url: str) -> None:
        name = f"asyncflow-sglang-{os.getuid()}-{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"
        self._fd = os.open(
            Path(tempfile.gettempdir()) / name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(
                f"another engine of this host has the server at {url}; each replica needs a server of its own"
            ) from None

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def call_now(
    url: str, path: str, key: str | None, body: Mapping[str, Any] | None = None, *, timeout_s: float = CALL_S
) -> bytes:
    """One call, waited for. Raises EngineError for what is refused, and when there is no answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else msgspec.json.encode(body)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url + path, data, headers), timeout=timeout_s) as response:
            return bytes(response.read(ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        why = said(error.read(ANSWER_BYTES))
        raise EngineError(f"{url}{path} answered with status {error.code}: {why}") from None
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"{url}{path} cannot be reached: {error}") from None


def server_info(url: str, key: str | None) -> ServerInfo:
    """Raises EngineError, and for what is no SGLang server ConfigError."""
    try:
        return msgspec.json.decode(call_now(url, "/server_info", key), type=ServerInfo)
    except msgspec.DecodeError as error:
        raise ConfigError(f"what answers at {url} is no SGLang server that this adapter knows: {error}") from None
