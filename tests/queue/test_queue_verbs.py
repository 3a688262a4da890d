"""One body of tests over every way to reach a queue: what the verbs promise, from threads and from an event loop."""

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest
from queue_runs import KINDS, Served, in_threads, running, runs_over
from waiting import in_thread, until

from asyncflow_sdk.errors import Ended, LeaseLost, SchemaError, WriteOnceError
from asyncflow_sdk.interfaces import TransferQueue

run = runs_over(*KINDS)


@pytest.fixture
def queue(run: Served) -> TransferQueue:
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"], lease_s=60)
    queue.declare("train", needs=["y"])
    return queue


def balance(queue: TransferQueue) -> tuple[int, int, int]:
    audit = queue.audit()
    assert audit.balanced
    return audit.put, audit.live, audit.consumed


def test_a_row_goes_through_its_tasks(queue: TransferQueue) -> None:
    # given
    rows = queue.put({"x": [1.0, 2.0, 3.0]})
    assert (rows.first, rows.count, rows.again) == (0, 3, False)
    # when
    with queue.get("work", 2) as batch:
        batch.complete({"y": batch.array("x") * 10})
    with queue.get("work", 9) as batch:
        batch.complete({"y": batch.array("x") * 10})
    # then
    with queue.get("train", 9) as batch:
        assert batch.array("y").tolist() == [10, 20, 30]
        batch.ack()
    assert balance(queue) == (3, 0, 3)
    queue.end()
    with pytest.raises(Ended):
        queue.get("work")


def test_the_same_key_adds_nothing_twice(queue: TransferQueue) -> None:
    first = queue.put({"x": [1.0, 2.0]}, key="epoch-0", group_size=2)
    again = queue.put({"x": [1.0, 2.0]}, key="epoch-0", group_size=2)
    assert (again.first, again.count, again.again) == (first.first, 4, True)
    assert balance(queue)[0] == 4


def test_an_exception_gives_the_rows_back_and_blames_them(queue: TransferQueue) -> None:
    # given
    queue.put({"x": [1.0, 2.0]})
    # when the same rows fail three times, first together and then each alone
    for rows in (2, 1, 1, 1, 1):
        with pytest.raises(ZeroDivisionError), queue.get("work", 2, timeout_s=100) as batch:
            _ = 1 / (batch.rows - rows)
    # then they have failed for good, with the reason counted
    audit = queue.audit()
    assert (audit.live, audit.failed) == (0, 2)
    assert "ZeroDivisionError: division by zero" in str(audit.reasons)


def test_leaving_early_and_ctrl_c_give_back_without_blame(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0]})
    for _ in range(5):
        with queue.get("work", 2):
            pass
        with pytest.raises(KeyboardInterrupt), queue.get("work", 2):
            raise KeyboardInterrupt
    assert queue.get("work", 2).rows == 2


