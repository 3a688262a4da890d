"""The promises of the queue that no other file here tries to break: lost answers, dead clients, full queues, the end,
odd bits, second writes; and that threads and event loops get the same."""

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flaky_proxy import FlakyProxy
from queue_runs import KINDS, ClientProcess, Served, in_threads, running, runs_over
from waiting import until

from asyncflow_sdk.errors import AsyncFlowError, DeadlineExceeded, Ended, LeaseLost, SchemaError, WriteOnceError
from asyncflow_sdk.interfaces import TransferQueue

run = runs_over(*KINDS)


# ---- answers that are lost, clients that die


@pytest.mark.usefixtures("soon")
def test_over_connections_that_break_all_the_time_each_verb_has_its_effect_once() -> None:
    # given three clients behind a proxy that cuts every connection after some pieces
    with running("remote", insecure=True) as run:
        queue = run.queue()
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("check", needs=["y"])
        proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]))
        done: Counter[int] = Counter()

        def work(number: int) -> None:
            mine = run.queue(f"flaky-{number}", address=proxy.address)
            for part in range(12):
                mine.put({"x": np.full(3, number * 100.0 + part)})
                with mine.get("work", 3, timeout_s=100) as batch:
                    batch.complete({"y": batch.array("x") + 1})
                    done.update(batch.ids.tolist())

        # when
        in_threads(3, work)
        proxy.steady = True  # leaving is not what is tried here
        # then every row was put once, and completed once
        assert proxy.cuts > 10
        audit = queue.audit()
        assert (audit.put, audit.live, len(done), set(done.values())) == (108, 108, 108, {1})
        with queue.get("check", 200) as batch:
            assert batch.rows == 108
            assert sorted(batch.array("y").tolist()) == sorted(
                number * 100.0 + part + 1 for number in range(3) for part in range(12) for _ in range(3)
            )
            batch.ack()
        assert queue.audit().consumed == 108


@pytest.mark.parametrize("arrived", [True, False], ids=["carried out", "never arrived"])
def test_a_put_whose_client_died_before_its_answer_is_repeated_by_its_key(arrived: bool) -> None:
    # given a producer whose put is on its way, and whose answer will never come
    with running("tcp", insecure=True) as run:  # a child behind a proxy has only an address
        queue = run.queue()
        proxy = FlakyProxy(int(run.address.rsplit(":", 1)[1]), pieces=(10**6, 10**6))
        with ClientProcess(proxy.address, insecure=True) as child:
            child("run.session")
            proxy.halt(there=not arrived)
            child.say('queue.put({"x": np.arange(10.0)}, key="epoch-0").count')
            if arrived:
                until(lambda: queue.audit().put, "its rows")
            # when
            child.kill()
        until(lambda: len(queue.status().sessions) == 2, "its death")
        # then another that puts the same makes sure of it, whatever became of the first
        again = queue.put({"x": np.arange(10.0)}, key="epoch-0")
        assert (again.count, again.again) == (10, arrived)
        assert queue.put({"x": np.arange(10.0)}, key="epoch-0").first == again.first
        assert queue.audit().put == 10
        queue.declare("read", needs=["x"])
        assert queue.get("read", 20).array("x").tolist() == list(range(10))


@pytest.mark.parametrize("run", KINDS[:1], indirect=True)
def test_a_row_that_kills_its_workers_becomes_a_dead_letter_that_names_each(run: Served) -> None:
    # given a row that two workers die of
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"], max_attempts=2)
    queue.declare("end", needs=["y"])
    queue.put({"x": [13.0, 14.0]}, group_size=1, key="unlucky")
    for _ in range(2):
        with ClientProcess(run.address) as child:
            assert child('queue.get("work", 1).ids.tolist()') == [0]
            child.kill()
        until(lambda: queue.status().lease_count == 0, "the row to come back")
    # when
    (letter,) = queue.failed()
    # then
    audit = queue.audit()
    assert audit.balanced
    assert (audit.failed, audit.live) == (1, 1)
    assert letter.key == "unlucky"
    text = str(letter)
    assert text.count("its process ended") == 2, text
    # and the other row is worked on as ever
    with queue.get("work", 5) as batch:
        assert batch.array("x").tolist() == [14.0]
        batch.complete({"y": [0.0]})


