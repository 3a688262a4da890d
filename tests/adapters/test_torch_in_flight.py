"""Weights loaded while requests run: which version drew which token, and that its log-prob is that version's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow_sdk.errors import EngineError, WeightError, WeightMismatch
from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing.kit.updates import HeldUpdate
from asyncflow_sdk.types import Batch, Sampling

Make = Callable[..., Any]
Watch = Callable[..., Any]
Ids = np.ndarray[Any, np.dtype[np.int32]]
LIMIT_S = 60


def _trainer(folder: str) -> Any:
    engine: Any = registry().get("train", "torch").load()
    return engine(folder)


def _versions(folder: str, count: int) -> list[dict[str, Any]]:
    """The folder's weights, and ``count`` versions that are clearly others."""
    first = {n: t.detach().clone() for n, t in _trainer(folder).named_weights()}
    made = [first]
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        made.append({n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in first.items()})
    return made


@pytest.fixture
def swapped(make_update: Any, passes: Watch) -> Callable[..., list[list[Completion]]]:
    """Runs requests on an engine, and loads versions 1, 2, ..., each so many passes after the last; completions by request."""

    def run(
        engine: Any, requests: list[Request], versions: list[dict[str, Any]], after: list[int]
    ) -> list[list[Completion]]:
        async def scenario() -> list[list[Completion]]:
            gate = passes(after[0])
            running = [asyncio.ensure_future(_all(engine, request)) for request in requests]
            for number in range(1, len(after) + 1):
                if number > 1:
                    gate.hold(after[number - 1])
                await gate.reached()
                taken = await gate.load(engine, make_update(versions[number], version=number))
                assert taken == versions[number].keys()
            return await asyncio.gather(*running)

        return asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

    return run


def _check_spans(completion: Completion) -> None:
    ends = [0, *(span.end for span in completion.spans)]
    assert [span.start for span in completion.spans] == ends[:-1]
    assert ends[-1] == len(completion.token_ids) == len(completion.logprobs)
    assert all(span.start < span.end for span in completion.spans)


def _check_logprobs(
    folder: str, versions: list[dict[str, Any]], prompts: list[Ids], groups: list[list[Completion]]
) -> None:
    """Every token's log-prob is what the trainer computes with the version that its span names."""
    rows = [(p, c) for p, group in zip(prompts, groups, strict=True) for c in group]
    batch = Batch.of({"prompt_ids": [p for p, _ in rows], "response_ids": [c.token_ids for _, c in rows]})
    trainer = _trainer(folder)
    for version, weights in enumerate(versions):
        with torch.no_grad():
            for name, tensor in trainer.named_weights():
                tensor.copy_(weights[name])
        wanted = trainer.logprobs(batch)
        for row, (_, c) in enumerate(rows):
            for span in c.spans:
                if span.version == version:
                    at = slice(span.start, span.end)
                    np.testing.assert_allclose(c.logprobs[at], wanted[row][at], atol=1e-4)


