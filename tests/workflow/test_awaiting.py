"""A cancellation that comes in the same turn as what is waited for ends the wait, on every Python."""

import asyncio

import pytest

from asyncflow_sdk.queue.awaiting import is_set


def test_a_cancellation_is_not_swallowed_by_an_event_of_the_same_turn() -> None:
    async def main() -> None:
        event, rounds = asyncio.Event(), 0

        async def work() -> None:
            nonlocal rounds
            while rounds < 100:
                await is_set(event, 60.0)
                event.clear()
                rounds += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0.01)
        event.set()
        await asyncio.sleep(0)  # the event's waiter is done; whoever waits for it has not run yet
        task.cancel()
        await asyncio.wait([task], timeout=20)
        assert task.cancelled() and rounds <= 1

    asyncio.run(main())


@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_an_event_ends_the_wait(timeout_s: float | None) -> None:
    async def main() -> bool:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, event.set)
        return await is_set(event, timeout_s)

    assert asyncio.run(main())


def test_a_wait_ends_without_the_event() -> None:
    async def main() -> bool:
        event = asyncio.Event()
        came = await is_set(event, 0.01)
        await asyncio.sleep(0)
        assert not event._waiters  # nothing is left waiting
        return came

    assert not asyncio.run(main())


def test_an_event_that_is_set_is_not_waited_for() -> None:
    async def main() -> bool:
        event = asyncio.Event()
        event.set()
        return await is_set(event, 0.0)

    assert asyncio.run(main())