def test_rows_of_a_lease_are_completed_given_back_and_renewed_one_by_one(queue: TransferQueue) -> None:
    # given
    queue.put({"x": np.arange(6.0)})
    batch = queue.get("work", 6)
    # when
    batch.complete({"y": [5.0, 0.0]}, index=[5, 0])
    batch.renew()
    batch.give_back(index=[3])
    batch.complete({"y": [1.0, 2.0]}, index=np.array([False, True, True, False, False, False]))
    batch.give_back()
    # then
    with pytest.raises(LeaseLost, match=r"lease \d+ is not held by test"):
        batch.complete({"y": np.zeros(6)})
    rest = queue.get("work", 6)
    assert sorted(rest.ids.tolist()) == [3, 4]
    done = queue.get("train", 6)
    assert dict(zip(done.ids.tolist(), done.array("y").tolist(), strict=True)) == {5: 5, 0: 0, 1: 1, 2: 2}


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"columns": {"y": [1.0]}}, SchemaError, "3 rows are completed with 1 values"),
        ({"columns": {"z": [1.0] * 3}}, SchemaError, "gives 'y', missing in this command"),
        ({"columns": {"y": [1.0] * 3, "x": [1.0] * 3}}, WriteOnceError, "column 'x' of row 0 is already written"),
        ({"columns": {"y": [1.0] * 3, "x": [1] * 3}}, SchemaError, "column 'x' is fixed float64"),
        ({"columns": {"y": [1.0] * 2}, "index": [0, 0]}, SchemaError, "each once"),
        ({"columns": {"y": [1.0] * 2}, "index": [0, 3]}, SchemaError, "must lie in 0..2"),
        ({"columns": {"y": [1.0] * 2}, "index": [0, -1]}, SchemaError, "must lie in 0..2"),
        ({"columns": {"y": [1.0] * 2}, "index": [0, 2**32]}, SchemaError, "must lie in 0..2"),
        ({"columns": {"y": [1.0]}, "index": [0.5]}, SchemaError, "positions must be integers"),
        ({"columns": {"y": [1.0] * 3}, "filtered": [True]}, SchemaError, r"bool of shape \(3,\)"),
        ({"columns": {"y": [1.0] * 3}, "filtered": [0, 1, 2]}, SchemaError, r"bool of shape \(3,\)"),
        ({"columns": {"y": ["\ud800"] * 3}}, SchemaError, "column 'y'"),
        ({"columns": {"y": [1.0] * 3, "z": [1.0]}}, SchemaError, "different numbers of rows"),
    ],
)
def test_a_refused_completion_has_no_effect(
    queue: TransferQueue, change: dict[str, object], error: type[Exception], reason: str
) -> None:
    # given
    queue.put({"x": [1.0, 2.0, 3.0]})
    batch = queue.get("work", 3)
    # when
    with pytest.raises(error, match=reason):
        batch.complete(**change)  # type: ignore[arg-type]
    # then the rows are still ours, and nothing is written
    batch.complete({"y": [1.0, 2.0, 3.0]})
    assert queue.get("train", 3).array("y").tolist() == [1, 2, 3]


def test_filtered_rows_end(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0, 3.0]})
    batch = queue.get("work", 3)
    batch.complete({"y": batch.array("x")}, filtered=batch.array("x") == 2)
    audit = queue.audit()
    assert (audit.live, audit.filtered) == (2, 1)
    assert queue.get("train", 3).array("y").tolist() == [1, 3]


def work_through(queue: TransferQueue, seen: "Counter[int]", lock: threading.Lock, number: int) -> None:
    """Lease, now and then give back or fail, complete one by one or all at once, until the stream ends."""
    numbers = np.random.default_rng(number)
    while True:
        try:
            with queue.get("work", int(numbers.integers(1, 40)), timeout_s=100) as batch:
                y = batch.array("x") + 1
                choice = numbers.random()
                if choice < 0.15:
                    batch.give_back(reason="not now")
                elif choice < 0.25:
                    continue
                elif choice < 0.6:
                    batch.renew()
                    half = batch.rows // 2
                    batch.complete({"y": y[:half]}, index=np.arange(half)) if half else None
                    batch.complete({"y": y[half:]}, index=np.arange(half, batch.rows))
                    with lock:
                        seen.update(batch.ids.tolist())
                else:
                    batch.complete({"y": y})
                    with lock:
                        seen.update(batch.ids.tolist())
        except Ended:
            return


def test_threads_share_one_connection(run: Served, queue: TransferQueue) -> None:
    # given three threads that put, while three work, all over one session
    seen: Counter[int] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        if number < 3:
            for part in range(30):
                queue.put({"x": np.full(10, number * 1000 + part, np.float64)})
        else:
            work_through(queue, seen, lock, number)

    # when
    ender = threading.Thread(target=lambda: in_threads(6, work), daemon=True)
    ender.start()
    rows = 0
    while rows < 900:
        with queue.get("train", 500, timeout_s=100) as batch:
            assert (batch.array("y") == batch.array("y").round()).all()
            rows += batch.rows
            batch.ack()
    queue.end()
    ender.join(200)
    # then each row was completed once
    assert not ender.is_alive()
    assert len(seen) == 900
    assert set(seen.values()) == {1}
    assert balance(queue) == (900, 0, 900)


