"""A producer never has more rows in its engine than that takes at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout


class Counting(EchoRollout):
    """Knows how many rows it was asked for at a time."""

    rows = most = 0

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self.rows += request.n
        self.most = max(self.most, self.rows)
        try:
            async for completion in super().generate(request):
                yield completion
        finally:
            self.rows -= request.n


def test_whole_groups_do_not_exceed_it() -> None:
    engine = Counting(delay_s=0.001, spread=1.0, max_rows=10)
    with af.serve(max_staleness=4, steps=5) as run:
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.queue.declare("train", needs=["response_ids"], batch_rows=16)
        run.queue.put({"prompt_ids": af.Ragged.of([[1, 2]] * 20)}, group_size=4)
        run.queue.end()
        asyncio.run(af.Producer(run.queue, engine).run())
        assert run.queue.status().step == 5
    assert engine.most == 8  # two groups; a third would be two rows too many
