"""What only the stores of the server's memory promise, beyond ``StoreContract``: memory freed at once, and views; and a store that is late."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from queue_runs import Served, running, runs_over

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


def connection_of(client: af.Run) -> Connection:
    connection: Connection = client.queue.connection  # type: ignore[attr-defined]
    return connection


def store_of(client: af.Run) -> PayloadStore:
    return connection_of(client).store


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


def test_writes_into_a_tensor_change_it_for_nobody_else(run: Served) -> None:
    queue, other = run.queue(), run.queue("other")
    for task in ("first", "second"):
        queue.declare(task, needs=["x"])
    queue.put({"x": np.ones((4, 50_000))})
    pytest.importorskip("torch")
    queue.get("first", 4).torch("x").zero_()
    assert (other.get("second", 4).array("x") == 1).all()


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
