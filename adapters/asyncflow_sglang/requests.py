"""What an SGLang server is asked, in its words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Request
from asyncflow_sdk.types import Sampling

Body = dict[str, Any]
_ANSWER_BYTES, _TOKEN_BYTES = 64 << 10, 160
"""An answer takes no more than this, and this for each token of it."""


def generate_body(prompt: Sequence[int], sampling: Sampling, *, seed: int | None = None) -> Body:
    """Of one response. Everything that changes a draw is said, so that no default of the server or the model does."""
    return {
        "input_ids": prompt, "return_logprob": True, "logprob_start_len": -1, "stream": False,
        "sampling_params": {
            "temperature": sampling.temperature, "max_new_tokens": sampling.max_tokens, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
            "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1, "ignore_eos": False,
            **({"stop_token_ids": list(sampling.stop_ids)} if sampling.stop_ids else {}),
            **({} if seed is None else {"sampling_seed": seed}),
        },
    }  # fmt: skip


def read_body(prompt: Sequence[int]) -> Body:
    """Only reads a prompt, so that what follows finds it read."""
    return {"input_ids": prompt, "stream": False, "sampling_params": {"temperature": 0.0, "max_new_tokens": 0}}


def score_body(ids: Sequence[int]) -> Body:
    """Of the log-probs of ``ids``, each after those before it, at temperature 1."""
    return {
        "input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "stream": False,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
    }  # fmt: skip


def load_calls(folder: str, version: int, load_format: str = "safetensors") -> list[tuple[str, Body]]:
    """Calls, one after another, by which a server is on the weights in ``folder``. What runs is stopped between two tokens and gives
    its memory back (retract), so that the cache can be emptied; it is read anew when the server goes on."""
    update = {
        "model_path": folder, "load_format": load_format, "weight_version": str(version), "flush_cache": True,
        "abort_all_requests": False,
    }  # fmt: skip
    return [
        ("/pause_generation", {"mode": "retract"}),
        ("/update_weights_from_disk", update),
        ("/continue_generation", {}),
    ]


def answer_bytes(tokens: int) -> int:
    """What an answer with log-probs of so many tokens may take."""
    return _ANSWER_BYTES + _TOKEN_BYTES * tokens


def response_seed(seed: int | None, number: int) -> int:
    """Of one response, for a server that draws by seeds: it would give all that have none the same one."""
    if seed is None:
        return random.getrandbits(63)
    return int(np.random.SeedSequence([seed & (2**63 - 1), number]).generate_state(1, np.uint64)[0] >> 1)


def token_ids(request: Request, *, vocabulary: int, context: int | None, max_rows: int) -> list[int]:
    """The prompt of a request that can be answered. Raises EngineError for one that cannot."""
    prompt: Any = np.asarray(request.prompt_ids)
    if prompt.ndim != 1 or not prompt.size:
        raise EngineError(f"a prompt is one row of one token or more, not of shape {prompt.shape}")
    if prompt.dtype.kind not in "iu":
        raise EngineError(f"a prompt is token ids, not {prompt.dtype}")
    check_ids(prompt, vocabulary)
    if not 1 <= request.n <= max_rows:
        raise EngineError(f"n must be 1 to max_rows={max_rows}, not {request.n}")
    longest = prompt.size + request.sampling.max_tokens
    if context is not None and longest > context:
        raise EngineError(
            f"a prompt of {prompt.size} tokens and max_tokens={request.sampling.max_tokens} need {longest};"
            f" the server's context is {context}"
        )
    return [int(token) for token in prompt]


def check_ids(ids: npt.NDArray[Any], vocabulary: int) -> None:
    """Raise EngineError for a token that is none: a server that is given one ends."""
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.size:
        raise EngineError(f"token id {outside[0]} is not in the vocabulary of {vocabulary}")
