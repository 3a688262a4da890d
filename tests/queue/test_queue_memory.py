"""The memory of a run follows its rows: it stays within the most that lived together and a segment for each producer."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from queue_runs import KINDS, Served, running

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, LeaseLost, SchemaError
from asyncflow_sdk.interfaces import TransferQueue

MIB = 1 << 20
SEGMENT = 8 * MIB


def take(queue: TransferQueue, task: str, count: int) -> int:
    with queue.get(task, count) as batch:
        batch.ack()
        return batch.rows


def test_long_churn_of_two_producers_with_rows_that_live_long(run: Served) -> None:
    # given two producers of rows of all sizes, a consumer that takes and also writes, and rows that live long
    numbers = random.Random(0)
    queues = [run.queue(name) for name in ("producer", "producer", "consumer")]
    consumer = queues[2]
    consumer.declare("read", needs=["x"], gives=["y"])
    consumer.declare("end", needs=["y"])
    consumer.declare("late", needs=["x"], partitions=["late"])
    waiting = late = most = 0
    # when
    for turn in range(400):
        values = np.full(int(1000 * 3000 ** numbers.random()), turn % 251, np.uint8)
        partition = "late" if turn % 25 == 0 else ""
        queues[turn % 2].put({"x": [values]}, partition=partition)
        waiting, late = waiting + (not partition), late + bool(partition)
        live = consumer.status().payload_bytes
        most = max(most, live)
        while waiting and (live > 24 * MIB or numbers.random() < 0.1):
            if late > 10:
                late -= take(consumer, "late", 2)
            with consumer.get("read", 3) as batch:
                assert all((row == row[0]).all() for row in batch.ragged("x"))
                batch.complete({"y": [np.zeros(500)] * batch.rows})
                waiting -= batch.rows
            del batch
            take(consumer, "end", 9)
            live = consumer.status().payload_bytes
        # then, at every moment
        assert run.held_bytes() <= 2 * most + 3 * SEGMENT, turn
    # and in the end nothing is needed of them
    while waiting:
        with consumer.get("read", 99) as batch:
            batch.complete({"y": [np.zeros(500)] * batch.rows})
            waiting -= batch.rows
        take(consumer, "end", 99)
    while late:
        late -= take(consumer, "late", 99)
    assert consumer.status().payload_bytes == 0
    assert most > 20 * MIB


def test_a_step_is_put_again_and_again_where_it_was(run: Served) -> None:
    # given steps of rows put one by one, all taken before the next
    queue = run.queue()
    queue.declare("read", needs=["x"])
    rows = [np.full(30_000, n, np.float64) for n in range(30)]
    sizes = []
    # when
    for _ in range(10):
        for row in rows:
            queue.put({"x": row[None]})
        with queue.get("read", 30) as batch:
            assert batch.array("x")[:, 7].tolist() == list(range(30))
            batch.ack()
        sizes.append(run.held_bytes())
    # then
    assert sizes[-1] == sizes[0] <= 30 * 240_100 + SEGMENT
    queue.flush()
    assert queue.status().payload_bytes == 0


def test_a_put_finds_the_memory_of_rows_that_ended_since_the_last_answer(run: Served) -> None:
    # given a producer that has put 40 MB, which ended without its knowing
    producer, consumer = run.queue("producer"), run.queue("consumer")
    consumer.declare("read", needs=["x"])
    for _ in range(5):
        producer.put({"x": np.zeros((1, 5 << 20))})
        take(consumer, "read", 1)
        # then it takes no more
        assert run.held_bytes() <= 41 * MIB


@pytest.mark.parametrize("rows", [1, 40])
def test_a_view_costs_its_own_bytes_only_and_cannot_be_written(run: Served, rows: int) -> None:
    # given a consumer that keeps one small batch for ever, while much goes through the same segments
    queue = run.queue()
    queue.declare("read", needs=["x"])
    queue.put({"x": np.full((rows, 3000), 7.0)})
    kept = queue.get("read", rows)
    kept.ack()
    # when
    for turn in range(150):
        queue.put({"x": np.full((9, 3000), float(turn))})
        take(queue, "read", 9)
    # then
    assert (kept.array("x") == 7.0).all()
    assert not kept.array("x").flags.writeable
    assert run.held_bytes() <= SEGMENT


# ---- what is refused or given up


LARGE = np.zeros((1, MIB), np.uint8)


def a_wrong_type(queue: TransferQueue) -> None:
    with pytest.raises(SchemaError, match="column 'x' is fixed uint8"):
        queue.put({"x": LARGE.view(np.int8)})


def another_put_of_a_key(queue: TransferQueue) -> None:
    with pytest.raises(SchemaError, match="names another put"):
        queue.put({"x": LARGE + 1}, key="key")


def the_same_put_of_a_key(queue: TransferQueue) -> None:
    assert queue.put({"x": LARGE}, key="key").again


def a_full_queue(queue: TransferQueue) -> None:
    with pytest.raises(DeadlineExceeded):
        queue.put({"x": np.concatenate([LARGE, LARGE])}, timeout_s=0)


def a_cancelled_put(queue: TransferQueue) -> None:
    async def cancelled() -> None:
        putting = asyncio.create_task(queue.aio.put({"x": np.concatenate([LARGE, LARGE])}))
        while not putting.done() and not (await queue.aio.status()).parked:
            await asyncio.sleep(0)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)

    asyncio.run(cancelled())


def a_wrong_completion(queue: TransferQueue) -> None:
    with queue.get("work", timeout_s=60) as batch, pytest.raises(SchemaError):
        batch.complete({"z": LARGE})


def a_late_completion(queue: TransferQueue) -> None:
    batch = queue.get("work", timeout_s=60)
    batch.give_back()
    with pytest.raises(LeaseLost):
        batch.complete({"y": LARGE})


def a_late_word_with_a_request(queue: TransferQueue) -> None:
    batch = queue.get("work", timeout_s=60)
    batch.finish({"y": LARGE})
    queue.declare("nothing", needs=["never"])
    batch.give_back()
    with pytest.raises(AsyncFlowError):
        queue.get("nothing", timeout_s=0, ack=batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "attempt",
    [
        a_wrong_type, another_put_of_a_key, the_same_put_of_a_key, a_full_queue, a_cancelled_put, a_wrong_completion,
        a_late_completion, a_late_word_with_a_request,
    ],
)  # fmt: skip
def test_what_is_refused_or_given_up_takes_no_memory(kind: str, attempt: Callable[[TransferQueue], None]) -> None:
    with running(kind, capacity_rows=2) as run:
        # given a row, in a queue with room for one more
        queue = run.queue()
        queue.declare("work", needs=["x"], gives=["y"], max_attempts=1000)
        queue.put({"x": LARGE}, key="key")
        # when 40 MiB are written in vain
        for _ in range(20):
            attempt(queue)
        # then that memory was used again, and the row is there
        assert run.held_bytes() <= 2 * SEGMENT
        assert queue.audit().put == 1
        assert queue.get("work", timeout_s=60).array("x").tobytes() == LARGE.tobytes()
