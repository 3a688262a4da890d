"""The model of the kit has what engines stumble over: those that do are caught, each by the check that is for it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.precision import FALSE_ALARM, chance
from asyncflow_sdk.types import VersionSpan

pytest.importorskip("torch")

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from asyncflow_torch.kit_model import END, END_OF_TURN
from asyncflow_torch.reference import HuggingFacePolicy
from asyncflow_torch.rollout import TransformersEngine

NEUTRAL = {"temperature": 1.0, "top_k": 0}


class WrongModel(TransformersEngine):
    """A right engine but for one fault: what libraries do unless they are told not to, with the folder's
    generation_config.json, its end tokens and its tokenizer."""

    def __init__(self, model: str, *, fault: str = "") -> None:
        self.fault, self.model = fault, model
        with tempfile.TemporaryDirectory() as folder:
            if fault == "knows one end token":  # that of config.json; generation_config.json has another one too
                model = shutil.copytree(model, folder, dirs_exist_ok=True)
                ends = AutoConfig.from_pretrained(model).eos_token_id
                path = Path(model, "generation_config.json")
                path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
            super().__init__(model, threads=1, max_rows=32)
        self.decoder: dict[str, Any] = vars(vars(self._thread)["_decoder"])
        self.ends = self.decoder["_ends"]
        self.defaults = GenerationConfig.from_pretrained(self.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(self._asked(request)):
            for one in got.each():
                yield self._answered(one)

    def _asked(self, request: af.Request) -> af.Request:
        if self.fault == "prompts as text":
            return replace(request, prompt_ids=np.array(self._retokenised(request.prompt_ids), np.int32))
        if self.fault == "knows stop_ids or end tokens":
            self.decoder["_ends"] = self.ends[: 0 if request.sampling.stop_ids else None]
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


CAUGHT = {
    "default top_k": ("draws", r"none was beyond the (49|50) likeliest, and \d+\.\d% should be: the draw is cut"),
    "default temperature": ("logprobs", r"at temperature 1 "),
    "knows one end token": ("ends", rf"goes on after stop token \[{END_OF_TURN}\], its token \[\d+\]"),
    "knows stop_ids or end tokens": ("ends", r"goes on after stop token \[\d+\]"),
    "drops the end token": ("ends", r"says that it ended at a stop token, and its last one is \[\d+\]"),
    "prompts as text": ("retokenised", r"(those after|the answer to) the prompt decoded to text and encoded again"),
    "responses as text": ("retokenised", r"are decoded to text and encoded again"),
}


@pytest.fixture(scope="module")
def policy() -> HuggingFacePolicy:
    return HuggingFacePolicy()


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_wrong_engine_is_caught(fault: str, policy: HuggingFacePolicy) -> None:
    check, reason = CAUGHT[fault]
    (result,) = (
        Conformance("rollout", WrongModel, options={"fault": fault}, policy=policy, only=[check]).run().results
    )

    assert result.outcome == "failed"
    assert re.search(reason, result.detail), result.detail


def test_the_right_one_passes_them(policy: HuggingFacePolicy) -> None:
    checks = sorted({check for check, _ in CAUGHT.values()})
    report = Conformance("rollout", WrongModel, policy=policy, only=checks).run()

    assert [result.outcome for result in report.results] == ["passed"] * len(checks)


def test_greedy_comes_to_each_end_token_and_text_keeps_few_prompts(policy: HuggingFacePolicy) -> None:
    """The checks look for such prompts: here they are, and none is passed for want of them."""
    prompts = policy.prompts(96, seed=10)
    last = {int(policy.greedy(0, prompt, 24)[-1]) for prompt in prompts}
    changed = [not np.array_equal(policy.retokenised(prompt), prompt) for prompt in prompts]

    assert policy.ends == (END, END_OF_TURN)
    assert {END, END_OF_TURN} <= last
    assert sum(changed) > 80


def test_chance_is_never_less_than_what_happens() -> None:
    """A mean that comes about by chance is not said to be rarer than it is; one that does not, is."""
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(30))
    values = np.log(shares)
    means = random.choice(values, (20_000, 50), p=shares).mean(1)
    for share in (0.1, 0.01, 0.001):
        mean = float(np.quantile(means, share))
        assert chance(values, shares, mean, 50) >= share * 0.9
    assert chance(values, shares, float(values.max()), 640) < FALSE_ALARM
    assert chance([0, 1], [0.5, 0.5], 0.5, 640) == 1.0
