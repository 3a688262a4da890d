"""Checks of stores: put and get rows of a real run, with a storage unit if the store has homes.

Clients of both kinds write and read: those that see the server's memory, and "far" ones that do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DeadlineExceeded, Ended, LeaseLost, StoreUnavailable
from ...interfaces import LeasedBatch, TransferQueue
from ...interfaces.store import PayloadStore, StorageHome
from ...ledger import commands as cmd
from ...queue.block_index import BlockIndex
from ...queue.connection import BlockingPort
from ...queue.coroutines import run_blocking
from ...queue.stores.blocks import pack_columns
from ...queue.stores.homes import SERVER_MEMORY, home_of
from ...types.blocks import Block
from ...types.config import Store
from ...workflow import Stage
from ..stored_run import LIMIT_S, StoredRun, connection_of, squares, store_of, until
from .check import CheckFailed, DoesNotApply, checks, expect
from .lab import PlainLab
from .resources import check_given_back

SIDES = ((True, False), (False, True))
"""(far writer, far reader)."""
LARGE, ROUNDS = 4 << 20, 20
COLUMNS: dict[str, Any] = {
    "fixed": np.arange(12.0).reshape(4, 3),
    "strided": np.arange(64)[::2].reshape(4, 8)[:, ::2],
    "ragged": [np.arange(n, dtype=np.int32) for n in (3, 0, 5, 1)],
    "text": ["", "ä\0", "x" * 50_000, "y"],
    "wide": np.arange(4 << 16, dtype=np.uint8).reshape(4, 1 << 16),
}
_SENT = "columns of a client that does not see the server's memory were sent to the server"


@contextlib.contextmanager
def _stored(lab: PlainLab, *needs: str, homes: bool = False, process: bool = False) -> Iterator[StoredRun]:
    """Serve a run with the store and the task "read". ``homes``: the check is about homes. ``process``: its storage
    unit is a process."""
    with StoredRun(Store(kind=lab.name, options=lab.options)) as stored:
        if homes and not stored.has_homes:
            raise DoesNotApply("all payload is in the memory of the server")
        if stored.has_homes:
            stored.start_unit(process=process)
        stored.run.queue.declare("read", needs=needs or ("x",))
        yield stored


def _get(queue: TransferQueue, rows: int) -> LeasedBatch:
    return queue.get("read", rows, at_least=rows, timeout_s=LIMIT_S)


def _expect_rows(queue: TransferQueue, wanted: Any, when: str) -> None:
    with _get(queue, len(wanted)) as batch:
        _compare(np.sort(batch.array("x").ravel()).tolist(), wanted, when)
        batch.ack()


def _compare(found: list[float], wanted: Any, when: str) -> None:
    expect(found == list(wanted), f"rows put as {list(wanted)} are read as {found} {when}")


def values(lab: PlainLab) -> None:
    """Columns of every kind come back bit for bit, in any mixture of rows."""
    with _stored(lab, *COLUMNS) as stored:
        for far_writer, far_reader in SIDES:
            writer, reader = stored.queue("writer", far=far_writer), stored.queue("reader", far=far_reader)
            writer.put(COLUMNS)
            writer.put(COLUMNS)
            for rows, at in ((1, np.arange(1)), (3, np.arange(1, 4)), (4, np.arange(4))):
                with _get(reader, rows) as batch:
                    for name in ("fixed", "strided", "wide"):
                        same = batch.array(name).tobytes() == np.ascontiguousarray(COLUMNS[name][at]).tobytes()
                        expect(same, f"column {name!r} of rows {at.tolist()} has other bytes")
                    ragged = [each.tolist() for each in batch.ragged("ragged")]
                    expect(ragged == [COLUMNS["ragged"][i].tolist() for i in at], f"ragged rows are read as {ragged}")
                    expect(batch.texts("text") == [COLUMNS["text"][i] for i in at], "texts are others")
                    batch.ack()


def parts(lab: PlainLab) -> None:
    """Parts of blocks of a few MB are read, together with columns added by a task."""
    rows = 512
    tokens = [np.arange(n % 700, dtype=np.int64) + n for n in range(rows)]
    x = np.arange(rows * 512.0).reshape(rows, 512)
    with _stored(lab, "x", "tokens", "y") as stored:
        queue, reader = stored.queue(far=True), stored.queue("reader")
        queue.declare("add", needs=["x"], gives=["y"])
        for some in (slice(300), slice(300, rows)):
            queue.put({"x": x[some], "tokens": tokens[some]})
        for count in (1, 100, 50, 361):
            with queue.get("add", count, at_least=count, timeout_s=LIMIT_S) as batch:
                batch.complete({"y": batch.array("x")[:, :1] * 2})
        found: list[int] = []
        while len(found) < rows:
            with reader.get("read", 60, timeout_s=LIMIT_S) as batch:
                at = (batch.array("x")[:, 0] / 512).astype(int).tolist()
                same = batch.array("x").tolist() == x[at].tolist()
                same = same and batch.array("y")[:, 0].tolist() == (2 * x[at, 0]).tolist()
                same = same and [each.tolist() for each in batch.ragged("tokens")] == [tokens[i].tolist() for i in at]
                expect(same, f"the columns of rows {at} are not those that were put and added")
                found += at
                batch.ack()
        expect(sorted(found) == list(range(rows)), f"of {rows} rows, {len(set(found))} were read")


def homes(lab: PlainLab) -> None:
    """Columns of a host with a storage unit are in a home, and not in the server's memory."""
    with _stored(lab, homes=True) as stored:
        store = store_of(stored.client(far=True))
        written = store.write(pack_columns({"x": np.arange(5.0)}), copy=False)
        kept = written.block is not None and home_of(written.block.segment) != SERVER_MEMORY
        store.discard(written)
        expect(kept, _SENT)


