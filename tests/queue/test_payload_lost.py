"""Memory of a run that is lost while its server is away: each loss is counted, what lives can be read, and clients go on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from journal_children import serve_and_die
from queue_runs import running
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, LeaseLost
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.memory import sweep
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.weights import OwnUpdates, WeightPublisher
from asyncflow_sdk.wire import client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESEND_S", 0.1)


Connect = Callable[..., TransferQueue]


@contextlib.contextmanager
def killed(path: Path) -> Iterator[tuple[Connect, Path]]:
    """How to connect to a server in another process, which is killed when the block ends; and its run's shared memory."""
    with Child(serve_and_die, str(path), 10**9, "never") as server:
        address = server.hear()["address"]
        first = Connection(address, "first")

        def connect(name: str, **options: Any) -> TransferQueue:
            return open_queue(Connection(address, name, **options))

        try:
            yield connect, first.directory
        finally:
            server.kill()


@contextlib.contextmanager
def served(path: Path) -> Iterator[QueueServer]:
    server = QueueServer([], journal=path)
    try:
        yield server
    finally:
        server.ledger.ended = True
        server.close()
        shutil.rmtree(path)
        sweep(server.directory.path.parent)


def wait(queue: TransferQueue, *clients: str) -> None:
    until(lambda: set(clients) <= queue.status().waiting.keys(), f"that {clients} wait")


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_put_that_waits_when_its_payload_is_lost_is_made_again(tmp_path: Path, shared_memory: bool) -> None:
    # given a full queue, and puts of other clients that wait for room
    path = tmp_path / "journal"
    with killed(path) as (connect, directory):
        queue = connect("reader")
        queue.configure(capacity_rows=10)
        queue.declare("work", needs=["x"])
        queue.put({"x": np.arange(10.0)})
        others = [connect(f"other-{n}", shared_memory=shared_memory) for n in range(2)]
        puts = [in_thread(other.put, {"x": np.arange(5.0) + 10 * n}, timeout_s=100) for n, other in enumerate(others)]
        wait(queue, "other-0", "other-1")
    # when all memory is lost with the server
    shutil.rmtree(directory)
    with served(path) as server:
        # then what was put is lost, each row counted
        assert server.recovered is not None
        assert (server.recovered.lost, server.recovered.rows) == (10, 0)
        # and what was not yet is put after all, and can be read
        assert [put().count for put in puts] == [5, 5]
        got = []
        while len(got) < 10:
            with queue.get("work", 10, timeout_s=60) as batch:
                got += batch["x"].tolist()
                batch.ack()
        assert sorted(got) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
        audit = queue.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live) == (20, 10, 10, 0)
        for each in (queue, *others):
            each._port.connection.close()


@pytest.mark.parametrize("beside", [0, 5])
def test_a_put_of_a_far_client_that_waits_is_read_after_its_server_came_back(tmp_path: Path, beside: int) -> None:
    # given a full queue, and a put that waits for room, whose payload lies with the server, ``beside`` rows that were put
    path = tmp_path / "journal"
    with killed(path) as (connect, _):
        queue, far = connect("reader"), connect("far", shared_memory=False)
        queue.configure(capacity_rows=10)
        queue.declare("work", needs=["x"])
        if beside:
            far.put({"x": np.arange(float(beside))})
        queue.put({"x": np.arange(10.0 - beside)})
        put = in_thread(far.put, {"x": np.arange(10.0)}, timeout_s=100)
        wait(queue, "far")
    # when the server comes back, and no row is left in that memory before the put has its turn
    with served(path):
        for _ in range(2):
            with queue.get("work", 5) as batch:
                batch.ack()
        # then
        assert put().count == 10
        with queue.get("work", 10) as batch:
            assert batch["x"].tolist() == list(range(10))
            batch.ack()
        for each in (queue, far):
            each._port.connection.close()


def test_a_client_that_outlives_the_memory_of_its_run_goes_on(tmp_path: Path) -> None:
    # given a client that has written into memory that is lost with the server, and holds rows
    path = tmp_path / "journal"
    with killed(path) as (connect, directory):
        queue = connect("client")
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        queue.put({"x": np.arange(4.0)})
        queue.put({"x": np.arange(3000.0)})
        small, large, last = queue.get("work", 1), queue.get("work", 3), queue.get("work", 3000)
        last.finish({"y": np.zeros(3000)})
    shutil.rmtree(directory)
    # when it puts before the server is back, and after
    early = in_thread(queue.put, {"x": np.arange(2.0)}, timeout_s=100)
    with served(path) as server:
        assert early().count == 2
        assert queue.put({"x": np.arange(5.0)}).count == 5
        # then its rows are there, and what it held is lost, which it still sees
        with queue.get("work", 7, at_least=7) as batch:
            assert batch["x"].tolist() == [0, 1, 0, 1, 2, 3, 4]
            batch.complete({"y": np.ones(7)})
        assert queue.get("end", 7).array("y").tolist() == 7 * [1.0]
        for held in (small, large):
            with pytest.raises(LeaseLost):
                held.complete({"y": np.zeros(held.rows)})
        with pytest.raises(LeaseLost):
            queue.get("work", ack=last)
        assert last["x"].tolist() == list(range(3000))
        assert server.recovered is not None
        assert server.recovered.lost == 3004
        # and nothing of the lost memory is kept
        assert len(queue._port.connection.arena._segments) == 1
        queue._port.connection.close()


