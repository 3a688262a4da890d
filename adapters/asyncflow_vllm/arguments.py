"""Engine arguments of vLLM, and a check of the installed version."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Mapping
from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM

from asyncflow_sdk.errors import ConfigError

from .registration import BACKEND, register

_CALLS = ("pause_generation", "resume_generation", "start_weight_update", "update_weights", "finish_weight_update")


def check_installed() -> None:
    """Raise ConfigError if the installed vLLM cannot take new weights between two tokens."""
    missing = [name for name in _CALLS if not hasattr(AsyncLLM, name)]
    if missing:
        raise ConfigError(f"this vLLM has no {', '.join(missing)}: it is too old to be given new weights")
    pause = inspect.signature(AsyncLLM.pause_generation).parameters
    spans = "weight_versions" in inspect.signature(CompletionOutput).parameters
    if not ({"mode", "clear_cache"} <= pause.keys() and spans):
        raise ConfigError(
            "this vLLM cannot stop between two tokens, or does not return the version of each token: update it"
        )


def arguments(
    model: str, *, dtype: str, tensor_parallel: int, max_rows: int, context: int | None, options: Mapping[str, Any]
) -> Any:
    """Return vLLM's AsyncEngineArgs. Raises ConfigError for options unknown to vLLM."""
    known = inspect.signature(AsyncEngineArgs).parameters
    odd = sorted(options.keys() - known.keys())
    if odd:
        raise ConfigError(f"vLLM has no engine argument {', '.join(map(repr, odd))}")
    register()
    return AsyncEngineArgs(
        model=model,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel,
        max_num_seqs=max_rows,
        max_model_len=context,
        skip_tokenizer_init=True,
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        worker_extension_cls="asyncflow_vllm.worker.WorkerExtension",
        **{
            "seed": secrets.randbits(31),  # a fixed one would have all replicas draw the same
            "disable_log_stats": True,
            **options,
        },
    )
