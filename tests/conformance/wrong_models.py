"""A rollout engine over a real model folder with one fault, made from the right one of transformers.

Each fault is what libraries do unless they are told not to: with the folder's generation_config.json, its end tokens, its tokenizer.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import asyncflow_sdk as af
from asyncflow_sdk.types import VersionSpan
from asyncflow_torch.rollout import TransformersEngine

NEUTRAL = {"temperature": 1.0, "top_k": 0}


class WrongModel(TransformersEngine):
    def __init__(self, model: str, *, fault: str = "") -> None:
        self.fault, self.model = fault, model
        with tempfile.TemporaryDirectory() as folder:
            if fault == "knows one end token":  # that of config.json; generation_config.json has another one too
                model = shutil.copytree(model, folder, dirs_exist_ok=True)
                ends = AutoConfig.from_pretrained(model).eos_token_id
                path = Path(model, "generation_config.json")
                path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
            super().__init__(model, threads=1, max_rows=32)
        self.defaults = GenerationConfig.from_pretrained(self.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(self._asked(request)):
            for one in got.each():
                yield self._answered(one)

    def _asked(self, request: af.Request) -> af.Request:
        if self.fault == "prompts as text":
            return replace(request, prompt_ids=np.array(self._retokenised(request.prompt_ids), np.int32))
        default = self.fault.removeprefix("default ")
        if default not in NEUTRAL or getattr(request.sampling, default) != NEUTRAL[default]:
            return request
        return replace(request, sampling=replace(request.sampling, **{default: getattr(self.defaults, default)}))

    def _answered(self, got: af.Completion) -> af.Completion:
        ids = list(got.token_ids)
        if self.fault == "drops the end token" and got.finish_reason == "stop":
            ids = ids[: max(len(ids) - 1, 1)]
        elif self.fault == "responses as text":
            ids = self._retokenised(ids)[: len(ids)]
        spans = [VersionSpan(v, s, min(e, len(ids))) for v, s, e in got.spans if s < len(ids)]
        return replace(got, token_ids=np.array(ids, np.int32), logprobs=got.logprobs[: len(ids)], spans=spans)

    def _retokenised(self, ids: object) -> list[int]:
        return list(self.tokenizer.encode(self.tokenizer.decode(ids), add_special_tokens=False))
