"""Nothing waits for ever: every wait has an end, and its error says who is waited for."""

import asyncio
import itertools
import threading

import numpy as np
import pytest
from queue_runs import KINDS, Served, in_threads, running, runs_over
from waiting import until

from asyncflow_sdk.errors import DeadlineExceeded, ServerLost
from asyncflow_sdk.interfaces import TransferQueue

run = runs_over(*KINDS)


def test_a_deadline_names_the_column_the_task_and_the_worker(run: Served) -> None:
    # given a stage that holds rows and a trainer that waits for what it gives
    queue, scorer = run.queue("trainer-0"), run.queue("scorer-7")
    queue.declare("reward", needs=["response"], gives=["reward"])
    queue.declare("train", needs=["response", "reward"])
    queue.put({"response": ["a", "b", "c"]})
    held = scorer.get("reward", 2)
    # when
    with pytest.raises(DeadlineExceeded) as caught:
        queue.get("train", 3, timeout_s=0.05)
    # then
    for part in ("task 'train'", "3 rows lack column 'reward'", "task 'reward'", "2 rows", "by scorer-7", "1 rows"):
        assert part in str(caught.value)
    assert held.rows == 2


def test_a_column_that_nobody_gives_is_said_so(run: Served) -> None:
    queue = run.queue()
    queue.declare("train", needs=["x", "reward"])
    queue.put({"x": [1]})
    with pytest.raises(DeadlineExceeded, match="no task gives column 'reward'"):
        queue.get("train", timeout_s=0)


def test_a_put_waits_for_room_and_says_who_holds_it(run: Served) -> None:
    # given a full queue
    queue, worker = run.queue(), run.queue("slow-worker")
    queue.configure(capacity_rows=4)
    queue.declare("work", needs=["x"])
    queue.put({"x": [0, 1, 2, 3]})
    held = worker.get("work", 3)
    # when
    with pytest.raises(DeadlineExceeded, match=r"the queue has 4 of 4 rows.*3 rows are leased.*by slow-worker"):
        queue.put({"x": [4]}, timeout_s=0.05)
    # then nothing was stored, and a put that waits goes on as soon as there is room
    waiting = threading.Thread(target=queue.put, args=({"x": [4]},), kwargs={"timeout_s": 100})
    waiting.start()
    until(lambda: queue.status().waiting, "the put that waits")
    held.ack()
    waiting.join(100)
    assert not waiting.is_alive()
    assert queue.audit().put == 5


def test_an_infinite_deadline_is_one(run: Served) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"])
    getting = threading.Thread(target=queue.get, args=("work",), kwargs={"timeout_s": float("inf")})
    getting.start()
    until(lambda: queue.status().waiting, "the get that waits")
    queue.put({"x": [1]})
    getting.join(100)
    assert not getting.is_alive()


def test_a_cancelled_get_gives_back_what_it_was_just_granted(run: Served) -> None:
    # given a loop that asks and cancels at every possible moment
    queue = run.queue()
    queue.declare("work", needs=["x"])
    rows = 0

    async def scenario() -> int:
        taken = 0
        for turn in range(60):
            asking = asyncio.create_task(queue.aio.get("work", 1, timeout_s=100))
            for _ in range(turn % 6):
                await asyncio.sleep(0)
            if turn % 3 == 0:
                await queue.aio.put({"x": [turn]})
            asking.cancel()
            for batch in await asyncio.gather(asking, return_exceptions=True):
                if not isinstance(batch, BaseException):
                    taken += batch.rows
                    await batch.ack()
        return taken

    # when
    rows += asyncio.run(scenario())
    # then every row is either taken or there for the next
    while rows < 20:
        with queue.get("work", 20, timeout_s=100) as batch:
            rows += batch.rows
            batch.ack()
    assert rows == 20