def test_views_stay_what_they_were_while_their_writer_is_stopped_and_goes_on(run: Served) -> None:
    # given a writer of few rows at a time, so that memory is used again and again, which is stopped now and then
    queue = run.queue()
    queue.configure(capacity_rows=20)
    queue.declare("read", needs=["x"])
    numbers, kept, rows = np.random.default_rng(0), [], 0
    with ClientProcess(run.address) as child:
        child.say('[queue.put({"x": np.full((1, 5000), float(n))}, timeout_s=60).count for n in range(150)]')
        while rows < 150:
            if numbers.random() < 0.05:
                child.stop()
                with contextlib.suppress(DeadlineExceeded):  # what it had put is there to be read, and nothing more
                    rows += _read(queue, kept, 0.05)
                child.resume()
            # when some of what is read is kept beyond the row's end
            rows += _read(queue, kept, 60) if rows < 150 else 0
            kept = kept[-60:] if numbers.random() < 0.1 else kept
        assert child.hear() == [1] * 150
    # then none of it has changed
    for first, values in kept:
        assert (values == np.arange(first, first + len(values))[:, None]).all()
    assert queue.audit().consumed == 150
    assert run.held_bytes() < 100 << 20


def _read(queue: TransferQueue, kept: list[tuple[int, Any]], timeout_s: float) -> int:
    with queue.get("read", 7, timeout_s=timeout_s) as batch:
        kept.append((int(batch.ids[0]), batch.array("x")))
        batch.ack()
        return batch.rows


# ---- leases


def test_a_lease_that_is_not_renewed_is_lost_for_every_verb(run: Served) -> None:
    queue, other = run.queue(), run.queue("other")
    queue.declare("work", needs=["x"], gives=["y"], lease_s=0.05)
    queue.put({"x": [2.0]})
    batch = queue.get("work")
    taken = other.get("work", timeout_s=100)
    for verb in (batch.renew, batch.give_back, lambda: batch.complete({"y": [9.0]})):
        with pytest.raises(LeaseLost, match="completed, expired, returned, or its rows ended"):
            verb()
    with contextlib.suppress(LeaseLost):
        taken.complete({"y": [3.0]})
    assert queue.audit().balanced


def test_rows_cancelled_in_somebodys_hands_are_revoked_there(run: Served) -> None:
    queue, worker = run.queue(), run.queue("worker")
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])
    queue.put({"x": [0.0, 1.0]}, group_size=2, key="wrong")
    queue.put({"x": [2.0]}, group_size=2)
    batch = worker.get("work", 6)
    # when
    assert queue.cancel(key="wrong", reason="a wrong data set") == 4
    # then its results for them go nowhere, and it is told which
    revoked = batch.complete({"y": np.arange(6.0)})
    assert revoked.tolist() == [0, 1, 2, 3]
    assert queue.get("end", 9).ids.tolist() == [4, 5]
    audit = queue.audit()
    assert (audit.cancelled, audit.live) == (4, 2)
    assert audit.reasons["cancelled: a wrong data set"] == 4


def test_rows_of_a_higher_priority_come_first_in_every_task(run: Served) -> None:
    queue = run.queue()
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])
    for priority in (0, 5, -5, 5):
        queue.put({"x": [float(priority)] * 2}, priority=priority)
    seen = []
    for _ in range(8):
        with queue.get("work") as batch:
            seen.append(batch.array("x")[0])
            batch.complete({"y": batch.array("x")})
    assert seen == [5, 5, 5, 5, 0, 0, -5, -5]
    assert queue.get("end", 8).array("y").tolist() == seen


# ---- a full queue


@pytest.mark.parametrize("limits", [{"capacity_rows": 6, "capacity_bytes": 1 << 30}, {"capacity_bytes": 60_000}])
def test_a_full_queue_blocks_new_rows_only_and_never_stops(run: Served, limits: dict[str, int]) -> None:
    # given producers that put far more than fits, and two tasks that write more than was put
    queue = run.queue()
    queue.configure(**limits)
    queue.declare("grow", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])

    def work(number: int) -> int:
        mine, rows = run.queue(f"client-{number}"), 0
        if number < 2:
            for part in range(25):
                mine.put({"x": np.full((2, 100), number * 100.0 + part)}, timeout_s=60)
            return 0
        task = "grow" if number < 4 else "end"
        try:
            while True:
                with mine.get(task, 3, timeout_s=60) as batch:
                    rows += batch.rows
                    batch.complete({"y": np.repeat(batch.array("x"), 8, axis=1)} if task == "grow" else {})
        except Ended:
            return rows

    def end() -> None:
        until(lambda: queue.audit().put == 100, "all rows")
        queue.end()

    # when
    ender = threading.Thread(target=end, daemon=True)
    ender.start()
    rows = in_threads(5, work)
    ender.join(10)
    # then
    assert (rows[2] + rows[3], rows[4]) == (100, 100)
    audit = queue.audit()
    assert (audit.put, audit.consumed, audit.live) == (100, 100, 0)


# ---- the end


