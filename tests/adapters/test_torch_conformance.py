"""The engines of this package keep to the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing.kit.conformance import BoundCheck, Conformance, checks_of
from asyncflow_sdk.testing.kit.precision import follows
from asyncflow_sdk.types import VersionSpan
from asyncflow_torch.generation.sequence_slots import SequenceSlots
from asyncflow_torch.reference import HuggingFacePolicy

ACCEPT = SequenceSlots.accept
TransformersEngine: Any = registry().get("rollout", "transformers").load()

CHECKS = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") or each.name == "any_order"]
rollout = Conformance("rollout", "transformers", options={"threads": 1, "max_rows": 32}, only=CHECKS)
half = Conformance(
    "rollout", "transformers", dtype="bfloat16", options={"threads": 1, "max_rows": 32, "dtype": "bfloat16"},
    only=["greedy", "company", "logprobs", "stops", "update", "stale_cache", "update_in_flight", "interrupted", "holds"],
)  # fmt: skip
train = Conformance("train", "torch", options={"threads": 1, "learning_rate": 1e-3})
parts = Conformance(
    "train", "torch", options={"threads": 1, "micro_batch_tokens": 64}, only=["row_order", "companions"]
)


@rollout.parametrize
def test_the_rollout_engine_conforms(check: BoundCheck) -> None:
    check()


@half.parametrize
def test_the_rollout_engine_conforms_in_bfloat16(check: BoundCheck) -> None:
    check()


class IgnoresTemperature(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        plain = replace(
            request, sampling=replace(request.sampling, temperature=float(request.sampling.temperature > 0))
        )
        async for got in super().generate(plain):
            yield got


class TakesAllButTheHead(TransformersEngine):  # type: ignore[misc]
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        head = dict(self.held_weights())["lm_head.weight"]
        kept = head.clone()
        taken: set[str] = await super().load_weights(update)
        head.copy_(kept)
        return taken


@pytest.mark.parametrize(
    ("engine", "check", "dtype"),
    [(IgnoresTemperature, "logprobs", "bfloat16"), (TakesAllButTheHead, "update", "float16")],
)
def test_what_is_wrong_is_caught_in_lower_precision_too(engine: type[Any], check: str, dtype: str) -> None:
    report = Conformance("rollout", engine, dtype=dtype, options={"threads": 1, "dtype": dtype}, only=[check]).run()

    assert [result.outcome for result in report.results] == ["failed"]


class StopsATokenEarly(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(request):
            for each in got.each():
                early = len(each.token_ids) - 1 if request.sampling.stop else len(each.token_ids)
                ids, logprobs, spans = each.token_ids[:early], each.logprobs[:early], [VersionSpan(0, 0, early)]
                yield replace(each, token_ids=ids, logprobs=logprobs, spans=spans)


class IgnoresStopTexts(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(replace(request, sampling=replace(request.sampling, stop=()))):
            yield got


class LooksFromTheSecondTokenOn(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(replace(request, decode=lambda ids: request.decode(ids[1:]))):
            yield got


class ForgetsWhatWasDrawn(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(replace(request, drawn=0)):
            yield got


class PenalisesThePromptOnly(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        def accept(slots: SequenceSlots, *drawn: Any) -> None:
            seen = slots.seen.clone()
            ACCEPT(slots, *drawn)
            slots.seen.copy_(seen)

        with mock.patch.object(SequenceSlots, "accept", accept):
            async for got in super().generate(request):
                yield got


class DrawsFromAll(TransformersEngine):  # type: ignore[misc]
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        plain = replace(request.sampling, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
        async for got in super().generate(replace(request, sampling=plain)):
            yield got


class WrongMasks(TransformersEngine):  # type: ignore[misc]
    """``change``: of a response, after its prompt."""

    async def change(self, prompt: Any, got: af.Completion) -> af.Completion:
        return replace(got, logprobs=(await self.logprobs([prompt], [got.token_ids]))[0])

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(request):
            for each in got.each():
                wrong = request.sampling.sampling_mask and each.columns["kept_ids_counts"].any()
                yield await self.change(request.prompt_ids, each) if wrong else each


class KeepsWhatItDrew(WrongMasks):
    async def change(self, prompt: Any, got: af.Completion) -> af.Completion:
        mask = {"kept_ids": got.token_ids, "kept_ids_counts": np.ones_like(got.token_ids)}
        return replace(got, columns=mask)


class KeepsOneTooMany(WrongMasks):
    async def change(self, prompt: Any, got: af.Completion) -> af.Completion:
        ids, counts = (got.columns[name] for name in ("kept_ids", "kept_ids_counts"))
        first = ids[: counts[0]].tolist()
        more = next(token for token in range(40, 0, -1) if token not in first)
        mask = {"kept_ids": [more, *ids.tolist()], "kept_ids_counts": counts + (np.arange(len(counts)) == 0)}
        return replace(got, columns=mask)


class KeepsTheTokensBeside(WrongMasks):
    async def change(self, prompt: Any, got: af.Completion) -> af.Completion:
        return replace(got, columns={**got.columns, "kept_ids": (got.columns["kept_ids"] + 1) % 43})


@pytest.mark.parametrize(
    ("engine", "check", "message"),
    [
        (WrongMasks, "sampling_mask", "from those of the policy over the kept ids"),
        (KeepsWhatItDrew, "sampling_mask", "and it could be ["),
        (KeepsOneTooMany, "sampling_mask", "and it could not be ["),
        (KeepsTheTokensBeside, "sampling_mask", ": not the drawn one, or one twice"),
        (StopsATokenEarly, "stop_texts", "before its stop text"),
        (IgnoresStopTexts, "stop_texts", "goes on over its stop text"),
        (LooksFromTheSecondTokenOn, "stop_texts", "over its stop text, drawn as its first token"),
        (ForgetsWhatWasDrawn, "stop_texts", "over its stop text, begun before it was interrupted"),
        (ForgetsWhatWasDrawn, "continued", "drawn=0 and drawn=1 (`drawn` is ignored)"),
        (PenalisesThePromptOnly, "restricted", "with repetition_penalty=1000 come twice"),
        (DrawsFromAll, "restricted", "some are not allowed"),
    ],
)
def test_stops_and_draws_other_than_asked_for_are_caught(engine: type[Any], check: str, message: str) -> None:
    options = {"threads": 1, "max_rows": 16}
    (result,) = Conformance("rollout", engine, options=options, only=[check], limit_s=250.0).run().results

    assert (result.outcome, message in result.detail) == ("failed", True), result.detail


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


@train.parametrize
def test_the_train_engine_conforms(check: BoundCheck) -> None:
    check()


@parts.parametrize
def test_the_train_engine_conforms_in_micro_batches(check: BoundCheck) -> None:
    check()
