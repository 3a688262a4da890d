"""Rollout engines over a real model folder that are wrong in one way each, made from the right one of transformers.

Each does what libraries do unless they are told not to: with the folder's generation_config.json, its end tokens, its tokenizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import asyncflow_sdk as af
from asyncflow_sdk.types import VersionSpan
from asyncflow_torch import decode, wave
from asyncflow_torch.rollout import TransformersEngine


class OfAFolder(TransformersEngine):
    def __init__(self, model: str) -> None:
        super().__init__(model, threads=1, max_rows=32)
        self.defaults = GenerationConfig.from_pretrained(model)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.config = AutoConfig.from_pretrained(model)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(self.asked(request)):
            for one in got.each() if isinstance(got, af.Completions) else [got]:
                yield self.answered(one)

    def asked(self, request: af.Request) -> af.Request:
        return request

    def answered(self, got: af.Completion) -> af.Completion:
        return got

    def defaulting(self, request: af.Request, *names: str) -> af.Request:
        """With what generation_config.json says where the request has what says nothing."""
        given = {name: getattr(self.defaults, name) for name in names}
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        new = {name: value for name, value in given.items() if getattr(request.sampling, name) == neutral[name]}
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **new))

    def kept(self, got: af.Completion, length: int) -> af.Completion:
        spans = [VersionSpan(v, s, min(e, length)) for v, s, e in got.spans if s < length]
        return dataclasses.replace(got, token_ids=got.token_ids[:length], logprobs=got.logprobs[:length], spans=spans)


# ---- generation_config.json


class DefaultTopP(OfAFolder):
    def asked(self, request: af.Request) -> af.Request:
        return self.defaulting(request, "top_p")


class DefaultTopK(OfAFolder):
    def asked(self, request: af.Request) -> af.Request:
        return self.defaulting(request, "top_k")


class DefaultTemperature(OfAFolder):
    """Where 1 is asked for, which it takes for nothing said."""

    def asked(self, request: af.Request) -> af.Request:
        return self.defaulting(request, "temperature")


class DefaultPenalty(OfAFolder):
    """Draws with the repetition penalty; log-probs are those of the policy."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._thread._decoder = Penalising(self._model, self.defaults.repetition_penalty)


class Penalising(decode.Decoder):
    def __init__(self, model: Any, penalty: float) -> None:
        super().__init__(model)
        self.penalty = penalty

    def admit(self, works: Any) -> Any:
        prompt = torch.from_numpy(np.unique(np.concatenate([work.prompt for work in works]))).long()
        right = wave.draw

        def draw(logits: Any, temperature: Any, uniform: Any, **cut: Any) -> Any:
            read = logits[:, prompt]
            less = logits.index_copy(1, prompt, torch.where(read > 0, read / self.penalty, read * self.penalty))
            token, _ = right(less, temperature, uniform, **cut)
            scored = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature)[:, None], -1)
            return token, scored.gather(-1, token[:, None])[:, 0]

        wave.draw = draw
        try:
            return super().admit(works)
        finally:
            wave.draw = right


# ---- end tokens


class OneEndToken(OfAFolder):
    """That of config.json; generation_config.json has another one too."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._thread._decoder._ends = torch.tensor([self.config.eos_token_id])


class DropsTheEndToken(OfAFolder):
    def answered(self, got: af.Completion) -> af.Completion:
        ended = got.finish_reason == "stop"
        return self.kept(got, max(len(got.token_ids) - 1, 1)) if ended else got


# ---- text


class PromptsAsText(OfAFolder):
    def asked(self, request: af.Request) -> af.Request:
        ids = self.tokenizer.encode(self.tokenizer.decode(request.prompt_ids), add_special_tokens=False)
        return dataclasses.replace(request, prompt_ids=np.array(ids, np.int32))


class ResponsesAsText(OfAFolder):
    def answered(self, got: af.Completion) -> af.Completion:
        ids = self.tokenizer.encode(self.tokenizer.decode(got.token_ids), add_special_tokens=False)
        got = self.kept(got, len(ids))
        return dataclasses.replace(got, token_ids=np.array(ids[: len(got.token_ids)], np.int32))
