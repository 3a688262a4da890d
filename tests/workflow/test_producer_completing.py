"""What finishes is completed together, when its lease is through; but no response waits for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.queue import AsyncLeasedBatch
from asyncflow_sdk.workflow import completing
from asyncflow_sdk.workflow.drawing import Drawing

ROWS = 6


class OneByOne(af.RolloutEngine):
    """Response after response; the second when somebody has ``seen`` the first, where anybody looks."""

    capabilities = af.Capabilities(max_rows=ROWS)

    def __init__(self, see: Callable[[], None] | None = None) -> None:
        self._see = see

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        for index in range(request.n):
            yield af.Completion(index, [index], [0.0])
            if index == 0 and self._see is not None:
                await asyncio.to_thread(self._see)
            await asyncio.sleep(0.002)

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise NotImplementedError("no version is published here, so nothing is loaded")


class Packed(OneByOne):
    """Some responses at once, some alone."""

    parts = ([4, 0], [2], [5, 1, 3])

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion | af.Completions]:
        for part in self.parts:
            if len(part) == 1:
                yield af.Completion(part[0], [part[0]] * (part[0] + 1), [-1.0] * (part[0] + 1))
                continue
            ids = af.Ragged.of([[index] * (index + 1) for index in part], np.int32)
            logprobs = af.Ragged(np.full(len(ids.values), -1.0, np.float32), ids.offsets)
            yield af.Completions(np.array(part), ids, logprobs, ["stop"] * len(part))
            await asyncio.sleep(0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each completion was of."""
    sizes: list[int] = []
    complete = AsyncLeasedBatch.complete

    async def counted(self: AsyncLeasedBatch, *given: Any, index: Any, **options: Any) -> Any:
        sizes.append(len(index))
        return await complete(self, *given, index=index, **options)

    monkeypatch.setattr(AsyncLeasedBatch, "complete", counted)
    return sizes


def generated(run: af.Run, engine: af.RolloutEngine) -> list[list[int]]:
    """The responses of one group."""
    run.queue.declare(
        "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
    )
    run.queue.declare("seen", needs=["response_ids"])
    run.queue.declare("train", needs=["response_ids", "logprobs", "version_spans"], batch_rows=ROWS)
    run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]])}, group_size=ROWS)
    run.queue.end()
    asyncio.run(af.Producer(run.queue, engine).run())
    with run.queue.get("train", ROWS) as step:
        lengths = step.ragged("response_ids").lengths
        assert step.ragged("logprobs").lengths.tolist() == lengths.tolist()
        assert step.ragged("version_spans").values.tolist() == [[0, 0, length] for length in lengths]
        responses = step.ragged("response_ids").tolist()
        step.ack()
    return responses


def test_a_lease_takes_one_command_however_often_a_response_ends(
    commands: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completing, "WAITS_S", 3600.0)
    with af.serve() as run:
        assert generated(run, OneByOne()) == [[index] for index in range(ROWS)]
    assert commands == [ROWS]


def test_a_response_does_not_wait_for_its_lease(commands: list[int]) -> None:
    with af.serve() as run:

        def see() -> None:
            with run.queue.get("seen", 1, timeout_s=30.0) as batch:
                batch.ack()

        assert generated(run, OneByOne(see)) == [[index] for index in range(ROWS)]
    assert commands[0] == 1
    assert sum(commands) == ROWS


def test_responses_may_come_packed() -> None:
    with af.serve() as run:
        assert generated(run, Packed()) == [[index] * (index + 1) for index in range(ROWS)]


@pytest.mark.parametrize(
    ("part", "lengths", "message"),
    [
        ([0, 0], None, "response 0 twice"),
        ([0, ROWS], None, f"response {ROWS} twice, or more"),
        ([0, 1], [1, 3], "tokens with"),
        ([0, 1], [0, 4], "tokens with"),
    ],
)
def test_packed_responses_that_do_not_hold_together_are_refused(
    part: list[int], lengths: list[int] | None, message: str
) -> None:
    class Wrong(OneByOne):
        async def generate(self, request: af.Request) -> AsyncIterator[af.Completions]:
            ids = af.Ragged.from_lengths(np.zeros(4, np.int32), np.array([2, 2]))
            logprobs = af.Ragged.from_lengths(np.zeros(4, np.float32), np.array(lengths or [2, 2]))
            yield af.Completions(np.array(part), ids, logprobs, ["stop", "stop"])

    async def drawn() -> None:
        request = af.Request(np.array([1], np.int32), af.Sampling(max_tokens=4), ROWS)
        await Drawing(Wrong(), 0, lambda: None).draw(request, lambda completed, version: None)

    with pytest.raises(af.EngineError, match=message):
        asyncio.run(drawn())


def test_rows_that_end_are_taken_out_of_packed_ones() -> None:
    ids = af.Ragged.of([[1], [2, 2], [3, 3, 3]], np.int32)
    packed = af.Completions(np.arange(3), ids, af.Ragged(ids.values.astype(np.float32), ids.offsets), ["stop"] * 3)
    work = completing.Work(SimpleNamespace(ids=np.arange(10, 13)), [], 0, 0.0)  # type: ignore[arg-type]
    work.done = [([0, 1, 2], completing.Answer(packed, 0))]
    work.forget(np.array([11]))
    assert [(list(rows), list(answer.response.token_ids)) for rows, answer in work.done] == [
        ([0], [1]),
        ([2], [3] * 3),
    ]
