"""What an SGLang says of itself, and whether that will do."""

from __future__ import annotations

import msgspec
from packaging.version import InvalidVersion, Version

from asyncflow_sdk.errors import ConfigError

OLDEST = "0.5.23"


class ServerInfo(msgspec.Struct):
    """What an SGLang was started with, as far as it matters here. ``max_req_input_len``: prompts are shorter."""

    version: str
    max_req_input_len: int
    model_path: str
    revision: str | None = None
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
