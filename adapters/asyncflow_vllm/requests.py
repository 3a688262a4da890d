"""Requests, as vLLM takes them, and its answers, as the SDK does. Token ids in and out: nothing is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completion, Completions, Request
from asyncflow_sdk.types import Ragged, VersionSpan

from .access import Answer

LOWEST_TEMPERATURE = 0.01
"""vLLM draws at this one when it is asked for a lower one that is not 0."""
_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}


class Limits:
    """``vocabulary``: token ids run below it. ``cuts``: whether log-probs are right where top-k or top-p cut the draw."""

    def __init__(self, *, vocabulary: int, context: int, rows: int) -> None:
        self.vocabulary, self.context, self.rows = vocabulary, context, rows
        self.cuts = False

    def check(self, request: Request) -> list[int]:
        """The prompt. Raises EngineError for a request that cannot be answered."""
        prompt = self.tokens(request.prompt_ids)
        sampling = request.sampling
        if not prompt:
            raise EngineError("a prompt has one token or more, and this one has none")
        if not 1 <= request.n <= self.rows:
            raise EngineError(f"n must be 1 to max_rows={self.rows}, not {request.n}")
        if len(prompt) + sampling.max_tokens > self.context:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens and max_tokens={sampling.max_tokens} need"
                f" {len(prompt) + sampling.max_tokens}; the context is {self.context}"
            )
        if not 0 <= request.drawn < len(prompt) or request.first < 0:
            raise EngineError(
                f"no response has drawn {request.drawn} of {len(prompt)} tokens, or number {request.first}"
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise EngineError(
                f"vLLM draws at temperature 0 or from {LOWEST_TEMPERATURE} on, not at {sampling.temperature}"
            )
        if not self.cuts and sampling.temperature and (sampling.top_k or sampling.top_p < 1):
            raise EngineError(
                "this vLLM does not give log-probs under the whole vocabulary where top_k or top_p cut the draw"
            )
        return prompt

    def tokens(self, ids: Any) -> list[int]:
        """Raises EngineError for what is no row of token ids."""
        row: np.ndarray[Any, Any] = np.asarray(ids)
        if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
            raise EngineError(f"a row of token ids was expected, and {row.dtype}{list(row.shape)} came")
        outside = row[(row < 0) | (row >= self.vocabulary)] if row.size else row
        if outside.size:
            raise EngineError(f"token id {outside[0]} is not in the vocabulary of {self.vocabulary}")
        return row.tolist()  # type: ignore[no-any-return]


def end_tokens(folder: str) -> list[int]:
    """Those that end a response, by the model folder alone: the tokenizer's is not asked."""
    for file in ("generation_config.json", "config.json"):
        path = Path(folder, file)
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return [found] if isinstance(found, int) else list(found)
    return []


def drawing(request: Request, ends: Sequence[int]) -> dict[str, Any]:
    """vLLM's SamplingParams, with the seed of the first response: nothing but what was asked for; its and the model's own defaults
    are switched off."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens, "seed": _seed(request), "logprobs": 0, "detokenize": False,
        "ignore_eos": True,  # which is the tokenizer's: the model's are among the following
        "stop_token_ids": [*ends, *sampling.stop_ids],
    }  # fmt: skip


def scoring() -> dict[str, Any]:
    """SamplingParams with which a prompt is read and its tokens' log-probs are given."""
    return {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}


def completions(answers: Sequence[Answer], first_version: int) -> Iterator[Completion | Completions]:
    """Of finished answers: together, if one version drew all of them. ``first_version``: what the weights are of that vLLM has
    started with."""
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


def _completion(answer: Answer, first_version: int) -> Completion:
    spans = tuple(
        VersionSpan(_number(label, first_version), start, end) for label, start, end in answer.versions if start < end
    )
    ids, logprobs = np.array(answer.token_ids, np.int32), np.array(answer.logprobs, np.float32)
    return Completion(answer.index, ids, logprobs, _REASONS[answer.reason], spans)


def _number(label: str, first_version: int) -> int:
    return first_version if label == "default" else int(label)


def _seed(request: Request) -> int | None:
    """Of the first response; other ones for what is drawn behind a part of one."""
    seed = request.sampling.seed if request.seed is None else request.seed
    if seed is None:
        return None
    words = [seed & (1 << 64) - 1, request.drawn]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> np.uint64(2)) + request.first
