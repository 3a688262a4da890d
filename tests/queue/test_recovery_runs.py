"""Runs that come back: their payload, their weights, their clients; and what is said when something did not survive."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from journal_children import hold, produce_and_wait, serve_and_die, values_of
from recovery_bench import Bench, kill, make
from waiting import until

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, LeaseLost
from asyncflow_sdk.ledger import TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.memory import sweep
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, journal, open_queue, recovery, snapshot
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.weights import OwnUpdates, WeightPublisher
from asyncflow_sdk.wire import client


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "RESEND_S", 0.1)


@contextlib.contextmanager
def killed(path: Path, durability: str = "process") -> Iterator[tuple[TransferQueue, Path]]:
    """A queue whose server, in another process, is killed when the block ends; and the run's shared memory."""
    with Child(serve_and_die, str(path), 10**9, "never", durability) as server:
        address = server.hear()["address"]
        connection = Connection(address, "client")
        try:
            yield open_queue(connection), connection.directory
        finally:
            server.kill()


@contextlib.contextmanager
def served(path: Path, **options: Any) -> Iterator[QueueServer]:
    server = QueueServer([], journal=path, **options)
    try:
        yield server
    finally:
        server.ledger.ended = True
        server.close()
        shutil.rmtree(path)
        sweep(server.directory.path.parent)


def test_clients_of_a_killed_server_just_go_on(tmp_path: Path) -> None:
    # given a client that holds rows, and one that waits for some
    path = tmp_path / "journal"
    with Child(serve_and_die, str(path), 10**9, "never") as server:
        address = server.hear()["address"]
        queue = open_queue(Connection(address, "client"))
        queue.declare("work", needs=["x"], gives=["y"])
        queue.put({"x": values_of(0, 100)})
        batch = queue.get("work", 60)
        with Child(produce_and_wait, address) as child:
            assert child.hear() == "waits"
            # when the server is killed and comes back
            server.kill()
            with served(path) as again:
                assert again.recovered is not None
                assert (again.recovered.rows, again.recovered.sessions, again.recovered.lost) == (100, 2, 0)
                assert again.addresses[1] == address
                # then what was leased can be completed, and who waited gets rows
                assert batch.array("x").tobytes() == values_of(0, 60).tobytes()
                batch.complete({"y": np.zeros(60)})
                queue.put({"z": np.arange(3.0)})
                assert child.hear() == [0.0, 1.0, 2.0]
                assert queue.get("work", 100).rows == 40
                assert queue.audit().put == 103
                child.kill()
                until(lambda: len(again.ledger.sessions) == 1, "its death, seen by the server that came back")
                queue._port.connection.close()


def test_who_died_with_the_server_is_not_held_against_the_rows(tmp_path: Path) -> None:
    # given rows that may be lost once, held by a process that is killed with the server
    path = tmp_path / "journal"
    with killed(path) as (queue, _):
        queue.declare("work", needs=["x"], max_attempts=1)
        queue.put({"x": values_of(0, 4)})
        holder = Child(hold, queue._port.connection.wire.address, "work")
        assert holder.hear() == 4
    holder.kill()
    holder.__exit__()
    # when it comes back
    with served(path) as server:
        # then they are there
        assert queue.get("work", 4).rows == 4
        assert server.ledger.audit().failed == 0
        queue._port.connection.close()


def test_payload_that_is_gone_is_counted_row_by_row(tmp_path: Path) -> None:
    # given rows of two sessions, in groups of two, some of them through already
    path = tmp_path / "journal"
    with killed(path) as (queue, directory):
        queue.declare("work", needs=["x"])
        queue.put({"x": values_of(0, 10)}, group_size=2)
        queue.get("work", 4).ack()
        other = Connection(queue._port.connection.wire.address, "other")
        open_queue(other).put({"x": values_of(50, 5)}, group_size=2)
        lost = sorted(directory.glob(f"s{other.session}-*"))
    # when the memory of one is gone with the server
    assert lost
    for file in lost:
        file.unlink()
    told: list[Any] = []
    with served(path, on_event=told.append) as server:
        # then its rows failed, and the others are there
        assert server.recovered is not None
        assert (server.recovered.lost, server.recovered.rows) == (10, 16)
        audit = server.ledger.audit()
        assert audit.balanced
        assert (audit.put, audit.consumed, audit.failed, audit.live) == (30, 4, 10, 16)
        assert audit.reasons["failed: payload lost"] == 10
        assert any("payload of 10 rows is lost" in getattr(event, "text", "") for event in told)
        assert queue.get("work", 100).array("x").tobytes() == np.repeat(values_of(0, 10), 2)[4:].tobytes()
        other.close()
        queue._port.connection.close()