def processes(lab: PlainLab) -> None:
    """Rows are read by workers of the run, also after the process that put them has ended."""
    with _stored(lab, "y") as stored:
        (worker,) = stored.run.start(Stage(squares, task="square", gives=["y"]))
        stored.process("put", 8)
        try:
            with _get(stored.queue(far=True), 8) as batch:
                found = np.sort(batch.array("y")).tolist()
                batch.ack()
        except Ended:
            stored.run.wait(worker, timeout_s=LIMIT_S)  # raises the error that ended it, and the run
            raise
        expect(found == [float(n * n) for n in range(8)], f"squares of 0 to 7 are read as {found}")


def ended(lab: PlainLab) -> None:
    """Rows that ended before they were read raise LeaseLost, and no other rows are lost."""
    for far in (True, False):
        with _stored(lab) as stored:
            client = stored.client(far=far)
            client.queue.put({"x": np.ones((4, 50_000))})
            connection = connection_of(client)
            answer = run_blocking(BlockingPort(connection).call(cmd.LeaseRows(task="read", count=4, inline=far)))
            client.queue.cancel(rows=np.arange(4))
            client.queue.put({"x": np.full((4, 50_000), 2.0)})
            client.queue.put({"x": np.full((1, 50_000), 3.0)})

            def _is_gone(answer: Any = answer, store: Any = connection.store) -> bool:
                try:
                    found = np.unique(store.read(answer.slices, answer.schema)["x"].values).tolist()
                except LeaseLost:
                    return True
                expect(found == [1], f"rows that had ended are read as {found}, and their values were 1")
                return False

            if answer.payload is None:
                until(_is_gone, "LeaseLost for rows that had ended")
            found = np.unique(_get(client.queue, 5).array("x")).tolist()
            expect(found == [2, 3], f"rows put as 2 and 3 are read as {found} after others had ended")


def copied(lab: PlainLab) -> None:
    """With copy=True the caller may change the columns once write() has returned."""
    for far in (True, False):
        with _stored(lab) as stored:
            port, x = BlockingPort(connection_of(stored.client(far=far))), np.arange(100_000.0)
            added = cmd.AddRows(groups=len(x), group_size=1, columns={})
            pending = port.write(added, pack_columns({"x": x}), keep=True)
            x[:] = 0
            run_blocking(port.submit(pending)).raise_error()
            with _get(stored.queue("reader"), len(x)) as batch:
                same = batch.array("x").tolist() == list(range(len(x)))
            expect(same, "the caller changed its columns after write(copy=True), and the rows changed, too")


def memory(lab: PlainLab) -> None:
    """Memory of writes that were discarded, and of rows that ended, is used again."""
    with _stored(lab) as stored:
        columns = {"x": np.zeros((1, LARGE), np.uint8)}
        for client in (stored.client(far=True), stored.client()):
            store = store_of(client)
            for _ in range(ROUNDS):
                written = store.write(pack_columns(columns), copy=False)
                store.discard(written)
                store.discard(written)
            for _ in range(ROUNDS):
                client.queue.put(columns)
                _get(client.queue, 1).ack()
        held = stored.run.queue.status().held_bytes
        said = f"{held >> 20} MB are held after writes and rows of {LARGE >> 20} MB, discarded or ended one by one"
        expect(held < ROUNDS * LARGE, said)