def test_whatever_is_cancelled_no_row_and_no_memory_is_lost(run: Served) -> None:
    # given a loop whose puts, gets and completions are cancelled at random, in a queue that is often full
    queue = run.queue()
    queue.configure(capacity_rows=30)
    queue.declare("work", needs=["x"], gives=["y"], max_attempts=1000)
    queue.declare("check", needs=["x", "y"])
    numbers = np.random.default_rng(0)
    aio, puts = queue.aio, 0

    async def put() -> None:
        nonlocal puts
        value = int(numbers.integers(1000))
        await aio.put({"x": np.full((3, 5000), value)}, timeout_s=100)
        puts += 1

    async def work() -> None:
        async with await aio.get("work", int(numbers.integers(1, 8)), timeout_s=100) as batch:
            await batch.complete({"y": batch.array("x")[:, 0] + 1})

    async def check() -> None:
        async with await aio.get("check", 20, timeout_s=100) as batch:
            assert (batch.array("x")[:, 0] + 1 == batch.array("y")).all()
            await batch.ack()

    async def scenario() -> None:
        running_now: list[asyncio.Task[None]] = []
        for turn in itertools.count():
            if turn >= 300 and puts > 10:  # on a busy machine more of them are cancelled before they take effect
                break
            verb = (put, work, check)[int(numbers.integers(3))]
            running_now.append(asyncio.create_task(verb()))
            if numbers.random() < 0.5:
                await asyncio.sleep(0.001 * numbers.random() * (1 + turn / 300))
            if numbers.random() < 0.6:
                running_now.pop(int(numbers.integers(len(running_now)))).cancel()
            running_now = [task for task in running_now if not task.done()]
        for task in running_now:
            task.cancel()
        await asyncio.gather(*running_now, return_exceptions=True)

    # when
    asyncio.run(scenario())
    # then all that was put is there, whole and unharmed
    queue.end()
    for task in ("work", "check"):
        with queue.stream(task, 30, timeout_s=100) as stream:  # what was cancelled late may still take effect
            for batch in stream:
                if task == "work":
                    batch.finish({"y": batch.array("x")[:, 0] + 1})
                else:
                    assert (batch.array("x")[:, 0] + 1 == batch.array("y")).all()
                    assert (batch.array("x") == batch.array("x")[:, :1]).all()
                    batch.finish()
    audit = queue.audit()
    assert audit.balanced
    assert audit.put == audit.consumed > 30
    # and all memory was freed, each block once
    queue.flush()
    assert queue.status().payload_bytes == 0
    assert run.held_bytes() < 20 << 20


def test_threads_that_put_into_a_full_queue_lose_nothing(run: Served) -> None:
    # given
    queue = run.queue()
    queue.configure(capacity_rows=10)
    queue.declare("work", needs=["x"])
    gone: list[int] = []

    def work(number: int) -> int:
        if number == 0:
            taken = 0
            while taken < 90 or len(gone) < 3:
                with queue.get("work", 7, timeout_s=100) as batch:
                    taken += batch.rows
                    batch.ack()
                if taken >= 90:
                    break
            return taken
        for part in range(30):
            queue.put({"x": [number * 100 + part]}, timeout_s=100)
        gone.append(number)
        return 30

    # when / then
    assert in_threads(4, work) == [90, 30, 30, 30]


def test_a_server_that_is_gone_is_a_clear_end() -> None:
    # given
    with running("tcp") as run:
        queue: TransferQueue = run.queue()
        queue.declare("work", needs=["x"])
        queue.put({"x": [1, 2]})
        batch = queue.get("work", 2)
        # when
        run.run.close()
        # then
        with pytest.raises(ServerLost, match="was closed by the process that served it"):
            queue.get("work", timeout_s=1000)
        with pytest.raises(ServerLost, match="was closed by the process that served it"):
            queue.put({"x": np.zeros(20 << 20)}, timeout_s=1000)
        assert batch.array("x").tolist() == [1, 2]  # what is held stays
