"""The memory of a run follows its rows: what is held stays within the most that lived together, and a segment a producer."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from queue_runs import Run, blocks_in_use, running

from asyncflow_sdk.memory.arena import SEGMENT_BYTES
from asyncflow_sdk.queue import TransferQueue

MB = 1 << 20


@pytest.fixture
def run() -> Iterator[Run]:
    with running("ipc") as run:
        yield run


def held(run: Run) -> int:
    """Bytes that segments of rows really take."""
    return sum(path.stat().st_blocks * 512 for path in run.server.directory.path.glob("s*"))


def living(run: Run, session: str) -> int:
    """Bytes of a writer's blocks that rows need."""
    places = run.server._places
    mine = [number for number, owner in enumerate(places._segments.owners) if owner == session]
    blocks = places._blocks[places._blocks[:, 5] > 0]
    return int(blocks[np.isin(blocks[:, 0], mine), 4].sum())


def take(queue: TransferQueue, task: str, count: int) -> int:
    with queue.get(task, count) as batch:
        batch.ack()
        return batch.rows


def test_long_churn_of_two_producers_with_rows_that_live_long(run: Run) -> None:
    # given two producers of rows of all sizes, and a consumer that takes and also writes
    numbers = random.Random(0)
    queues = [run.queue(name) for name in ("producer", "producer", "consumer")]
    consumer, arenas = queues[2], [queue._port.connection.arena for queue in queues]
    consumer.declare("read", needs=["x"], gives=["y"])
    consumer.declare("end", needs=["y"])
    consumer.declare("late", needs=["x"], partitions=["late"])
    waiting = late = 0
    live, most = [0, 0, 0], [0, 0, 0]

    def count() -> None:
        """The most that lived of each writer's, as the server sees it."""
        for n, queue in enumerate(queues):
            live[n] = living(run, queue._port.connection.wire.session)
            most[n] = max(most[n], live[n])

    # when
    for turn in range(600):
        values = np.full(int(1000 * 3000 ** numbers.random()), turn % 251, np.uint8)
        partition = "late" if turn % 25 == 0 else ""
        queues[turn % 2].put({"x": [values]}, partition=partition)
        waiting, late = waiting + (not partition), late + bool(partition)
        count()
        while waiting and (sum(live) > 24 * MB or numbers.random() < 0.1):
            if late > 10:
                late -= take(consumer, "late", 2)
            with consumer.get("read", 3) as batch:
                assert all((row == row[0]).all() for row in batch.ragged("x"))
                batch.complete({"y": [np.zeros(500)] * batch.rows})
                waiting -= batch.rows
            del batch
            count()
            take(consumer, "end", 9)
            count()
        # then, at every moment
        assert held(run) == sum(arena.nbytes for arena in arenas)
        assert all(arena.nbytes <= most[n] + SEGMENT_BYTES for n, arena in enumerate(arenas)), turn
    # and in the end nothing is left of them
    while waiting:
        with consumer.get("read", 99) as batch:
            batch.complete({"y": [np.zeros(500)] * batch.rows})
            waiting -= batch.rows
        take(consumer, "end", 99)
    while late:
        late -= take(consumer, "late", 99)
    del batch
    for queue in queues:
        queue.flush()
    assert [arena.blocks for arena in arenas] == [0, 0, 0]
    assert min(most[:2]) > 10 * MB


def test_a_step_is_put_again_and_again_where_it_was(run: Run) -> None:
    # given steps of rows put one by one, all taken before the next
    queue = run.queue()
    queue.declare("read", needs=["x"])
    rows = [np.full(30_000, n, np.float64) for n in range(60)]
    sizes = []
    # when
    for _ in range(10):
        for row in rows:
            queue.put({"x": row[None]})
        with queue.get("read", 60) as batch:
            assert batch.array("x")[:, 7].tolist() == list(range(60))
            batch.ack()
        sizes.append(held(run))
    # then
    assert sizes[-1] == sizes[0] <= 60 * 240_100 + SEGMENT_BYTES
    queue.flush()
    assert blocks_in_use(queue) == 0


def test_a_put_finds_the_memory_of_rows_that_ended_since_the_last_answer(run: Run) -> None:
    # given a producer that has put 40 MB, which ended without its knowing
    producer, consumer = run.queue("producer"), run.queue("consumer")
    consumer.declare("read", needs=["x"])
    for _ in range(5):
        producer.put({"x": np.zeros((1, 5 << 20))})
        take(consumer, "read", 1)
        # then it takes no more
        assert held(run) <= 41 * MB


@pytest.mark.parametrize("rows", [1, 40])
def test_a_view_costs_its_own_bytes_only(run: Run, rows: int) -> None:
    # given a consumer that keeps one small batch for ever, while much goes through the same segments
    queue = run.queue()
    queue.declare("read", needs=["x"])
    queue.put({"x": np.full((rows, 3000), 7.0)})
    kept = queue.get("read", rows)
    kept.ack()
    # when
    for turn in range(300):
        queue.put({"x": np.full((9, 3000), float(turn))})
        take(queue, "read", 9)
    # then
    assert (kept.array("x") == 7.0).all()
    assert held(run) <= SEGMENT_BYTES