def test_one_event_loop_does_it_all_at_once(queue: TransferQueue) -> None:
    # given
    aio = queue.aio
    seen: Counter[int] = Counter()

    async def worker(number: int) -> None:
        numbers = np.random.default_rng(number)
        while True:
            try:
                async with await aio.get("work", int(numbers.integers(1, 20)), timeout_s=100) as batch:
                    await batch.renew()
                    if numbers.random() < 0.2:
                        await batch.give_back(index=[0])
                        continue
                    await batch.complete({"y": batch.array("x") * 2})
                    seen.update(batch.ids.tolist())
            except Ended:
                return

    async def scenario() -> None:
        workers = [asyncio.create_task(worker(number)) for number in range(5)]
        await asyncio.gather(*(aio.put({"x": np.arange(10.0)}) for _ in range(30)))
        rows = 0
        while rows < 300:
            async with await aio.get("train", 300, timeout_s=100) as batch:
                rows += batch.rows
                await batch.ack()
        await aio.end()
        await asyncio.gather(*workers)

    # when
    asyncio.run(scenario())
    # then
    assert len(seen) == 300
    assert set(seen.values()) == {1}
    assert balance(queue) == (300, 0, 300)


@pytest.mark.parametrize(
    "verbs",
    [("complete", "renew", "renew"), ("complete", "complete"), ("complete", "give_back"), ("give_back", "give_back")],
)
def test_tasks_of_one_loop_share_a_batch(queue: TransferQueue, verbs: tuple[str, ...]) -> None:
    # given
    queue.put({"x": np.arange(3.0)})

    async def scenario() -> None:
        async with await queue.aio.get("work", 3) as batch:
            say = {
                "complete": lambda row: batch.complete({"y": [0.0]}, index=[row]),
                "give_back": lambda row: batch.give_back(index=[row]),
                "renew": lambda _: batch.renew(),
            }
            # when they settle a row each at once, or renew the lease meanwhile
            await asyncio.gather(*(say[verb](row) for row, verb in enumerate(verbs)))
            # then the others are left, and nothing is to be given back once they are complete
            settled = len(verbs) - verbs.count("renew")
            assert batch.left == 3 - settled
            await batch.complete({"y": np.zeros(batch.left)}, index=np.arange(settled, 3))
            assert batch.left == 0

    asyncio.run(scenario())
    assert queue.status().lease_count == 0


def test_a_rejected_finish_at_the_end_of_its_block_gives_the_rows_back(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0]})
    with pytest.raises(WriteOnceError), queue.get("work", 2) as batch:
        batch.finish({"x": [0.0, 0.0], "y": [0.0, 0.0]})
    assert batch.left == 0
    assert queue.status().lease_count == 0


@pytest.mark.parametrize(("verb", "name"), [("get", "token"), ("stream", "most"), ("steps", "count")])
def test_an_option_that_a_verb_does_not_promise_is_refused(queue: TransferQueue, verb: str, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{verb}\(\) has no parameter '{name}'"):
        getattr(queue, verb)("work", **{name: 1})


def test_numbers_from_numpy_are_numbers(queue: TransferQueue) -> None:
    queue.put({"x": [1.0, 2.0]}, group_size=np.int64(2), timeout_s=np.float32(5))  # type: ignore[arg-type]
    assert queue.get("work", np.int64(3), timeout_s=np.float64(5)).rows == 3


def test_rows_that_end_on_their_way_to_who_asked_are_passed_over() -> None:
    # given rows that are cancelled while the answer with them is on its way, and whose memory is used again
    with running() as run:
        proxy, queue = run.proxied()
        writer = run.queue("writer")
        queue.declare("work", needs=["x"])
        first = writer.put({"x": [1.0, 2.0]}).first
        proxy.halt(there=False)
        getting = in_thread(queue.get, "work", 2)
        until(lambda: writer.status().lease_count == 1, "the lease")
        writer.cancel([first, first + 1])
        writer.put({"x": [3.0, 4.0]})
        # when
        proxy.resume()
        # then others come
        assert getting().array("x").tolist() == [3.0, 4.0]
        assert writer.audit().cancelled == 2
