"""The engines of this package keep to the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing.kit.conformance import BoundCheck, Conformance
from asyncflow_sdk.testing.kit.precision import follows
from asyncflow_torch.reference import HuggingFacePolicy
from asyncflow_torch.rollout import TransformersEngine

rollout = Conformance("rollout", "transformers", options={"threads": 1, "max_rows": 32})
any_order = Conformance(
    "rollout", "transformers", options={"threads": 1, "max_rows": 32}, only=["any_order"], limit_s=40.0
)
half = Conformance(
    "rollout", "transformers", dtype="bfloat16", options={"threads": 1, "max_rows": 32, "dtype": "bfloat16"},
    only=["greedy", "company", "logprobs", "stops", "update", "stale_cache", "update_in_flight", "interrupted", "holds"],
)  # fmt: skip
train = Conformance("train", "torch", options={"threads": 1, "lr": 1e-3})
parts = Conformance(
    "train", "torch", options={"threads": 1, "micro_batch_tokens": 64}, only=["row_order", "companions"]
)


@rollout.parametrize
def test_the_rollout_engine_conforms(check: BoundCheck) -> None:
    check()


@half.parametrize
def test_the_rollout_engine_conforms_in_bfloat16(check: BoundCheck) -> None:
    check()


class IgnoresTemperature(TransformersEngine):
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        plain = replace(
            request, sampling=replace(request.sampling, temperature=float(request.sampling.temperature > 0))
        )
        async for got in super().generate(plain):
            yield got


class TakesAllButTheHead(TransformersEngine):
    def _load(self, update: af.WeightUpdate) -> set[str]:
        kept = self._model.lm_head.weight.clone()
        taken = super()._load(update)
        self._model.lm_head.weight.data.copy_(kept)
        return taken


@pytest.mark.parametrize(("engine", "check"), [(IgnoresTemperature, "logprobs"), (TakesAllButTheHead, "update")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_wrong_is_caught_in_lower_precision_too(engine: type[Any], check: str, dtype: str) -> None:
    report = Conformance("rollout", engine, dtype=dtype, options={"threads": 1, "dtype": dtype}, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]


def test_a_choice_that_rounding_decides_is_right_and_another_is_not() -> None:
    policy = HuggingFacePolicy()
    (prompt,) = policy.prompts(1)
    ids = policy.greedy(0, prompt, 8)
    ahead = policy.ahead(0, prompt, ids)
    second = np.sort(ahead)[:, -1] - np.sort(ahead)[:, -2]
    at = int(second.argmin())
    other = np.append(ids[:at], np.argsort(ahead[at])[-2]).astype(np.int32)

    assert follows(policy, 0, prompt, ids, 1e-4)
    assert follows(policy, 0, prompt, other, 4.1 * float(second[at]))
    assert not follows(policy, 0, prompt, other, 3.9 * float(second[at]))


@any_order.parametrize
def test_the_rollout_engine_conforms_in_any_order(check: BoundCheck) -> None:
    check()


@train.parametrize
def test_the_train_engine_conforms(check: BoundCheck) -> None:
    check()


@parts.parametrize
def test_the_train_engine_conforms_in_micro_batches(check: BoundCheck) -> None:
    check()


def test_the_rollout_engine_in_a_real_run_whose_replicas_are_killed() -> None:
    report = Conformance("rollout", "transformers", options={"threads": 1}, only=["killed"]).run()

    assert report.ok, report.to_dict()
