"""StoreContract: the promises of a store, as tests of real runs with it. Subclass it under pytest:

class TestMine(StoreContract):
    @pytest.fixture
    def stored(self):
        with StoredRun(store=Store(kind="mine", options={...})) as stored:
            stored.start_unit()                     # a store with homes
            yield stored
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LeaseLost
from ..interfaces import TransferQueue
from ..interfaces.store import PayloadStore
from ..ledger import commands as cmd
from ..queue.connection import BlockingPort, Connection
from ..queue.coroutines import run_blocking
from ..queue.stores.blocks import pack_columns
from ..queue.stores.homes import SERVER_MEMORY, home_of
from ..queue.unit_start import UnitConfig, ensure_unit
from ..workflow import Run, connect, serve

LIMIT_S = 60.0
KINDS: dict[str, Any] = {
    "fixed": np.arange(12.0).reshape(4, 3),
    "strided": np.arange(64)[::2].reshape(4, 8)[:, ::2],
    "ragged": [np.arange(n, dtype=np.int32) for n in (3, 0, 5, 1)],
    "text": ["", "ä\0", "x" * 50_000, "y"],
    "wide": np.arange(4 << 16, dtype=np.uint8).reshape(4, 1 << 16),
}


class StoredRun:
    """A served run, and its clients. ``shared_memory`` False: they do not see the server's memory.
    ``options``: of ``serve``."""

    def __init__(self, directory: Path | None = None, *, shared_memory: bool = True, **options: Any) -> None:
        self.shared_memory = shared_memory
        self.run: Run = serve(directory, address="tcp://127.0.0.1:0", insecure=True, **options)
        self._ends = contextlib.ExitStack()
        self._ends.callback(self.run.close)

    def client(self, name: str = "test") -> Run:
        address = self.run.addresses[1] if self.shared_memory else self.run.address
        options: dict[str, Any] = {} if self.shared_memory else {"insecure": True}
        client = connect(address, name=name, shared_memory=self.shared_memory, **options)
        return self._ends.enter_context(contextlib.closing(client))

    def queue(self, name: str = "test") -> TransferQueue:
        return self.client(name).queue

    def start_unit(self) -> None:
        """Start a storage unit on this host, until the run ends."""
        connection = connection_of(self.client("starter"))
        ensure_unit(
            connection.run,
            UnitConfig(self.run.address, insecure=True),
            lambda: any(home.address for home in self.run.homes()),
        )

    def __enter__(self) -> StoredRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()


def connection_of(client: Run) -> Connection:
    """Return the connection of a client."""
    connection: Connection = client.queue.connection
    return connection


def store_of(client: Run) -> PayloadStore:
    """Return the store of a client."""
    return connection_of(client).store


def until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not in {limit_s:g} s: {what}"
        time.sleep(0.05)


class StoreContract:
    """``homes``: True if clients write to other homes than the server's memory."""

    homes = True

    def test_values_come_back_bit_for_bit_in_any_order_and_read_only(self, stored: StoredRun) -> None:
        queue, reader = stored.queue(), stored.queue("reader")
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
            batch.ack()

    def test_blocks_are_where_the_store_keeps_them(self, stored: StoredRun) -> None:
        client = stored.client()
        store = store_of(client)
        written = store.write(pack_columns({"x": np.arange(5.0)}), copy=False)
        assert (written.block is None) != (written.image is None)
        if self.homes:
            assert written.block is not None
            assert home_of(written.block.segment) != SERVER_MEMORY
        store.discard(written)

    def test_parts_of_large_blocks_are_read_in_any_order(self, stored: StoredRun) -> None:
        # given blocks of a few MB, with fixed and ragged rows, and columns added by a task
        queue, reader = stored.queue(), stored.queue("reader")
        queue.declare("add", needs=["x"], gives=["y"])
        queue.declare("read", needs=["x", "tokens", "y"])
        rows = 512
        tokens = [np.arange(n % 700, dtype=np.int64) + n for n in range(rows)]
        x = np.arange(rows * 512, dtype=np.float64).reshape(rows, 512)
        queue.put({"x": x[:300], "tokens": tokens[:300]})
        queue.put({"x": x[300:], "tokens": tokens[300:]})
        for count in (1, 100, 50, 361):
            with queue.get("add", count) as batch:
                batch.complete({"y": batch.array("x")[:, :1] * 2})
        # when they are read in parts
        found: list[int] = []
        while len(found) < rows:
            with reader.get("read", 60) as batch:
                at = (batch.array("x")[:, 0] / 512).astype(int).tolist()
                assert batch.array("x").tolist() == x[at].tolist()
                assert batch.array("y")[:, 0].tolist() == (2 * x[at, 0]).tolist()
                assert [each.tolist() for each in batch.ragged("tokens")] == [tokens[i].tolist() for i in at]
                found += at
                batch.ack()
        assert sorted(found) == list(range(rows))

    def test_a_copied_write_has_the_values_that_it_was_given(self, stored: StoredRun) -> None:
        client = stored.client()
        client.queue.declare("read", needs=["x"])
        values = np.arange(100_000.0)
        port = BlockingPort(connection_of(client))
        command = cmd.AddRows(groups=len(values), group_size=1, columns={})
        pending = port.write(command, pack_columns({"x": values}), keep=True)
        values[:] = 0
        run_blocking(port.submit(pending)).raise_error()
        assert stored.queue("reader").get("read", len(values)).array("x").tolist() == list(range(len(values)))

    def test_a_write_is_discarded_any_number_of_times(self, stored: StoredRun) -> None:
        store = store_of(stored.client())
        columns = pack_columns({"x": np.zeros(1 << 17)})
        for _ in range(40):
            written = store.write(columns, copy=False)
            assert (written.image is not None) == (store.inline and written.block is None)
            store.discard(written)
            store.discard(written)
        assert stored.queue("other").status().payload_bytes == 0

    def test_frees_are_repeated_and_of_unknown_blocks_without_harm(self, stored: StoredRun) -> None:
        client = stored.client()
        queue, store = client.queue, store_of(client)
        queue.declare("read", needs=["x"])
        queue.put({"x": np.arange(5.0)})
        store.free([1, 2, 3, -1, 1 << 62])
        with queue.get("read", 5) as batch:
            assert batch.array("x").tolist() == list(range(5))
            batch.ack()
        store.free([1, 2, 3])
        queue.put({"x": np.arange(3.0)})
        assert queue.get("read", 3).array("x").tolist() == [0, 1, 2]

    def test_rows_that_ended_before_they_were_read_are_lost_and_no_others(self, stored: StoredRun) -> None:
        client = stored.client()
        queue = client.queue
        queue.declare("read", needs=["x"])
        queue.put({"x": np.ones((4, 50_000))})
        connection = connection_of(client)
        answer = run_blocking(BlockingPort(connection).call(cmd.LeaseRows(task="read", count=4)))
        queue.cancel(rows=np.arange(4))
        queue.put({"x": np.full((4, 50_000), 2.0)})

        def is_gone() -> bool:  # frees may take a moment
            try:
                values = connection.store.read(answer.slices, answer.schema)["x"].values
            except LeaseLost:
                return True
            assert (values == 1).all()
            return False

        if answer.payload is None:
            until(is_gone, "the end of a freed block")
        queue.put({"x": np.full((1, 50_000), 3.0)})
        assert np.unique(queue.get("read", 5, at_least=5).array("x")).tolist() == [2, 3]

    def test_columns_outlive_their_rows_and_their_store(self, stored: StoredRun) -> None:
        client = stored.client()
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

    def test_rows_outlive_the_session_that_put_them(self, stored: StoredRun) -> None:
        producer = stored.client("producer")
        producer.queue.declare("read", needs=["x"])
        producer.queue.put({"x": np.ones((4, 50_000))})
        producer.close()
        with stored.queue("reader").get("read", 4) as batch:
            assert (batch.array("x") == 1).all()
            batch.ack()

    def test_threads_share_a_store(self, stored: StoredRun) -> None:
        queue = stored.queue()
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

        with ThreadPoolExecutor(3) as pool:
            found = sorted(each for part in pool.map(work, range(3)) for each in part)
        assert found == sorted(10.0 * number + part for number in range(3) for part in range(10) for _ in range(2))

    def test_clients_on_event_loops(self, stored: StoredRun) -> None:
        queue = stored.queue()
        queue.declare("read", needs=["x"])

        async def work() -> list[float]:
            await queue.aio.put({"x": np.arange(6.0)})
            async with await queue.aio.get("read", 6) as batch:
                values: list[float] = batch.array("x").tolist()
                await batch.ack()
                return values

        assert asyncio.run(work()) == list(range(6))

    def test_a_home_that_is_given_up_is_counted_and_its_writers_go_on(self, stored: StoredRun) -> None:
        if not self.homes:
            return
        queue, run = stored.queue(), stored.run
        queue.declare("read", needs=["x"])
        queue.put({"x": np.arange(4.0)}, key="first")
        (home,) = run.homes()
        # when it is given up
        run.evict_home(home, "it is old")
        # then its rows are counted, and may be put again, there or elsewhere
        audit = run.audit()
        assert (audit.put, audit.failed, audit.live, audit.balanced) == (4, 4, 0, True)
        queue.put({"x": np.arange(4.0)}, key="first")
        with stored.queue("reader").get("read", 4) as batch:
            assert batch.array("x").tolist() == [0, 1, 2, 3]
            batch.ack()
        audit = run.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.balanced) == (8, 4, 4, True)
