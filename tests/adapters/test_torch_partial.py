"""Responses that were interrupted and went on are those that would have come without: token for token, by the same numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.types import Sampling

Make = Callable[..., Any]
Watch = Callable[..., Any]
LIMIT_S = 60


async def _all(engine: Any, request: Request) -> list[Completion]:
    return sorted([c async for got in engine.generate(request) for c in got.each()], key=lambda c: c.index)


def _rest(request: Request, got: Completion) -> Request:
    """What is left of an interrupted response."""
    drawn = len(got.token_ids)
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - drawn)
    prompt = np.concatenate([request.prompt_ids, got.token_ids])
    return Request(prompt, sampling, 1, request.seed, drawn=drawn, first=got.index)


@pytest.mark.parametrize(
    ("sampling", "folder"),
    [({"temperature": 0}, "endless"), ({"top_k": 5, "temperature": 0.7}, "endless"), ({}, "tiny")],
)
def test_under_the_same_weights_it_is_the_response_that_was_not_interrupted(
    sampling: dict[str, Any], folder: str, request: Any, rollout: Make, passes: Watch, generate: Any,
    prompts: list[np.ndarray],
) -> None:  # fmt: skip
    # given groups of three, and what they draw undisturbed
    engine = rollout(request.getfixturevalue(folder))
    requests = [Request(p, Sampling(max_tokens=30, **sampling), n=3, seed=i) for i, p in enumerate(prompts[:3])]
    whole = generate(engine, requests)

    async def in_parts() -> list[list[Completion]]:
        gate = passes(6)
        running = [asyncio.ensure_future(_all(engine, each)) for each in requests]
        await gate.reached()
        await engine.interrupt()
        gate.go_on()
        return await asyncio.gather(*running)

    # when they are interrupted after six tokens, and each goes on by itself
    parts = asyncio.run(asyncio.wait_for(in_parts(), LIMIT_S))

    # then
    cut = [(r, c) for r, group in zip(requests, parts, strict=True) for c in group if c.finish_reason == "aborted"]
    rests = iter(generate(engine, [_rest(r, c) for r, c in cut]))
    assert cut
    assert {len(c.token_ids) for _, c in cut} == {6}
    for one, other in zip(whole, parts, strict=True):
        for a, b in zip(one, other, strict=True):
            ends = [b, *(next(rests) if b.finish_reason == "aborted" else [])]
            assert np.concatenate([each.token_ids for each in ends]).tolist() == a.token_ids.tolist()
            np.testing.assert_allclose(np.concatenate([each.logprobs for each in ends]), a.logprobs, atol=1e-4)
            assert ends[-1].finish_reason == a.finish_reason


def test_an_interruption_ends_what_was_asked_for_before_it_and_nothing_later(
    endless: str, rollout: Make, passes: Watch
) -> None:
    # given a request that runs, and one that waits for room
    engine = rollout(endless, max_rows=2)
    requests = [Request(np.array([5 + i], np.int32), Sampling(max_tokens=4), n=2) for i in range(3)]

    async def scenario() -> list[list[Completion]]:
        gate = passes(2)
        answers = [asyncio.ensure_future(_all(engine, request)) for request in requests[:2]]
        await gate.reached()
        # when another is asked for after the interruption
        await engine.interrupt()
        answers.append(asyncio.ensure_future(_all(engine, requests[2])))
        await asyncio.sleep(0)
        gate.go_on()
        return await asyncio.gather(*answers)

    ran, waited, later = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert [(c.finish_reason, len(c.token_ids)) for c in ran] == [("aborted", 2)] * 2
    assert [(c.finish_reason, len(c.token_ids)) for c in waited] == [("aborted", 0)] * 2
    assert [(c.finish_reason, len(c.token_ids)) for c in later] == [("length", 4)] * 2


def test_a_response_ends_at_a_stop_id_of_its_own_request(endless: str, rollout: Make, generate: Any) -> None:
    # given responses without an end, of which some requests name one
    plain = Sampling(max_tokens=30, temperature=0)
    prompts, engine = [np.array([5, 6], np.int32), np.array([9], np.int32)], rollout(endless)
    whole = [c.token_ids.tolist() for (c,) in generate(engine, [Request(p, plain) for p in prompts])]
    stop = whole[0][7]

    # when
    stopping = replace(plain, stop_ids=(stop, 0))
    (first,), (second,) = generate(engine, [Request(prompts[0], stopping), Request(prompts[1], plain)])

    # then
    assert first.token_ids.tolist() == whole[0][: whole[0].index(stop) + 1]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert second.token_ids.tolist() == whole[1]
