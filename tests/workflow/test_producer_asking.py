"""A producer that was told to load a newer version asks again when it has, or when none will come; and not before."""

import asyncio
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import VersionNeeded
from asyncflow_sdk.queue import AsyncTransferQueue
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights


class Loading(EchoRollout):
    """Says when a load is under way."""

    def __init__(self) -> None:
        super().__init__(in_flight=True, slow_load_s=0.05)
        self.loading = asyncio.Event()

    async def load_weights(self, update: af.WeightUpdate) -> Set[str]:
        if update.version == 1:
            self.loading.set()
        return await super().load_weights(update)


def test_what_it_was_refused_with_the_version_before_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Loading()
    get, refused = AsyncTransferQueue.get, []

    async def refuse_during_the_load(queue: Any, *arguments: Any, **options: Any) -> Any:
        if not refused:
            await engine.loading.wait()
            refused.append(True)
            raise VersionNeeded("load version 1 first")
        return await get(queue, *arguments, **options)

    monkeypatch.setattr(AsyncTransferQueue, "get", refuse_during_the_load)
    with af.serve() as run, run.weight_publisher() as publisher:
        run.queue.declare("train", needs=["response_ids"], batch_rows=4)
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        publisher.publish(1, weights(1).items())
        run.queue.put({"prompt_ids": [[1], [2], [3], [4]]})
        run.queue.end()
        with af.connect(run.address, name="replica") as replica:
            producing = af.Producer(replica.queue, engine, swap="in_flight").run()
            asyncio.run(asyncio.wait_for(producing, 30))
        assert refused
        assert run.queue.status().step == 1


def test_who_is_to_load_a_version_asks_for_no_rows_before_that_or_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    get, asked = AsyncTransferQueue.get, []

    async def refuse_after_the_first(queue: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 1 and not over:
            raise VersionNeeded("load version 1 first")
        return await get(queue, *arguments, **options)

    monkeypatch.setattr(AsyncTransferQueue, "get", refuse_after_the_first)
    over: list[bool] = []
    with af.serve() as run:
        run.queue.declare("train", needs=["response_ids"], batch_rows=4)
        run.queue.declare(
            "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
        )
        run.queue.put({"prompt_ids": [[1], [2], [3], [4]]})
        with af.connect(run.address, name="replica") as replica, ThreadPoolExecutor() as threads:
            # given one that has rows to generate and is refused further ones
            producing = asyncio.wait_for(af.Producer(replica.queue, EchoRollout(delay_s=0.02, spread=1.0)).run(), 30)
            ended = threads.submit(asyncio.run, producing)
            # when its rows end one after another
            with run.queue.get("train", timeout_s=30) as step:
                step.ack()
            # then it did not ask again
            assert len(asked) == 2
            # and when no version will come, it hears of the end
            over.append(True)
            run.queue.end()
            ended.result()
