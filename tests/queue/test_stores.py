"""Stores of the server's memory, beyond the conformance kit: tensors that are written to; and a store that is late."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from queue_runs import Served, running, runs_over

from asyncflow_sdk.errors import StoreUnavailable
from asyncflow_sdk.queue.stores.local import SharedStore
from asyncflow_sdk.testing.stored_run import connection_of
from asyncflow_sdk.types import Column, ColumnSpec
from asyncflow_sdk.types.blocks import BlockSlices

run = runs_over("ipc", "remote")


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
