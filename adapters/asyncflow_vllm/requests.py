"""Requests in vLLM's format, and its answers as completions. Token ids only: nothing is tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from asyncflow_http.limits import RequestLimits
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completion, Completions, Request
from asyncflow_sdk.types import Ragged, VersionSpan

from .access import VllmAnswer

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures, except 0, to this one."""
_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}


class Limits(RequestLimits):
    """``cuts``: True if log-probs are under the whole vocabulary with top-k or top-p."""

    context: int
    cuts = False

    def check(self, request: Request) -> list[int]:
        """Return the prompt. Raises EngineError for a request that cannot be answered."""
        prompt, sampling = super().check(request), request.sampling
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise EngineError(
                f"vLLM draws at temperature 0 or from {LOWEST_TEMPERATURE} on, not at {sampling.temperature}"
            )
        if not self.cuts and sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            raise EngineError(
                "this vLLM does not give log-probs under the whole vocabulary where top_k or top_p cut the draw"
            )
        return prompt


def drawing(request: Request, ends: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's SamplingParams with the seed of the first response. Defaults of vLLM and of
    the model are switched off."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens, "seed": _seed(request), "logprobs": 0, "detokenize": False,
        "ignore_eos": True,  # of the tokenizer; the model's end tokens are stop_token_ids
        "stop_token_ids": [*ends, *sampling.stop_ids],
    }  # fmt: skip


def scoring() -> dict[str, Any]:
    """Return SamplingParams to read a prompt and return the log-probs of its tokens."""
    return {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}


def completions(answers: Sequence[VllmAnswer], first_version: int) -> Iterator[Completion | Completions]:
    """Yield finished answers, packed together if one version drew all of them.
    ``first_version``: of the weights that vLLM started with."""
    labels = {label for answer in answers for label, start, end in answer.versions if start < end}
    if len(answers) == 1 or len(labels) != 1 or not all(answer.token_ids for answer in answers):
        yield from (_completion(answer, first_version) for answer in answers)
        return
    ids = Ragged.of([np.array(answer.token_ids, np.int32) for answer in answers])
    yield Completions(
        np.array([answer.index for answer in answers], np.int64),
        ids,
        Ragged(np.concatenate([np.array(answer.logprobs, np.float32) for answer in answers]), ids.offsets),
        [_REASONS[answer.reason] for answer in answers],
        _number(labels.pop(), first_version),
    )


def _completion(answer: VllmAnswer, first_version: int) -> Completion:
    spans = tuple(
        VersionSpan(_number(label, first_version), start, end) for label, start, end in answer.versions if start < end
    )
    ids, logprobs = np.array(answer.token_ids, np.int32), np.array(answer.logprobs, np.float32)
    return Completion(answer.index, ids, logprobs, _REASONS[answer.reason], spans)


def _number(label: str, first_version: int) -> int:
    return first_version if label == "default" else int(label)


def _seed(request: Request) -> int | None:
    """Return the seed of the first response; a different one for the continuation of a partial response."""
    seed = request.sampling.seed if request.seed is None else request.seed
    if seed is None:
        return None
    words = [seed & (1 << 64) - 1, request.drawn]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(2)) + request.first