def test_all_of_shared_memory_may_be_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with killed(path) as (queue, directory):
        queue.put({"x": values_of(0, 7)})
    shutil.rmtree(directory)
    with served(path) as server:
        audit = server.ledger.audit()
        assert (audit.put, audit.failed, audit.live) == (7, 7, 0)
        assert server.directory.path == directory
        queue._port.connection.close()


def test_at_level_host_the_rows_lie_on_disk(tmp_path: Path) -> None:
    # given
    path = tmp_path / "journal"
    with killed(path, "host") as (queue, directory):
        queue.declare("work", needs=["x"], gives=["y"])
        queue.put({"x": values_of(0, 1000)})
        queue.get("work", 500).complete({"y": values_of(1000, 500)})
        assert not list(directory.glob("s*"))
    # when the host is started again: memory is gone, and every process
    shutil.rmtree(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_boot", lambda: "another start of the host")
        with served(path) as server:
            # then every row is there
            assert server.recovered is not None
            assert (server.recovered.lost, server.recovered.rows) == (0, 1000)
            assert server.ledger.sessions == {}
            after = open_queue(Connection(server.addresses[1], "after"))
            after.declare("read", needs=["x", "y"])
            batch = after.get("read", 1000)
            assert batch.array("x").tobytes() == values_of(0, 500).tobytes()
            assert batch.array("y").tobytes() == values_of(1000, 500).tobytes()
            after._port.connection.close()
    queue._port.connection.wire.close()


def test_at_level_process_nothing_that_a_restart_of_the_host_left_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    with killed(path) as (queue, _):
        queue.put({"x": values_of(0, 7)})
    monkeypatch.setattr(recovery, "_boot", lambda: "another start of the host")
    with served(path) as server:
        assert server.recovered is not None
        assert (server.recovered.lost, server.recovered.sessions) == (7, 0)
    queue._port.connection.wire.close()


def test_a_journal_that_is_damaged_before_its_end_is_applied_to_there_and_kept(tmp_path: Path) -> None:
    # given ten puts, of which the record of the sixth is damaged
    path = tmp_path / "journal"
    with killed(path) as (queue, _):
        for number in range(10):
            queue.put({"x": [number]}, key=f"key-{number}-")
    (journal,) = path.glob("journal-*")
    data = bytearray(journal.read_bytes())
    data[data.index(b"key-5-") + 1] ^= 1
    journal.write_bytes(data)
    told: list[Any] = []
    with served(path, on_event=told.append) as server:
        # then five puts are there, the rest is not, and lies beside
        found = server.recovered
        assert found is not None
        assert (found.rows, found.behind, found.differing) == (5, 4, 0)
        assert found.cut > 0
        assert Path(found.damaged).read_bytes() == data
        assert any(getattr(event, "level", "") == "error" and "damaged" in event.text for event in told)
        # and a put that is repeated by its key is put again
        queue._port.connection.wire.close()
        after = open_queue(Connection(server.addresses[1], "after"))
        assert after.put({"x": [4]}, key="key-4-").again
        assert not after.put({"x": [5]}, key="key-5-").again
        after._port.connection.close()


def test_versions_outlive_the_server(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with killed(path) as (queue, directory):
        publisher = WeightPublisher(queue)
        for version in (0, 1, 2):
            publisher.publish(version, [("w", np.full(1000, version, np.float32))])
        publisher.flush()
        files = sorted(directory.glob("w*"))
    with served(path) as server:
        # then the newest is there with its bytes, and a further one follows it
        assert sorted(directory.glob("w*")) == files
        replica = open_queue(Connection(server.addresses[1], "replica"))
        with OwnUpdates(replica) as updates, next(iter(updates)) as update:
            assert update.version == 2
            assert np.asarray(dict(update)["w"]).tobytes() == np.full(1000, 2, np.float32).tobytes()
        replica._port.connection.close()
        publisher.publish(3, [("w", np.full(1000, 3, np.float32))]).wait()
        assert server.ledger.version == 3
        publisher.close()
        queue._port.connection.close()


def say(queue: TransferQueue, command: Any) -> Any:
    return drive(queue._port.send(command))


def publish(queue: TransferQueue, version: int) -> None:
    part = cmd.Part(manifest=b"m", transport="t", where=b"")
    say(queue, cmd.Announce(version=version))
    say(queue, cmd.Publish(version=version, part=part))


def test_what_is_staged_decided_and_rolled_back_outlives_the_server(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with killed(path) as (trainer, _):
        # given two of three replicas that must have a version staged, and one of them waits to load it
        trainer.declare("rollout", needs=["x"], gives=["y"], admits=True)
        trainer.declare("train", needs=["y"], batch_rows=4)
        say(trainer, cmd.Configure(quorum=3, max_swapping=1, keep_versions=3))
        say(trainer, cmd.OpenPublisher())
        for version in (5, 6):
            publish(trainer, version)
        replicas = [open_queue(Connection(trainer._port.connection.wire.address, f"gen-{n}")) for n in range(3)]
        for queue in replicas[:2]:
            say(queue, cmd.AwaitVersion(after=5))
            say(queue, cmd.Staged(version=6))
    # when the server is killed between staging and loading
    with Child(serve_and_die, str(path), 10**9, "never") as server:
        assert server.hear()["address"] == trainer._port.connection.wire.address
        with pytest.raises(DeadlineExceeded, match="2 of the 3 replicas"):
            say(replicas[0], cmd.Swap(version=6))
        say(replicas[2], cmd.Staged(version=6))
        assert say(replicas[0], cmd.Swap(version=6)) == cmd.Permitted(version=6)
        server.kill()
    # and killed after the decision, with one permission given
    with Child(serve_and_die, str(path), 10**9, "never") as server:
        server.hear()
        with pytest.raises(DeadlineExceeded, match=r"at most 1 at a time \(max_swapping\), now gen-0"):
            say(replicas[1], cmd.Swap(version=6))
        say(replicas[0], cmd.Loaded(version=6))
        assert say(replicas[1], cmd.Swap(version=6)) == cmd.Permitted(version=6)
        say(replicas[1], cmd.Loaded(version=6))
        trainer.put({"x": np.arange(4.0)})
        lease = say(replicas[0], cmd.Lease(task="rollout", count=2))
        assert say(trainer, cmd.Rollback(version=5, reason="it diverged")) == cmd.RolledBack(version=7, expired=2)
        server.kill()
    # and killed after a rollback
    with served(path) as again:
        # then it is rolled back, decided, and the publisher is who it was
        assert again.recovered is not None
        assert again.recovered.differing == 0
        assert (again.ledger.version, again.ledger.committed) == (7, 7)
        with pytest.raises(LeaseLost):
            say(replicas[0], cmd.Renew(token=lease.token))
        assert say(replicas[1], cmd.Lease(task="rollout", count=2)) == cmd.LoadFirst(version=7)
        assert say(replicas[1], cmd.AwaitVersion(after=6)).source == 5
        with pytest.raises(ConfigError, match="a run has one publisher at a time"):
            say(replicas[2], cmd.OpenPublisher())
        with pytest.raises(ConfigError, match="the trainer has not loaded version 7 yet"):
            publish(trainer, 8)
        say(trainer, cmd.Restored(version=7))
        publish(trainer, 8)
        assert again.ledger.audit().reasons == {"expired: version 6 was rolled back": 2}
        for queue in (*replicas, trainer):
            queue._port.connection.close()


def test_a_step_with_lost_rows_is_filled_again(tmp_path: Path) -> None:
    # given a full step, leased, of rows of two writers
    bench = Bench(tmp_path / "journal")
    one, two = bench.join("one"), bench.join("two")
    task = TaskSpec(name="train", needs=("x",), batch_rows=4)
    bench.send(one, one.call(cmd.Declare(task=task)))
    for writer in (one, two, one, two):
        bench.send(writer, bench.put(writer, {"x": np.arange(2.0)}, group_size=1))
    bench.send(one, lease := one.call(cmd.Lease(task="train", count=1)))
    bench.settle()
    token = one.answers[lease].reply.token  # type: ignore[union-attr]
    # when the memory of one is lost
    kill(bench.server)
    for file in bench.server.rows.glob(f"s{two.number}-*"):
        file.unlink()
    bench.server = make(bench.path, bench.now)
    # then what is left is leased as the same step
    assert bench.server.recovered is not None
    assert bench.server.recovered.lost == 4
    bench.send(one, late := one.call(cmd.Complete(token=token, columns={})))
    bench.send(one, lease := one.call(cmd.Lease(task="train", count=1)))
    bench.server._wire._flush()
    heard = {seq: answer for _, seq, answer in bench.tape.heard}
    assert heard[late].error is not None
    assert heard[late].error[0] == LeaseLost.__name__  # type: ignore[index]
    step: Any = heard[lease].reply
    assert (step.step, cmd.unpack_ids(step.ids).tolist()) == (0, [0, 1, 4, 5])
    assert np.frombuffer(step.ids, "<i8").tolist() == [0, 1, 4, 5]
    bench.close()


TRANSIENT = {
    "wire": {
        "_admission", "_calls", "_for_good", "_handler", "_hold", "_listening", "_next_sweep", "_outbox", "_poller", "_processes",
        "_stopping", "_thread", "_uploads", "_wake_in", "_wake_out", "_waking", "addresses", "garbage", "max_bytes",
    },
    "server": {
        "_clock", "_deferred", "_files", "_gauges", "_keeping", "_kept", "_mapper", "_measuring", "_next_status", "_on_event",
        "_on_final", "_on_step", "_places", "_reader", "_remote", "_replaying", "_schemas", "_wire", "addresses",
        "directory", "durability", "here", "ledger", "recovered", "rows",
    },
}  # fmt: skip


def test_everything_a_server_knows_is_carried_or_is_known_to_be_made_anew() -> None:
    """A new attribute of these classes goes into their KEPT, or, if a server that comes back makes it anew, here."""
    server = make(None, 0.0)
    assert set(vars(server)) == TRANSIENT["server"] | set(server.KEPT)
    assert set(vars(server._wire)) == TRANSIENT["wire"] | set(server._wire.KEPT)
    for part in (server.ledger, server._files, server._gauges):
        assert set(vars(part)) >= set(part.TRANSIENT)
    # and a server that holds something of each is the same when read again
    state = recovery.state_of(server)
    assert snapshot.encode(snapshot.decode(snapshot.encode(state))) == snapshot.encode(state)
    server._wire.stop()
    server.directory.close()


def test_nothing_is_acknowledged_that_the_disk_did_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a server, and two clients
    path = tmp_path / "journal"
    told: list[Any] = []
    with served(path, durability="process", on_event=told.append) as server:
        one, two = (open_queue(Connection(server.addresses[1], name)) for name in ("one", "two"))
        failing = True
        write = os.pwrite

        def unwilling(*arguments: Any) -> int:
            if failing:
                raise OSError(errno.EIO, "Input/output error")
            return write(*arguments)

        monkeypatch.setattr(journal.os, "pwrite", unwilling)
        # when the disk fails at a put that was carried out already
        put: list[Any] = []
        waiting = threading.Thread(target=lambda: put.append(one.put({"x": [1.0]})))
        waiting.start()
        until(lambda: any("cannot be written" in getattr(event, "text", "") for event in told), "word of it")
        # then that one waits, further ones may not begin, and who only looks is answered
        with pytest.raises(
            DeadlineExceeded, match=r"cannot take this request: Input/output error\. Nothing was stored"
        ):
            two.put({"x": [2.0]}, timeout_s=0.0)
        assert two.audit().put == 1
        # and when it works again, all goes on
        failing = False
        waiting.join(30)
        assert put[0].first == 0
        assert two.put({"x": [3.0]}).first == 1
        assert any("can be written again" in getattr(event, "text", "") for event in told)
        monkeypatch.undo()
        for queue in (one, two):
            queue._port.connection.close()


def test_only_its_owner_may_read_what_a_journal_holds(tmp_path: Path) -> None:
    with served(tmp_path / "journal", durability="process") as server:
        files = [path for path in (tmp_path / "journal").iterdir() if path.is_file()]
        assert {path.stat().st_mode & 0o077 for path in files} == {0}
        assert any(path.name.startswith("snapshot-") for path in files)
        assert server.recovered is None