def _continued(folder: str, weights: dict[str, Any], prefix: Sequence[int], count: int) -> list[int]:
    """What the model with these weights alone continues ``prefix`` with, greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.load_state_dict(weights, strict=False)
    ids = torch.tensor([list(prefix)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count)
    return out[0, len(prefix) :].tolist()


def test_after_a_swap_rows_go_on_as_the_new_version_alone_would(
    endless: str, rollout: Make, swapped: Any, prompts: list[Ids]
) -> None:
    # given greedy requests of prompts of six lengths
    versions = _versions(endless, 1)
    requests = [Request(p, Sampling(temperature=0, max_tokens=30)) for p in prompts]

    # when version 1 comes after the pass over the prompts and ten more
    groups = swapped(rollout(endless), requests, versions, [11])

    # then each has eleven tokens of version 0, and goes on from them as version 1 alone does
    for prompt, (c,) in zip(prompts, groups, strict=True):
        assert list(c.spans) == [(0, 0, 11), (1, 11, 30)]
        tokens = c.token_ids.tolist()
        assert tokens[:11] == _continued(endless, versions[0], prompt, 11)
        assert tokens[11:] == _continued(endless, versions[1], [*prompt, *tokens[:11]], 19)
        assert tokens[11:] != _continued(endless, versions[0], [*prompt, *tokens[:11]], 19)
    _check_logprobs(endless, versions, prompts, groups)


@pytest.mark.parametrize("folder", ["tiny", "tied", "windowed", "learned"])
def test_every_log_prob_is_that_of_its_version_over_several_swaps(
    folder: str, request: Any, rollout: Make, swapped: Any, prompts: list[Ids]
) -> None:
    # given more groups than fit, of many lengths, so that rows end, join and wait at any step
    path = request.getfixturevalue(folder)
    versions = _versions(path, 4)
    requests = [
        Request(p, Sampling(max_tokens=tokens, top_k=k), n=n, seed=i)
        for i, (p, tokens, n, k) in enumerate(
            zip(prompts * 2, [40, 7, 60, 25, 3, 33] * 2, [3, 5, 2, 4, 6, 1] * 2, [0, 0, 4] * 4, strict=True)
        )
    ]

    # when four versions come
    groups = swapped(rollout(path, max_rows=14), requests, versions, [3, 7, 1, 13])

    # then the spans of each response are whole, some responses are of several versions, and all log-probs right
    completions = [c for group in groups for c in group]
    assert [len(group) for group in groups] == [r.n for r in requests]
    for c in completions:
        _check_spans(c)
    assert max(len(c.spans) for c in completions) > 2
    assert {span.version for c in completions for span in c.spans} == {0, 1, 2, 3, 4}
    _check_logprobs(path, versions, [r.prompt_ids for r in requests], groups)


def test_what_waits_in_line_starts_under_the_new_version(endless: str, rollout: Make, swapped: Any) -> None:
    # given an engine that one request fills, and one that waits
    requests = [Request(np.array([5 + i], np.int32), Sampling(max_tokens=20), n=4) for i in range(2)]
    versions = _versions(endless, 1)

    # when
    first, second = swapped(rollout(endless, max_rows=4), requests, versions, [4])

    # then
    assert {c.spans for c in first} == {((0, 0, 4), (1, 4, 20))}
    assert {c.spans for c in second} == {((1, 0, 20),)}
    _check_logprobs(endless, versions, [r.prompt_ids for r in requests], [first, second])


def test_the_folders_weights_may_count_as_another_version(tiny: str, rollout: Make, generate: Any) -> None:
    ((one,),) = generate(rollout(tiny, version=7), [Request(np.array([5], np.int32), Sampling(max_tokens=3))])
    assert list(one.spans) == [(7, 0, len(one.token_ids))]


def test_prompts_are_read_once_for_a_group_and_again_once_for_a_version(
    endless: str, rollout: Make, swapped: Any, passes: Watch
) -> None:
    # given two groups of eight of one prompt, and one of another
    prompt = np.arange(10, 20, dtype=np.int32)
    requests = [Request(ids, Sampling(max_tokens=6), n=8) for ids in (prompt, prompt, prompt[:4])]
    versions = _versions(endless, 1)
    engine, watched = rollout(endless), passes()

    # when a version comes after the pass over the prompts and four more
    swapped(engine, requests, versions, [5])

    # then both prompts are read once more, and four tokens of each row
    assert watched.shapes == [(2, 10), *[(24, 1)] * 4, (2, 10), (24, 4), (24, 1)]


def test_more_rows_than_one_pass_reads_are_read_again(
    endless: str, rollout: Make, swapped: Any, passes: Watch
) -> None:
    versions = _versions(endless, 1)
    requests = [Request(np.arange(3, 13 + i, dtype=np.int32), Sampling(max_tokens=75), n=128) for i in range(2)]
    engine, watched = rollout(endless, max_rows=256), passes()

    groups = swapped(engine, requests, versions, [73])

    again = [shape for shape in watched.shapes[73:] if shape[1] > 1]
    assert sum(rows for rows, tokens in again if tokens > 64) == 256
    assert len(again) > 3, "prompts, and parts of the rows"
    assert {c.spans for group in groups for c in group} == {((0, 0, 73), (1, 73, 75))}
    _check_logprobs(endless, versions, [r.prompt_ids for r in requests], [group[:2] for group in groups])


def test_a_version_that_does_not_fit_leaves_what_runs_alone(
    endless: str, rollout: Make, generate: Any, make_update: Any, passes: Watch
) -> None:
    # given a running request
    engine = rollout(endless)
    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=20), n=3, seed=1)
    ((*wanted,),) = generate(engine, [request])

    async def scenario() -> list[Completion]:
        gate = passes(6)
        running = asyncio.ensure_future(_all(engine, request))
        await gate.reached()
        # when
        with pytest.raises(WeightMismatch, match="nothing was loaded"):
            await gate.load(engine, make_update({"lm_head.weight": torch.zeros(1)}))
        return await running

    # then it is what it would have been
    got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert [c.token_ids.tolist() for c in got] == [c.token_ids.tolist() for c in wanted]
    assert {c.spans for c in got} == {((0, 0, 20),)}


async def _all(engine: Any, request: Request) -> list[Completion]:
    return sorted([c async for got in engine.generate(request) for c in got.each()], key=lambda c: c.index)


def test_a_swap_that_breaks_off_ends_what_runs_and_waits_until_a_version_is_whole(
    endless: str, rollout: Make, make_update: Any, passes: Watch
) -> None:
    # given a request that runs, one that could begin at the next step, and one that waits
    engine = rollout(endless, max_rows=4)
    versions = _versions(endless, 2)
    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=50), n=2)
    broken = versions[1] | {"model.norm.weight": torch.zeros(1)}

    async def scenario() -> list[Completion]:
        gate = passes(6)
        tasks = [asyncio.ensure_future(_all(engine, request))]
        await gate.reached()
        tasks += [asyncio.ensure_future(_all(engine, request)) for _ in range(2)]

        # when a version breaks off half-way
        with pytest.raises(WeightError, match="written in part"):
            await gate.load(engine, make_update(broken, promised=versions[1]))

        # then all get an error of their own, and nothing is begun
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineError] * 3
        assert len({id(error) for error in errors}) == 3
        assert all("mixture" in str(error) for error in errors)
        with pytest.raises(EngineError, match="mixture"):
            await _all(engine, request)

        # and a whole version mends it
        await engine.load_weights(make_update(versions[2], version=2))
        return await _all(engine, request)

    got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert {c.spans for c in got} == {((2, 0, 50),)}
    _check_logprobs(endless, versions, [request.prompt_ids], [got])


def test_when_what_runs_cannot_be_read_again_it_ends_and_the_version_is_loaded(
    endless: str, rollout: Make, make_update: Any, passes: Watch
) -> None:
    # given a request that runs, one that waits, and a model that fails when it reads again
    engine = rollout(endless, max_rows=2)
    versions = _versions(endless, 1)
    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=50), n=2)

    async def scenario() -> list[Completion]:
        gate = passes(6)
        first, second = (asyncio.ensure_future(_all(engine, request)) for _ in range(2))
        await gate.reached()
        gate.fail_at(7, RuntimeError("out of memory"))

        # when
        assert await gate.load(engine, make_update(versions[1])) == versions[1].keys()

        # then what ran says why, and what waited is served by the new version
        with pytest.raises(EngineError, match="version 1 was loaded, but what ran .*out of memory"):
            await first
        return await second

    got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert {c.spans for c in got} == {((1, 0, 50),)}
    _check_logprobs(endless, versions, [request.prompt_ids], [got])


def test_a_request_aborted_during_a_swap_is_gone_and_the_others_go_on(
    endless: str, rollout: Make, make_update: Any, passes: Watch
) -> None:
    # given two requests that run, and an update whose tensors come when the test lets them
    engine = rollout(endless)
    versions = _versions(endless, 1)
    requests = [Request(np.array([5 + i], np.int32), Sampling(max_tokens=40), n=2) for i in range(2)]
    writing, go_on = threading.Event(), threading.Event()

    def halfway() -> None:
        writing.set()
        assert go_on.wait(LIMIT_S)

    slow = HeldUpdate(1, {name: tensor.numpy() for name, tensor in versions[1].items()}, halfway=halfway)

    async def scenario() -> list[Completion]:
        gate = passes(6)
        doomed, kept = (asyncio.ensure_future(_all(engine, request)) for request in requests)
        await gate.reached()
        loading = asyncio.ensure_future(gate.load(engine, slow))
        assert await asyncio.to_thread(writing.wait, LIMIT_S)

        # when one is cancelled while the weights are written
        doomed.cancel()
        await asyncio.wait([doomed])
        go_on.set()
        assert await loading == versions[1].keys()

        # then the other is whole, and nothing is left behind
        got = await kept
        before = len(gate.shapes)
        await _all(engine, Request(np.array([5], np.int32), Sampling(max_tokens=3)))
        assert gate.shapes[before:] == [(1, 1)] * 3
        return got

    got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert {c.spans for c in got} == {((0, 0, 6), (1, 6, 40))}
    _check_logprobs(endless, versions, [requests[1].prompt_ids], [got])


def test_loads_without_a_token_between_leave_no_empty_span(
    endless: str, rollout: Make, make_update: Any, passes: Watch
) -> None:
    # given a running request
    engine = rollout(endless)
    versions = _versions(endless, 2)
    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=20), n=2)

    async def scenario() -> list[Completion]:
        gate = passes(6)
        running = asyncio.ensure_future(_all(engine, request))
        await gate.reached()
        # when version 1 and version 2 come at once, and version 2 once more later
        await gate.load(engine, *(make_update(versions[v], version=v) for v in (1, 2)))
        gate.hold(2)
        await gate.reached()
        await gate.load(engine, make_update(versions[2], version=2))
        return await running

    # then
    got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    assert {c.spans for c in got} == {((0, 0, 6), (2, 6, 20))}
    _check_logprobs(endless, versions, [request.prompt_ids], [got])


def test_responses_are_scored_between_two_tokens_of_what_runs(
    endless: str, rollout: Make, trainer: Any, passes: Watch
) -> None:
    # given a request that runs
    engine = rollout(endless)
    request = Request(np.array([5, 6], np.int32), Sampling(max_tokens=50), n=2)

    async def scenario() -> tuple[Any, list[Completion]]:
        gate = passes(6)
        running = asyncio.ensure_future(_all(engine, request))
        await gate.reached()
        scoring = asyncio.ensure_future(engine.logprobs([[5, 6]], [[7, 8, 9]]))
        await asyncio.sleep(0)
        gate.go_on()
        return await scoring, await running

    rows, got = asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))

    # then both are right
    batch = Batch.of({"prompt_ids": [np.array([5, 6], np.int32)], "response_ids": [np.array([7, 8, 9], np.int32)]})
    np.testing.assert_allclose(rows[0], trainer(endless).logprobs(batch).values, atol=1e-5)
    _check_logprobs(endless, _versions(endless, 0), [request.prompt_ids], [got])
