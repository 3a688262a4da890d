"""A full disk refuses new rows and says what to free; what is there goes on, and a server that was killed comes back."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_runs import Durable
from small_disk import SmallDisk, small_disk

import asyncflow_sdk as af
from asyncflow_sdk.errors import MemoryFull, SchemaError
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.ledger import commands as cmd

pytestmark = pytest.mark.usefixtures("soon")
KEY = "k" * 300_000  # a put with a key so long takes as much of the journal


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 40) as disk:
        yield disk


def declare(queue: TransferQueue) -> None:
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])


def put_until_the_disk_is_full(queue: TransferQueue) -> tuple[int, str]:
    """How many rows were put, and why the next one is refused."""
    for number in range(1000):
        try:
            assert put(queue, number).count == 1
        except MemoryFull as full:
            return number, str(full)
    raise AssertionError("the disk is never full")


def put(queue: TransferQueue, number: int) -> Any:
    return queue.put({"x": [float(number)]}, key=f"{number}{KEY}", timeout_s=120.0)


def use_up_the_journal(queue: TransferQueue) -> None:
    """Leave only what is reserved for records without a request."""
    for nbytes in (300_000, 3_000, 1):
        with contextlib.suppress(MemoryFull):
            while True:
                with pytest.raises(SchemaError, match=r"no put with key 'k{1,200}' is remembered"):
                    queue.cancel(key=nbytes * "k", reason="")


def test_a_put_without_room_in_the_journal_is_refused_while_all_else_goes_on(disk: SmallDisk) -> None:
    with Durable(disk.path / "run") as run, run.client() as client, run.client("other") as other:
        declare(client.queue)
        disk.fill()
        # when the journal's disk is full
        count, why = put_until_the_disk_is_full(client.queue)
        # then the put is told at once what to free
        assert "has no room for this request: No space left on device. Nothing was stored; free space there" in why
        # and rows that are there are worked on
        batch = other.queue.get("work", 4)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 4).ack()
        assert other.queue.audit().consumed == 4
        # and when there is room, the same put is carried out, once
        disk.free()
        assert put(client.queue, count).count == 1
        assert other.queue.audit().put == count + 1
        # and another server finds the same
        found = run.again()
        assert (found["rows"], found["differing"]) == (count - 3, 0)


def test_rows_of_one_who_meets_a_full_disk_lose_no_attempt(disk: SmallDisk) -> None:
    with Durable(disk.path / "run") as run, run.client() as client, run.client("other") as other:
        client.queue.declare("work", needs=["x"], gives=["y"], max_attempts=1)
        client.queue.put({"x": np.arange(3.0)})
        disk.fill()
        # when a put is refused inside the block that holds other rows, then these go back as they were
        with pytest.raises(MemoryFull), other.queue.get("work", 3):
            all(put(other.queue, number) for number in range(1000))
        batch = other.queue.get("work", 3)
        assert batch.ids.tolist() == [0, 1, 2]
        # and when not even a completion finds room, their holder can renew them, and give them back
        use_up_the_journal(other.queue)
        with pytest.raises(MemoryFull):
            batch.complete({"y": batch.array("x")})
        batch.renew()
        # and one that renews for ever uses up neither the driver's room to dismiss others, nor its own to leave
        with pytest.raises(MemoryFull):
            all(batch.renew() is None for _ in range(50_000))
        assert client.queue.send(cmd.Dismiss(name="nobody")).count == 0
        other.close()
        assert "other" not in {session.name for session in client.queue.status().sessions}
        assert client.queue.audit().failed == 0
        disk.free()
        assert client.queue.get("work", 3).ids.tolist() == [0, 1, 2]


def test_a_checkpoint_does_not_wait_for_room_and_its_trainer_goes_on(disk: SmallDisk, tmp_path: Path) -> None:
    with Durable(disk.path / "run", checkpoints=True) as run, run.client() as client, run.client("other") as other:
        client.queue.declare("train", needs=["x"], batch_rows=1)
        disk.fill()
        put_until_the_disk_is_full(client.queue)
        # when what is reserved for work on existing rows is used up, too; the disk of checkpoints has room
        use_up_the_journal(other.queue)

        def checkpoint() -> Path:
            return other.checkpoint(Path.touch, directory=tmp_path / "checkpoints")

        with pytest.raises(MemoryFull, match="the journal .* has no room for this request: No space left"):
            all(checkpoint() for _ in range(100))  # with what is left of it
        # then another one is made and found once there is room
        disk.free()
        checkpoint()
        assert other.resume(directory=tmp_path / "checkpoints").path is not None


def test_a_run_that_was_killed_on_a_full_disk_is_served_again_once_there_is_room(disk: SmallDisk) -> None:
    # given a run of which nothing more can be recorded but what is in progress
    with Durable(disk.path / "run") as run, run.client() as client, run.client("other") as other:
        declare(client.queue)
        with run.client("third") as third:
            third.queue.put({"x": np.arange(10.0)}, key="third")
            rows = f"s{third.session}-*"
        disk.fill()
        last, _ = put_until_the_disk_is_full(client.queue)
        # when it is killed, with its disk as full as before, and some of its shared memory is lost
        run.kill()
        (lost_rows,) = run.memory.glob(rows)
        lost_rows.unlink()
        # then it is not served, and all that it had recorded stays
        for _ in range(2):
            with pytest.raises(MemoryFull, match="no room to begin .*No space left on device"):
                af.serve(run.directory)
        # and where there is room again, it goes on, and the put is carried out, once
        disk.free()
        found = run.start()
        assert (found["lost"], found["differing"]) == (10, 0)
        assert put(client.queue, last).count == 1
        batch = other.queue.get("work", 3)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 3).ack()
        audit = other.queue.audit()
        assert (audit.consumed, audit.failed, audit.put) == (3, 10, last + 11)
        assert audit.balanced


@pytest.mark.parametrize("shared_memory", [True, False], ids=["near", "far"])
def test_a_put_without_room_for_its_rows_is_refused(disk: SmallDisk, shared_memory: bool) -> None:
    with (
        Durable(disk.path / "run", durability="host") as run,
        run.client(shared_memory=shared_memory) as client,
        run.client("other") as other,
    ):
        declare(client.queue)
        disk.fill()
        values = np.arange(1 << 18).reshape(64, -1) * 1.0  # 2 MiB: a segment of its own
        with pytest.raises(MemoryFull, match=r"no room for .* more bytes in .*: No space left"):
            client.queue.put({"x": values}, timeout_s=120.0)
        assert other.queue.audit().put == 0
        disk.free()
        assert client.queue.put({"x": values}).count == 64
        assert other.queue.get("work", 64).array("x").tobytes() == values.tobytes()


def test_where_no_row_was_ever_put_a_full_disk_is_an_error(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises((MemoryFull, af.ConfigError), match="No space left"):
        af.serve(disk.path / "run", durability="process")


def test_a_disk_without_files_left_refuses_the_next_server(tmp_path: Path) -> None:
    # given a killed run on a disk with room, but for no file more
    with small_disk(tmp_path / "disk", 40, inodes=60) as disk, Durable(disk.path / "run") as run:
        run.kill()
        others = map(disk.path.joinpath, map(str, range(60)))
        with contextlib.suppress(OSError):
            for path in others:
                path.touch()
        # when, then
        with pytest.raises(MemoryFull, match="no room to begin .*the old files count: .*No space left on device"):
            af.serve(run.directory)
        for path in disk.path.glob("[0-9]*"):
            path.unlink()
        assert run.start()["differing"] == 0
