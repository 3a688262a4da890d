"""Requests in SGLang's format."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncflow_http.limits import interval
from asyncflow_sdk.types import Sampling

Body = dict[str, Any]
_ANSWER_BYTES, _TOKEN_BYTES, _KEPT_BYTES = 64 << 10, 192, 12
"""Upper bounds of an answer's size: without tokens, per token, and per kept id of a token."""


def generate_body(
    prompt: Sequence[int], sampling: Sampling, kept: int = 0, *, seed: int | None = None, stream: bool = False
) -> Body:
    """Return the request for one response. It sets all sampling options: defaults of server and
    model have no effect. ``kept``: see ``most_kept``; SGLang gives a mask only with a top_k. ``stream``: the
    answer comes in parts, each with all tokens so far."""
    return {
        "input_ids": prompt, "return_logprob": True, "logprob_start_len": -1, "stream": stream,
        "return_sampling_mask": kept > 0,
        "sampling_params": {
            "temperature": sampling.temperature, "max_new_tokens": sampling.max_tokens, "top_p": sampling.top_p,
            "top_k": kept or sampling.top_k or -1, "min_p": sampling.min_p, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1, "ignore_eos": False,
            **({"stop_token_ids": list(sampling.stop_ids)} if sampling.stop_ids else {}),
            **({} if seed is None else {"sampling_seed": seed}),
            **({"stream_interval": interval(sampling.max_tokens)} if stream else {}),
        },
    }  # fmt: skip


def most_kept(sampling: Sampling, vocabulary: int) -> int:
    """Return the number of kept ids that a draw has at most; 0 for draws without a sampling mask."""
    cut = sampling.sampling_mask and sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1)
    return min(sampling.top_k or vocabulary, vocabulary) if cut else 0


def read_body(ids: Sequence[int], scored: bool = False) -> Body:
    """Return a request to read ``ids`` into the cache. ``scored``: answered with their log-probs at temperature 1."""
    return {
        "input_ids": ids, "return_logprob": scored, "logprob_start_len": 0 if scored else -1, "stream": False,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
    }  # fmt: skip


def load_calls(folder: str, version: int, load_format: str = "safetensors") -> list[tuple[str, Body]]:
    """Return the calls that load the weights in ``folder``. Running requests stop between two tokens and free their
    memory (retract), which lets the cache be emptied; SGLang recomputes them when it continues."""
    update = {
        "model_path": folder, "load_format": load_format, "weight_version": str(version), "flush_cache": True,
        "abort_all_requests": False,
    }  # fmt: skip
    return [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", update),
        ("/continue_generation", {}),
    ]


def answer_bytes(tokens: int, kept: int = 0) -> int:
    """Return the maximum size of an answer with log-probs, and ``kept`` kept ids, of each of ``tokens`` tokens."""
    return _ANSWER_BYTES + (_TOKEN_BYTES + _KEPT_BYTES * kept) * tokens


def response_seed(seed: int | None, number: int) -> int:
    """Return the seed of one response; a random one without ``seed``, since SGLang would give all
    responses the same."""
    if seed is None:
        return random.getrandbits(63)
    return int(np.random.SeedSequence([seed & (2**63 - 1), number]).generate_state(1, np.uint64)[0] >> 1)
