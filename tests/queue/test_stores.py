"""The promises of ``PayloadStore``, kept by every store: one body of tests over shared memory and over columns beside calls."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from queue_runs import Served, in_threads, running, runs_over

import asyncflow_sdk as af
from asyncflow_sdk.errors import LeaseLost, StoreUnavailable
from asyncflow_sdk.interfaces.store import PayloadStore
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue.connection import BlockingPort, Connection
from asyncflow_sdk.queue.coroutines import run_blocking
from asyncflow_sdk.queue.stores.blocks import pack_columns
from asyncflow_sdk.queue.stores.shared import SharedStore
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import BlockSlices

run = runs_over("ipc", "remote")
KINDS: dict[str, Any] = {
    "fixed": np.arange(12.0).reshape(4, 3),
    "strided": np.arange(64)[::2].reshape(4, 8)[:, ::2],
    "ragged": [np.arange(n, dtype=np.int32) for n in (3, 0, 5, 1)],
    "text": ["", "ä\0", "x" * 50_000, "y"],
    "wide": np.arange(4 << 16, dtype=np.uint8).reshape(4, 1 << 16),
}


def connection_of(client: af.Run) -> Connection:
    connection: Connection = client.queue.connection  # type: ignore[attr-defined]
    return connection


def store_of(client: af.Run) -> PayloadStore:
    return connection_of(client).store


def test_values_come_back_bit_for_bit_in_any_order_and_read_only(run: Served) -> None:
    queue, reader = run.queue(), run.queue("reader")
    queue.declare("read", needs=list(KINDS))
    queue.put(KINDS)
    queue.put(KINDS)
    # scattered rows of two blocks are read as well as whole ones
    reader.get("read", 1).ack()
    for batch in (reader.get("read", 3), reader.get("read", 4)):
        at = np.arange(4)[4 - batch.rows :]
        for name in ("fixed", "strided", "wide"):
            assert batch.array(name).tobytes() == np.ascontiguousarray(KINDS[name][at]).tobytes()
            assert not batch.array(name).flags.writeable
        assert [each.tolist() for each in batch.ragged("ragged")] == [KINDS["ragged"][i].tolist() for i in at]
        assert batch.texts("text") == [KINDS["text"][i] for i in at]


def test_a_copied_write_has_the_values_that_it_was_given(run: Served) -> None:
    # given columns that change after the write, before their call is sent
    client = run.client()
    client.queue.declare("read", needs=["x"])
    values = np.arange(100_000.0)
    port = BlockingPort(connection_of(client))
    command = cmd.AddRows(groups=len(values), group_size=1, columns={})
    pending = port.write(command, pack_columns({"x": values}), keep=True)
    values[:] = 0
    # when
    run_blocking(port.submit(pending)).raise_error()
    # then
    assert run.queue("reader").get("read", len(values))["x"].tolist() == list(range(len(values)))


def test_a_write_is_discarded_any_number_of_times_and_takes_no_memory_then(run: Served) -> None:
    store = store_of(run.client())
    columns = pack_columns({"x": np.zeros(1 << 20)})
    for _ in range(40):
        stored = store.write(columns, copy=False)
        assert (stored.block is None) != (stored.image is None)
        assert (stored.image is not None) == store.inline
        store.discard(stored)
        store.discard(stored)
    assert run.held_bytes() < 40 << 20
    assert run.queue("other").status().payload_bytes == 0


def test_frees_are_repeated_and_of_unknown_blocks_without_harm(run: Served) -> None:
    client = run.client()
    queue, store = client.queue, store_of(client)
    queue.declare("read", needs=["x"])
    queue.put({"x": np.arange(5.0)})
    store.free([1, 2, 3, -1, 1 << 62])
    with queue.get("read", 5) as batch:
        assert batch["x"].tolist() == list(range(5))
        batch.ack()
    store.free([1, 2, 3])
    queue.put({"x": np.arange(3.0)})
    assert queue.get("read", 3)["x"].tolist() == [0, 1, 2]


def test_rows_that_ended_before_they_were_read_are_lost_and_no_others(run: Served) -> None:
    client = run.client()
    queue = client.queue
    queue.declare("read", needs=["x"])
    queue.put({"x": np.ones((4, 50_000))})
    connection = connection_of(client)
    answer = run_blocking(BlockingPort(connection).call(cmd.LeaseRows(task="read", count=4)))
    queue.cancel(rows=np.arange(4))
    queue.put({"x": np.full((4, 50_000), 2.0)})  # in the same memory
    if answer.payload is None:
        with pytest.raises(LeaseLost):
            connection.store.read(answer.slices, answer.schema)
    queue.put({"x": np.full((1, 50_000), 3.0)})
    assert np.unique(queue.get("read", 5, at_least=5)["x"]).tolist() == [2, 3]


def test_views_outlive_their_rows_and_their_store(run: Served) -> None:
    client = run.client()
    queue = client.queue
    queue.declare("read", needs=["x"])
    queue.put({"x": np.ones((4, 50_000))})
    batch = queue.get("read", 4)
    values = batch.array("x")
    batch.ack()
    for number in range(20):
        queue.put({"x": np.full((4, 50_000), 2.0 + number)})
        queue.get("read", 4).ack()
    store_of(client).close()
    store_of(client).close()
    assert (values == 1).all()


def test_writes_into_a_tensor_change_it_for_nobody_else(run: Served) -> None:
    queue, other = run.queue(), run.queue("other")
    for task in ("first", "second"):
        queue.declare(task, needs=["x"])
    queue.put({"x": np.ones((4, 50_000))})
    pytest.importorskip("torch")
    queue.get("first", 4).torch("x").zero_()
    assert (other.get("second", 4).array("x") == 1).all()


def test_threads_share_a_store(run: Served) -> None:
    queue = run.queue()
    queue.declare("read", needs=["x"])

    def work(number: int) -> list[float]:
        for part in range(10):
            queue.put({"x": np.full((2, 5000), 10.0 * number + part)})
        found: list[float] = []
        while len(found) < 20:
            with queue.get("read", 2) as batch:
                x = batch.array("x")
                assert (x == x[:, :1]).all()
                found += x[:, 0].tolist()
                batch.ack()
        return found

    found = sorted(each for part in in_threads(3, work) for each in part)
    assert found == sorted(10.0 * number + part for number in range(3) for part in range(10) for _ in range(2))


class LateStore(SharedStore):
    """Shared memory of a host that cannot be reached at first."""

    may_wait = True

    def __init__(self, run: Served, session: int, times: int) -> None:
        super().__init__(run.memory, f"s{session}-")
        self.times = times

    def read(self, slices: Sequence[BlockSlices], schema: Mapping[str, ColumnSpec]) -> dict[str, Column]:
        self.times -= 1
        if self.times >= 0:
            raise StoreUnavailable("its cable is cut")
        return super().read(slices, schema)


def test_rows_of_a_host_that_cannot_be_reached_are_leased_again_and_cost_no_attempt() -> None:
    with running("ipc") as run:
        queue, client = run.queue(), run.client("late")
        queue.declare("work", needs=["x"], max_attempts=1)
        queue.put({"x": np.arange(5.0)})
        connection = connection_of(client)
        connection.store = LateStore(run, connection.session, 3)
        # a blocking client, and one on an event loop, get them once they can be read
        client.queue.get("work", 5, timeout_s=60).give_back()
        connection.store = LateStore(run, connection.session, 3)

        async def get() -> list[float]:
            async with await client.queue.aio.get("work", 5, timeout_s=60) as batch:  # type: ignore[attr-defined]
                await batch.give_back()
                values: list[float] = batch["x"].tolist()
                return values

        assert asyncio.run(get()) == [0, 1, 2, 3, 4]
        # and the reason, if they cannot for as long as the client waits
        connection.store = LateStore(run, connection.session, 1000)
        with pytest.raises(StoreUnavailable, match="its cable is cut"):
            client.queue.get("work", 5, timeout_s=0.5)
        # then no row has lost an attempt, and all are there for others
        assert queue.get("work", 5)["x"].tolist() == [0, 1, 2, 3, 4]
        assert queue.audit().failed == 0