def test_the_end_is_told_to_all_who_wait_and_to_nobody_too_early(run: Served) -> None:
    # given everybody waiting: for rows, for room, for rows to be wanted
    queue = run.queue()
    queue.configure(capacity_rows=2)
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])
    queue.put({"x": [1.0, 2.0]})
    held = queue.get("work", 2)

    def wait(number: int) -> str:
        mine = run.queue(f"waiter-{number}")
        verbs: list[Callable[[], Any]] = [
            lambda: mine.get("end", 2, at_least=2, timeout_s=60), lambda: mine.get("work", timeout_s=60),
            lambda: mine.put({"x": [3.0]}, timeout_s=60), lambda: mine.wanted(timeout_s=60),
        ]  # fmt: skip
        try:
            got = verbs[number]()
            return f"{got.rows} rows"
        except Ended as error:
            return f"Ended: {error}"

    def go_on() -> None:
        until(lambda: queue.status().parked_count == 4, "all who wait")
        queue.end()
        held.complete({"y": [1.0, 2.0]})

    # when
    going = threading.Thread(target=go_on, daemon=True)
    going.start()
    told = in_threads(4, wait)
    going.join(10)
    # then rows that were on their way still come, and all else is over
    assert told[0] == "2 rows"
    assert told[1].startswith("Ended: task 'work' has no more rows")
    assert told[2] == "Ended: the stream has ended; nothing more can be put"
    assert told[3].startswith("Ended: every step is filled") or "Ended" in told[3]
    with pytest.raises(Ended):
        queue.put({"x": [1.0]})
    assert queue.audit().balanced


# ---- values


SPECIAL = {
    "float16": ([0x7C01, 0xFE00, 0xFFFF, 0x8000, 0x7C00, 0xFC00, 0x0001], np.uint16, np.float16),
    "bfloat16": ([0x7F81, 0xFFC0, 0xFFFF, 0x8000, 0x7F80, 0xFF80, 0x0001], np.uint16, ml_dtypes.bfloat16),
    "float32": ([0x7F800001, 0xFFC00000, 0xFFFFFFFF, 0x80000000, 0x7F800000, 0xFF800000, 1], np.uint32, np.float32),
    "float64": (
        [0x7FF0000000000001, 0xFFF8000000000000, 2**64 - 1, 2**63, 0x7FF0000000000000, 0xFFF0000000000000, 1],
        np.uint64, np.float64,
    ),
    "float8_e4m3fn": ([0x7F, 0xFF, 0x80, 0x00, 0x01, 0x7E, 0x81], np.uint8, ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ([0x7D, 0xFF, 0x80, 0x7C, 0xFC, 0x01, 0x7F], np.uint8, ml_dtypes.float8_e5m2),
}  # fmt: skip


def test_nans_with_a_payload_signed_zeros_and_infinities_come_back_to_the_bit(run: Served) -> None:
    # given signalling and quiet NaNs of both signs, -0.0, infinities and denormals of every float type
    queue = run.queue()
    columns = {name: np.array(bits, raw).view(kind) for name, (bits, raw, kind) in SPECIAL.items()}
    columns["complex128"] = np.concatenate([columns["float64"], columns["float64"][::-1]]).view(np.complex128)
    ragged = {f"r_{name}": [column[: i % 3 + 1] for i in range(7)] for name, column in columns.items()}
    queue.declare("read", needs=[*columns, *ragged], gives=[f"again_{name}" for name in columns], max_attempts=99)
    queue.declare("end", needs=[f"again_{name}" for name in columns])
    queue.put({**columns, **ragged})
    # when they are read together, one by one, and after they were written again by a stage
    for index in ([0, 1, 2, 3, 4, 5, 6], [4], [6, 0, 3]):
        batch = queue.get("read", 7)
        order = {int(row): i for i, row in enumerate(batch.ids)}
        part = batch.take([order[i] for i in index])
        # then
        for name, column in columns.items():
            assert part.array(name).tobytes() == column[index].tobytes(), name
            for row, i in zip(part.ragged(f"r_{name}"), index, strict=True):
                assert row.tobytes() == column[: i % 3 + 1].tobytes(), name
        batch.give_back(index=[order[0]])  # so that they come in another order
        batch.give_back()
    with queue.get("read", 7) as batch:
        ids = batch.ids
        batch.complete({f"again_{name}": batch[name] for name in columns})
    end = queue.get("end", 7)
    back = [end.ids.tolist().index(i) for i in range(7)]
    assert sorted(ids.tolist()) == list(range(7))
    for name, column in columns.items():
        assert end.array(f"again_{name}")[back].tobytes() == column.tobytes(), name
        end.torch(f"again_{name}")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.zeros(2, np.float32), "fixed float32[]"),
        (np.zeros(2, np.int64), "fixed int64[]"),
        (np.zeros((2, 1)), "fixed float64[1]"),
        ([[1.0], [2.0]], "ragged float64[n]"),
        (["a", "b"], "text"),
        ([b"a", b"b"], "bytes"),
    ],
)
def test_a_column_has_one_type_for_ever_whoever_writes_it(run: Served, value: Any, said: str) -> None:
    # given a column that was written once
    queue, other = run.queue(), run.queue("other")
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])
    queue.put({"x": np.array([1.0, 2.0, 3.0, 4.0])})
    with queue.get("work", 2) as batch:
        batch.complete({"y": [0.5, 0.25]})
    # when others write it as something else
    batch = other.get("work", 2)
    for attempt in (lambda: batch.complete({"y": value}), lambda: other.put({"x": [0.0, 0.0], "y": value})):
        with pytest.raises(SchemaError) as caught:
            attempt()
        # then it is told both, and nothing has changed
        assert str(caught.value) == f"column 'y' is fixed float64[]; it cannot take {said}"
    # nor is a second write of what is there already taken, by its name and row
    with pytest.raises(WriteOnceError, match="column 'x' of row 2 is already written"):
        batch.complete({"y": [1.0, 1.0], "x": [9.0, 9.0]})
    batch.complete({"y": [0.125, 0.0625]})
    end = queue.get("end", 4)
    assert end.array("y").tolist() == [0.5, 0.25, 0.125, 0.0625]
    assert queue.audit().put == 4