def frees(lab: PlainLab) -> None:
    """Blocks are freed again, and unknown ones, without harm."""
    for far in (True, False):
        with _stored(lab) as stored:
            client = stored.client(far=far)
            for count in (5, 3):
                client.queue.put({"x": np.arange(float(count))})
                store_of(client).free([1, 2, 3, -1, 1 << 62])
                _expect_rows(client.queue, range(count), "after frees of unknown blocks")


def views(lab: PlainLab) -> None:
    """Columns that were read keep their values after their rows have ended, and after close()."""
    with _stored(lab) as stored:
        for far_writer, far_reader in SIDES:
            writer, reader = stored.queue(far=far_writer), stored.client("reader", far=far_reader)
            writer.put({"x": np.ones((4, 50_000))})
            batch = _get(reader.queue, 4)
            x = batch.array("x")
            batch.ack()
            for number in range(10):
                writer.put({"x": np.full((4, 50_000), 2.0 + number)})
                _get(reader.queue, 4).ack()
            expect((x == 1).all(), "values that were read have changed after their rows had ended")
            store_of(reader).close()
            store_of(reader).close()
            expect((x == 1).all(), "values that were read have changed after close()")


def threads(lab: PlainLab) -> None:
    """Threads write and read with one store at the same time."""
    with _stored(lab) as stored:
        queues = [stored.queue(far=True), stored.queue()]

        def _work(number: int) -> list[float]:
            queue = queues[number % 2]
            for part in range(10):
                queue.put({"x": np.full((2, 5000), 10.0 * number + part)})
            found: list[float] = []
            while len(found) < 20:
                with queue.get("read", 2, timeout_s=LIMIT_S) as batch:
                    x = batch.array("x")
                    expect((x == x[:, :1]).all(), "a row has values of another row")
                    found += x[:, 0].tolist()
                    batch.ack()
            return found

        with ThreadPoolExecutor(4) as pool:
            found = sorted(each for part in pool.map(_work, range(4)) for each in part)
        _compare(found, sorted(2 * [float(each) for each in range(40)]), "by 4 threads")


def event_loops(lab: PlainLab) -> None:
    """Tasks of an event loop write and read."""

    async def _work(queue: TransferQueue) -> list[float]:
        await queue.aio.put({"x": np.arange(6.0)})
        async with await queue.aio.get("read", 6, at_least=6, timeout_s=LIMIT_S) as batch:
            found: list[float] = batch.array("x").tolist()
            await batch.ack()
            return found

    with _stored(lab) as stored:
        for far in (True, False):
            _compare(asyncio.run(_work(stored.queue(far=far))), range(6), "in an event loop")


def closed(lab: PlainLab) -> None:
    """A client that wrote and read leaves no threads, descriptors or processes."""
    with _stored(lab) as stored:
        clients: list[Any] = []

        def _start() -> None:
            clients.append(stored.client(far=True))
            clients[-1].queue.put({"x": np.arange(4.0)})
            _expect_rows(clients[-1].queue, range(4), "by the client that put them")

        _start()
        clients.pop().close()  # of the process: made once
        check_given_back(_start, lambda: clients.pop().close(), limit_s=lab.limit_s)


def given_up(lab: PlainLab) -> None:
    """A home is given up: its rows are counted as failed, and its writers go on."""
    with _stored(lab, homes=True) as stored:
        queue = stored.queue(far=True)
        queue.put({"x": np.arange(4.0)}, key="first")
        (home,) = stored.run.homes()
        stored.run.evict_home(home, "it is old")
        audit = stored.run.audit()
        counts = audit.put, audit.failed, audit.live, audit.balanced
        said = f"4 rows of a lost home are counted as (put, failed, live, balanced) {counts}"
        expect(counts == (4, 4, 0, True), said)
        queue.put({"x": np.arange(4.0)}, key="first")
        _expect_rows(stored.queue("reader"), range(4), "after their home was given up")
        until(lambda: any(each.epoch > home.epoch and not each.lost for each in stored.run.homes()), "the next epoch")
        later = stored.queue("later", far=True)
        later.put({"x": np.arange(5.0)})
        _expect_rows(later, range(5), "in the next epoch of the home")


