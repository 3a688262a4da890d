"""A producer that has to load a newer version first waits with its request for prompts, and asks for no others meanwhile."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.queue import AsyncTransferQueue
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.testing.echo import weights

ROWS = 4


def declare(run: af.Run) -> None:
    run.queue.declare("train", needs=["response_ids"], batch_rows=ROWS)
    run.queue.declare(
        "rollout", needs=["prompt_ids"], gives=["response_ids", "logprobs", "version_spans"], admits=True
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What producers asked for prompts with."""
    get, asked = AsyncTransferQueue.get, []

    async def noted(queue: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return await get(queue, *arguments, **options)

    monkeypatch.setattr(AsyncTransferQueue, "get", noted)
    return asked


@pytest.mark.parametrize("swap", ["drain", "boundary", "partial", "in_flight"])
def test_one_request_waits_for_the_version_and_gets_all_there_is_room_for_with_it(
    asked: list[tuple[Any, ...]], swap: str
) -> None:
    steps = 3
    with af.serve(max_staleness=0, steps=steps) as run, run.weight_publisher() as publisher:
        declare(run)
        run.queue.put({"prompt_ids": [[n] for n in range(ROWS * steps)]})
        publisher.publish(0, weights(0).items())
        with af.connect(run.address, name="replica") as replica, ThreadPoolExecutor() as threads:
            # given one whose rows end one after another, so that it has room for one of the next step at first
            engine = EchoRollout(
                delay_s=0.02, spread=1.0, max_rows=ROWS, in_flight=swap == "in_flight", partial=swap == "partial"
            )
            work = asyncio.wait_for(af.Producer(replica.queue, engine, swap=swap).run(), 60)
            producing = threads.submit(asyncio.run, work)
            # when each step needs the version of the one before
            for version in range(1, steps + 1):
                with run.queue.get("train", timeout_s=30) as step:
                    assert step.rows == ROWS
                    if version < steps:
                        until(lambda n=version: len(asked) > n, "the request for the next step")
                        publisher.publish(version, weights(version).items())
                    step.ack()
            producing.result()
    # then a step took one request, and one more where it was taken back to see whether nothing runs
    assert len(asked) <= steps * (2 if swap == "boundary" else 1) + 1


def test_who_waits_for_a_version_that_does_not_come_hears_of_the_end(asked: list[tuple[Any, ...]]) -> None:
    with af.serve(max_staleness=0) as run:
        declare(run)
        run.queue.put({"prompt_ids": [[n] for n in range(ROWS)]})
        with af.connect(run.address, name="replica") as replica, ThreadPoolExecutor() as threads:
            # given one that has rows to generate and may have no others with what it has
            producing = asyncio.wait_for(af.Producer(replica.queue, EchoRollout(delay_s=0.02, spread=1.0)).run(), 30)
            ended = threads.submit(asyncio.run, producing)
            # when its rows end one after another
            with run.queue.get("train", timeout_s=30) as step:
                step.ack()
            # then it asks once more
            until(lambda: len(asked) == 2, "the other request")
            # and when no version will come, it hears of the end
            run.queue.end()
            ended.result()
            assert len(asked) == 2, "and not again"