# ---- every face the same


async def every_verb(queue: Any) -> list[Any]:
    """What each verb gives, and each error, on either face."""

    async def call(verb: Any, *arguments: Any, **options: Any) -> Any:
        made = verb(*arguments, **options)
        return await made if asyncio.iscoroutine(made) else made

    async def failing(verb: Any, *arguments: Any, **options: Any) -> None:
        try:
            await call(verb, *arguments, **options)
            said.append("no error")
        except AsyncFlowError as error:
            said.append(re.sub(r"after \d+\.\d s", "", f"{type(error).__name__}: {error}"))

    said: list[Any] = []
    await call(queue.configure, capacity_rows=50)
    await call(queue.declare, "work", needs=["x"], gives=["y"])
    await call(queue.declare, "end", needs=["y"])
    said.append(await call(queue.put, {"x": [1.0, 2.0]}, group_size=2, key="a", priority=1))
    said.append(await call(queue.put, {"x": [1.0, 2.0]}, group_size=2, key="a"))
    said.append(await call(queue.put, {"x": [3.0]}, key="b"))
    await failing(queue.put, {"x": [1]})
    await failing(queue.put, {"x": np.zeros(90)})
    await failing(queue.get, "end", timeout_s=0)
    await failing(queue.get, "none")
    await failing(queue.cancel, key="c")
    batch = await call(queue.get, "work", 3, columns=["x"], at_least=2)
    said.append([batch.ids.tolist(), batch.groups.tolist(), batch.array("x").tolist(), batch.task, batch.lease_s])
    await call(batch.renew)
    await failing(batch.complete, {"y": [1.0]})
    said.append((await call(batch.complete, {"y": [1.0]}, index=[1])).tolist())
    await call(batch.give_back, index=[0])
    await failing(batch.complete, {"y": [1.0]}, index=[0, 0])
    batch.finish({"y": [7.0]}, index=[2])
    batch = await call(queue.get, "work", 9, ack=batch)
    said.append(batch.ids.tolist())
    said.append(await call(queue.cancel, [4], reason="no more"))
    said.append((await call(batch.complete, {"y": [5.0] * 3}, filtered=[False, True, False])).tolist())
    await failing(batch.renew)
    said.append(await call(queue.failed))
    await failing(queue.loaded, 3)
    await call(queue.flush)
    await call(queue.end)
    await failing(queue.wanted, timeout_s=0)
    batch = await call(queue.get, "end", 9)
    said.append(batch.ids.tolist())
    await call(batch.ack)
    await failing(queue.get, "end")
    said.append(await call(queue.audit))
    status = await call(queue.status)
    said.append([status.rows, status.ended, status.put, status.arrived, status.completed])
    return said


def test_threads_and_event_loops_get_the_same_of_every_verb() -> None:
    said = []
    for face in ("threads", "event loop"):
        with running("ipc") as run:
            queue = run.queue()
            said.append(asyncio.run(every_verb(queue if face == "threads" else queue.aio)))
    assert said[0] == said[1]
    errors = [line for line in said[0] if isinstance(line, str)]
    assert len(errors) == 11
    assert "no error" not in errors
