"""What finishes is completed together: the first response at once, the last ones when their lease is through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.queue import AsyncLeasedBatch
from asyncflow_sdk.workflow import completing

ROWS = 6


class OneByOne(af.RolloutEngine):
    """Response after response; the second when somebody has seen the first."""

    capabilities = af.Capabilities(max_rows=ROWS)

    def __init__(self, run: af.Run) -> None:
        self._run = run

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        for index in range(request.n):
            yield af.Completion(index, [index], [0.0])
            if index == 0:
                await asyncio.to_thread(self._see, 1)
            await asyncio.sleep(0.002)

    def _see(self, rows: int) -> None:
        with self._run.queue.get("seen", rows, timeout_s=30.0) as batch:
            batch.ack()

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise NotImplementedError("no version is published here, so nothing is loaded")


def test_a_lease_takes_two_commands_however_often_a_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completing, "EVERY_S", 3600.0)
    commands: list[int] = []
    complete = AsyncLeasedBatch.complete

    async def counted(self: AsyncLeasedBatch, *given: Any, index: Any, **options: Any) -> Any:
        commands.append(len(index))
        return await complete(self, *given, index=index, **options)

    monkeypatch.setattr(AsyncLeasedBatch, "complete", counted)
    with af.serve() as run:
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.queue.declare("seen", needs=["response_ids"])
        run.queue.declare("train", needs=["response_ids"], batch_rows=ROWS)
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]])}, group_size=ROWS)
        run.queue.end()

        asyncio.run(af.Producer(run.queue, OneByOne(run)).run())

        with run.queue.get("train", ROWS) as step:
            assert [row.tolist() for row in step.ragged("response_ids")] == [[index] for index in range(ROWS)]
            step.ack()
    assert commands == [1, ROWS - 1]