def test_what_was_written_before_the_loss_and_is_sent_after_it_arrives(tmp_path: Path) -> None:
    # given a client's memory that is lost after it has written, and before the server looks
    path = tmp_path / "journal"
    with killed(path) as (connect, directory):
        queue, other = connect("client"), connect("other", shared_memory=False)
        queue.declare("work", needs=["x"], gives=["y"])
        queue.declare("end", needs=["y"])
        other.put({"x": np.arange(4.0)})
    with served(path):
        batch = queue.get("work", 4)
        batch.finish({"y": np.arange(4.0)})
        for file in directory.glob(f"s{queue._port.connection.session}-*"):
            file.unlink()
        with pytest.raises(DeadlineExceeded):
            queue.get("work", ack=batch, timeout_s=0)
        assert queue.get("end", 4).array("y").tolist() == [0, 1, 2, 3]
        for each in (queue, other):
            each._port.connection.close()


@pytest.mark.parametrize("kind", ["ipc", "remote"])
def test_rows_that_cannot_be_read_fail_once_and_are_given_to_nobody_again(kind: str) -> None:
    # given rows of one client whose memory somebody removes, and a row of another
    with running(kind) as run:
        owner, queue = open_queue(Connection(run.server.addresses[1], "owner")), run.queue()
        queue.declare("work", needs=["x"])
        for number in range(40):
            owner.put({"x": [float(number)]})
        for file in run.server.directory.path.glob("s*"):
            file.unlink()
        owner.put({"x": [40.0]})
        # when
        with queue.get("work", 2, timeout_s=60) as batch:
            # then
            assert batch["x"].tolist() == [40]
            batch.ack()
        audit = queue.audit()
        assert (audit.put, audit.failed, audit.consumed, audit.live) == (41, 40, 1, 0)
        assert audit.reasons["failed: payload lost"] == 40
        owner._port.connection.close()


def test_rows_said_to_be_unread_that_can_be_read_are_given_to_others() -> None:
    with running("ipc") as run:
        queue = run.queue()
        queue.declare("work", needs=["x"], max_attempts=1)
        queue.put({"x": np.arange(3.0)})
        batch = queue.get("work", 3)
        drive(queue._port.send(cmd.GiveBack(token=batch.token, unread=True)))
        assert queue.get("work", 3)["x"].tolist() == [0, 1, 2]
        assert queue.audit().failed == 0


def test_a_run_that_comes_back_remembers_what_could_not_be_read(tmp_path: Path) -> None:
    # given rows that were found lost by who could not read them
    path = tmp_path / "journal"
    with killed(path) as (connect, directory):
        queue = connect("client")
        queue.declare("work", needs=["x"])
        queue.put({"x": np.arange(4.0)})
        for file in directory.glob("s*"):
            file.unlink()
        queue.put({"x": [4.0]})
        batch = queue.get("work", 5, timeout_s=60)
    # when their server is killed and its journal carried out again
    with served(path) as server:
        # then nothing comes out differently, and what is held can be completed
        assert server.recovered is not None
        assert (server.recovered.differing, server.recovered.lost, server.recovered.rows) == (0, 0, 1)
        batch.ack()
        audit = queue.audit()
        assert (audit.failed, audit.consumed) == (4, 1)
        queue._port.connection.close()


def test_a_publisher_that_outlives_the_memory_of_its_run_publishes_where_replicas_find_it(tmp_path: Path) -> None:
    # given a publisher that uses the memory of old versions again, all of which is lost with the server
    path = tmp_path / "journal"
    with killed(path) as (connect, directory):
        queue = connect("trainer")
        publisher = WeightPublisher(queue)
        for version in range(5):
            publisher.publish(version, [("w", np.full(1000, version, np.float32))]).wait()
    shutil.rmtree(directory)
    with served(path) as server:
        # when
        for version in (5, 6):
            publisher.publish(version, [("w", np.full(1000, version, np.float32))]).wait()
            # then
            replica = open_queue(Connection(server.addresses[1], "replica"))
            with OwnUpdates(replica) as updates, next(iter(updates)) as update:
                assert update.version == version
                assert np.asarray(dict(update)["w"]).tolist() == 1000 * [version]
            replica._port.connection.close()
        publisher.close()
        queue._port.connection.close()
