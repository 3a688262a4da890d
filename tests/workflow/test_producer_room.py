"""A producer never has more rows in its engine than that takes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout


class Counting(EchoRollout):
    """Knows how many rows it was generating at a time."""

    rows = most = 0

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self.rows += request.n
        self.most = max(self.most, self.rows)
        async for completion in super().generate(request):
            self.rows -= 1
            yield completion


class OneLong(af.RolloutEngine):
    """The last response of the first prompt comes when those of the second have come."""

    capabilities = af.Capabilities(max_rows=4)

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        first = int(request.prompt_ids[0]) == 0
        if not first:
            self.begun.set()
        for index in range(request.n):
            if first and index == request.n - 1:
                await self.begun.wait()
            yield af.Completion(index, request.prompt_ids, [0.0] * len(request.prompt_ids))

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        raise NotImplementedError("no version is published here, so nothing is loaded")


def given_prompts(run: af.Run, prompts: int, group_size: int, batch_rows: int) -> None:
    run.queue.declare(
        "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
    )
    run.queue.declare("train", needs=["response_ids"], batch_rows=batch_rows)
    run.queue.put({"prompt_ids": af.Ragged.of([[n, n] for n in range(prompts)])}, group_size=group_size)
    run.queue.end()


def test_whole_groups_do_not_exceed_it() -> None:
    engine = Counting(delay_s=0.001, spread=1.0, max_rows=10)
    with af.serve(max_staleness=4, steps=5) as run:
        given_prompts(run, 20, group_size=4, batch_rows=16)
        asyncio.run(af.Producer(run.queue, engine).run())
        assert run.queue.status().step == 5
    assert 8 <= engine.most <= 10  # two groups at first; a third would be two rows too many


def test_a_long_response_does_not_keep_the_places_of_its_group() -> None:
    engine = OneLong()
    with af.serve(max_staleness=0, steps=1) as run:
        given_prompts(run, 2, group_size=3, batch_rows=6)
        asyncio.run(asyncio.wait_for(af.Producer(run.queue, engine).run(), 20))
        assert run.queue.status().step == 1
