"""ServerInfo: SGLang's description of itself, and its check."""

from __future__ import annotations

import msgspec
from packaging.version import InvalidVersion, Version

from asyncflow_sdk.errors import ConfigError

OLDEST = "0.5.23"


class ServerInfo(msgspec.Struct):
    """Used options of an SGLang. ``max_req_input_len``: prompts are shorter. ``sampling_mask_max_tokens``: kept
    ids of a draw at most."""

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
    incremental_streaming_output: bool = False
    enable_deterministic_inference: bool = False
    sampling_mask_max_tokens: int = 4096

    def check(self, name: str) -> None:
        """Raise ConfigError, with all reasons, if versions cannot be loaded or tokens carry no version."""
        try:
            old = Version(self.version) < Version(OLDEST)
        except InvalidVersion:
            old = False  # a build of the user's own
        found = {
            f"it is SGLang {self.version}, and {OLDEST} is the first to return the version of each token": old,
            "it serves embeddings": self.is_embedding,
            "it only prefills or only decodes (disaggregation_mode), so running requests cannot be continued":
                self.disaggregation_mode != "null",
            "it drafts tokens (speculative_algorithm), and a version has no weights for its draft model":
                bool(self.speculative_algorithm),
            "it shares its weights with others (weight_cache_mode)": self.weight_cache_mode != "off",
            "its cache outlives an update (hicache_storage_backend)": bool(self.hicache_storage_backend),
            "it has several tokenizer workers, and a pause reaches only one (tokenizer_worker_num)":
                self.tokenizer_worker_num != 1,
            "it streams answers without their first tokens (incremental_streaming_output)":
                self.incremental_streaming_output,
        }  # fmt: skip
        if problems := [reason for reason, holds in found.items() if holds]:
            raise ConfigError(f"{name} cannot be used: " + "; ".join(problems))
