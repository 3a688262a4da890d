"""An engine that has died ends its producer at once, and no prompt is blamed for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout


class Dies(EchoRollout):
    """When it is asked for the first time."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        raise af.EngineGone("its process has died")
        yield


def test_a_dead_engine_ends_its_producer_and_another_has_its_rows() -> None:
    with af.serve(max_staleness=0, steps=1) as run:
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.queue.declare("train", needs=["response_ids"], batch_rows=8)
        run.queue.put({"prompt_ids": af.Ragged.of([[n, n] for n in range(4)])}, group_size=2)
        run.queue.end()

        with (
            af.connect(run.address, name="first") as dying,
            pytest.raises(af.EngineGone, match="its process has died"),
        ):
            asyncio.run(af.Producer(dying.queue, Dies()).run())
        assert run.audit().live == 8

        asyncio.run(asyncio.wait_for(af.Producer(run.queue, EchoRollout()).run(), 20))
        assert run.queue.status().step == 1
        assert run.audit().failed == 0
