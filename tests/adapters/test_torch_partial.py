"""Responses that were interrupted and went on are those that would have come without: token for token, by the same numbers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncflow_sdk.interfaces import Completion, Request
from asyncflow_sdk.types import Sampling
from asyncflow_sdk.workflow.drawing import Drawing
from asyncflow_torch.rollout import TransformersEngine

Make = Callable[..., TransformersEngine]
LIMIT_S = 60


class Pauses:
    """Interrupts an engine before chosen steps, and lets it go on at once, so that every row is drawn in parts."""

    def __init__(self, engine: TransformersEngine, steps: set[int]) -> None:
        self._decoder, self._left, self._count = engine._thread._decoder, steps, 0
        self._step, self._decoder.step = self._decoder.step, self._counted
        self.reached, self.open = threading.Event(), threading.Event()

    def _counted(self) -> Any:
        self._count += 1
        if self._count in self._left:
            self.reached.set()
            assert self.open.wait(LIMIT_S)
            self.open.clear()
        return self._step()


async def drawn(drawing: Drawing, requests: list[Request]) -> list[list[tuple[Completion, int]]]:
    got: list[list[tuple[Completion, int]]] = [[] for _ in requests]
    await asyncio.gather(
        *(
            drawing.draw(r, lambda got, v, to=to: to.extend((c, v) for c in got.each()))
            for r, to in zip(requests, got, strict=True)
        )
    )
    return [sorted(each, key=lambda one: one[0].index) for each in got]


async def interrupted(engine: TransformersEngine, requests: list[Request], steps: set[int]) -> Any:
    """What is drawn when the engine is interrupted before these steps; while it is, nothing is in it."""
    drawing, pauses = Drawing(engine, 0, lambda: None), Pauses(engine, steps)
    running = asyncio.ensure_future(drawn(drawing, requests))
    for number in range(len(steps)):
        assert await asyncio.to_thread(pauses.reached.wait, LIMIT_S)
        pauses.reached.clear()
        stopping = contextlib.AsyncExitStack()
        entering = asyncio.ensure_future(stopping.enter_async_context(drawing.stopped(interrupt=True)))
        await asyncio.sleep(0.01)
        pauses.open.set()
        await entering
        assert drawing.idle
        assert not engine._thread._decoder.rows
        assert not engine._thread._jobs
        drawing.loaded = drawing.newest = number + 1
        engine._thread.go_on(number + 1)
        await stopping.aclose()
    return await running


@pytest.fixture
def together(endless: str, rollout: Make) -> Callable[..., Any]:
    def run(requests: list[Request], steps: set[int], folder: str = endless) -> Any:
        whole = asyncio.run(asyncio.wait_for(drawn(Drawing(rollout(folder), 0, lambda: None), requests), LIMIT_S))
        parts = asyncio.run(asyncio.wait_for(interrupted(rollout(folder), requests, steps), LIMIT_S))
        return whole, parts

    return run


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 5, "temperature": 0.7}])
def test_under_the_same_weights_it_is_the_response_that_was_not_interrupted(
    together: Any, prompts: list[np.ndarray], sampling: dict[str, Any]
) -> None:
    # given groups of three, and three interruptions; the second comes right after the first
    requests = [Request(p, Sampling(max_tokens=30, **sampling), n=3, seed=i) for i, p in enumerate(prompts[:3])]

    # when
    whole, parts = together(requests, {5, 6, 20})

    # then
    for one, other in zip(whole, parts, strict=True):
        for (a, _), (b, _) in zip(one, other, strict=True):
            assert b.token_ids.tolist() == a.token_ids.tolist()
            np.testing.assert_allclose(b.logprobs, a.logprobs, atol=1e-4)
            assert (b.index, b.finish_reason) == (a.index, a.finish_reason)
            assert [span.version for span in b.spans] == [0, 1, 2, 3]
            assert [span.start for span in b.spans[1:]] == [span.end for span in b.spans[:-1]]
            assert b.spans[-1].end == 30


def test_rows_that_end_early_are_not_touched_and_those_that_wait_are_begun_later(
    tiny: str, together: Any, prompts: list[np.ndarray], rollout: Make
) -> None:
    # given many rows of which some have ended when it is interrupted
    requests = [Request(p, Sampling(max_tokens=12), n=8, seed=i) for i, p in enumerate(prompts)]

    # when
    whole, parts = together(requests, {4}, tiny)

    # then
    pairs = [pair for both in zip(whole, parts, strict=True) for pair in zip(*both, strict=True)]
    assert len({len(b.spans) for _, (b, _) in pairs}) == 2
    for (a, _), (b, _) in pairs:
        assert (b.token_ids.tolist(), b.finish_reason) == (a.token_ids.tolist(), a.finish_reason)


def test_requests_that_wait_for_room_are_given_back_without_a_token(endless: str, rollout: Make) -> None:
    # given an engine with room for one of two requests
    engine = rollout(endless, max_rows=2)
    requests = [Request(np.array([5 + i], np.int32), Sampling(max_tokens=20), n=2, seed=i) for i in range(2)]

    # when
    parts = asyncio.run(asyncio.wait_for(interrupted(engine, requests, {3}), LIMIT_S))

    # then the one that waited is of the later version altogether
    assert [{span.version for c, _ in group for span in c.spans} for group in parts] == [{0, 1}, {1}]
    assert all(len(c.token_ids) == 20 for group in parts for c, _ in group)


def test_a_response_ends_at_a_stop_id_of_its_own_request(endless: str, rollout: Make, generate: Any) -> None:
    # given responses without an end, of which some requests name one
    plain = Sampling(max_tokens=30, temperature=0)
    prompts = [np.array([5, 6], np.int32), np.array([9], np.int32)]
    whole = [c.token_ids.tolist() for (c,) in generate(rollout(endless), [Request(p, plain) for p in prompts])]
    stop = whole[0][7]

    # when
    stopping = Sampling(max_tokens=30, temperature=0, stop_ids=(stop, 0))
    (first,), (second,) = generate(rollout(endless), [Request(prompts[0], stopping), Request(prompts[1], plain)])

    # then
    assert first.token_ids.tolist() == whole[0][: whole[0].index(stop) + 1]
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    assert second.token_ids.tolist() == whole[1]


def test_an_interruption_ends_what_was_asked_for_before_it_and_nothing_later(endless: str, rollout: Make) -> None:
    engine, held = rollout(endless), threading.Event()

    async def answered(prompt: int) -> list[str]:
        request = Request(np.array([prompt], np.int32), Sampling(max_tokens=4), 2)
        return [each.finish_reason async for got in engine.generate(request) for each in got.each()]

    async def submitted(count: int) -> None:
        while len(engine._thread._pending) < count:
            await asyncio.sleep(0)

    async def body() -> tuple[list[str], list[str]]:
        between = engine._thread.call(lambda: held.wait(LIMIT_S))  # both are asked for while the thread is elsewhere
        while not between.running():
            await asyncio.sleep(0)
        before = asyncio.ensure_future(answered(3))
        await submitted(1)
        await engine.interrupt()
        later = asyncio.ensure_future(answered(4))
        await submitted(2)
        held.set()
        return await before, await later

    assert asyncio.run(asyncio.wait_for(body(), LIMIT_S)) == (["aborted"] * 2, ["length"] * 2)