def ended_sessions(lab: PlainLab) -> None:
    """The storage unit frees the blocks of sessions that have ended, and no others."""
    with _stored(lab, homes=True) as stored:
        stored.queue("writer", far=True).put({"x": np.arange(4.0)})
        client, reader = stored.client("short", far=True), stored.client("reader", far=True)
        block = store_of(client).write(pack_columns({"x": np.zeros(100_000)}), copy=False).block
        if block is None:
            raise CheckFailed(_SENT)
        client.close()  # its call is never sent
        (home,) = stored.run.homes()
        until(lambda: not _is_there(store_of(reader), home, block), "the end of a block whose session has ended")
        _expect_rows(reader.queue, range(4), "after another session had ended")


def _is_there(store: PayloadStore, home: StorageHome, block: Block) -> bool:
    if (segments := Path(home.directory)).is_dir():
        return (segments / block.segment).exists()
    index = BlockIndex()
    index.add(np.arange(block.rows), block, np.arange(block.rows))
    try:
        store.read(index.locate(np.zeros(1, np.int64), ("x",)), {"x": pack_columns({"x": np.zeros(1)})["x"].spec})
    except LeaseLost:
        return False
    return True


def unit_killed(lab: PlainLab) -> None:
    """After the storage unit is killed and started again, rows are read, or counted as lost."""
    with _stored(lab, homes=True, process=True) as stored:
        queue, reader = stored.queue(far=True), stored.queue("reader", far=True)
        queue.put({"x": np.arange(4.0)})
        stored.kill_unit()
        stored.start_unit()
        end = time.monotonic() + 2 * LIMIT_S
        while not stored.run.audit().failed:
            with contextlib.suppress(StoreUnavailable, DeadlineExceeded):
                batch = reader.get("read", 4, at_least=4, timeout_s=1.0)
                _compare(batch.array("x").tolist(), range(4), "after their storage unit was killed")
                batch.ack()
                break
            expect(time.monotonic() < end, f"for {2 * LIMIT_S:g} s, rows were neither read nor lost")
        queue.put({"x": np.arange(5.0, 8)})
        _expect_rows(reader, (5, 6, 7), "after another storage unit was started")
        expect(stored.run.audit().balanced, f"the rows are not all counted: {stored.run.audit()}")


CHECKS = checks("store", {
    values: ("basic", (), "training uses other tokens and rewards than were made, and no error says so",
        "read(): the exact bytes, in the order of the slices"),
    parts: ("basic", ("values",), "rows of large puts are mixed up, or each small lease moves the whole put",
        "read(): entries and counts of the slices; ranges of a block"),
    homes: ("basic", (), "all bytes of other hosts cross the server's link twice, as without the store",
        "write(): StoredBlock.block in a home of the writer's host; its storage unit must be open"),
    processes: ("basic", ("values",), "rows are lost with a worker that ends, or only their writer can read them",
        "blocks must outlive the process that wrote them, and be readable in others"),
    ended: ("basic", ("values",), "a lease that was taken away is trained with the columns of other rows",
        "read(): LeaseLost for a freed block; check its serial after the last byte was read"),
    copied: ("full", (), "a producer that reuses its buffer changes rows that it has already put",
        "write(copy=True): copy the columns before the return"),
    memory: ("full", (), "memory grows until puts raise MemoryFull, or the host ends the server",
        "discard() and free(): the bytes can be used again. Give the store a limit to check this"),
    frees: ("full", (), "a repeated answer of the server ends a producer, or frees the columns of other rows",
        "free(): ignore unknown serials and those that are freed"),
    views: ("full", (), "values change while a trainer computes with them",
        "memory that a reader refers to must not be used again, also after close()"),
    threads: ("full", ("values",), "a worker with several threads gets wrong rows, or fails now and then",
        "one store has all threads of a process: state of reads and writes belongs to the call"),
    event_loops: ("full", ("values",), "asynchronous workers fail, or all their tasks stand still",
        "read(): no event loop of its own; may_wait=True if it waits for others"),
    closed: ("full", ("values",),
        "each client that leaves takes descriptors and threads with it, until the worker or the server fails",
        "close(): end threads, close files and connections; repeated, and also after reads"),
    given_up: ("full", ("homes",), "after the loss of one host the others stop, or its rows are counted wrongly",
        "rewrite(): the same columns in a home that is not lost, else as an image"),
    ended_sessions: ("full", ("homes",),
        "memory of workers that died is never free again; or rows are gone as soon as any worker ends",
        "HomeUnit: free blocks by the sessions that have ended, and no others"),
    unit_killed: ("full", ("homes", "given_up"), "rows are leased and given back for ever, and the run stands still",
        "HomeUnit.offer: another identity once blocks are lost; read(): StoreUnavailable until then"),
})  # fmt: skip
