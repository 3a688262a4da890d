"""A full disk is like a full queue: new rows wait up to their deadline and say why, what is there goes on, and a server
that was killed comes back.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from queue_runs import Durable
from small_disk import SmallDisk, small_disk
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, MemoryFull, SchemaError
from asyncflow_sdk.interfaces import TransferQueue

pytestmark = pytest.mark.usefixtures("soon")
KEY = "k" * 300_000  # a put with a key so long takes as much of the journal


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 40) as disk:
        yield disk


def declare(queue: TransferQueue) -> None:
    queue.declare("work", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])


def put_until_one_waits(queue: TransferQueue, looker: TransferQueue) -> tuple[int, Any]:
    """How many rows were put, and the call that waits."""
    for number in range(1000):
        rows = looker.audit().put
        call = in_thread(queue.put, {"x": [float(number)]}, key=f"{number}{KEY}", timeout_s=120.0)
        until(lambda rows=rows: waits(looker) or looker.audit().put > rows, "the put to be answered, or to wait")
        if waits(looker):
            return number, call
        assert call().count == 1
    raise AssertionError("the disk is never full")


def waits(looker: TransferQueue) -> list[str]:
    return [each.why for each in looker.status().parked if each.verb.startswith("put")]


def test_a_put_waits_for_room_in_the_journal_while_all_else_goes_on(disk: SmallDisk) -> None:
    with Durable(disk.path / "run") as run, run.client() as client, run.client("other") as other:
        declare(client.queue)
        disk.fill()
        # when the journal's disk is full
        count, waiting = put_until_one_waits(client.queue, other.queue)
        # then the put is told why, and one that does not wait is told at once
        (why,) = waits(other.queue)
        assert "journal" in why
        assert "No space left on device" in why
        with pytest.raises(
            DeadlineExceeded, match=r"after \d\.\d s: the journal .* has no room for this request: No space left"
        ):
            other.queue.put({"x": [1.0]}, timeout_s=0.0)
        # and one that is given up leaves nothing behind
        asyncio.run(give_up_a_put(other.queue))
        until(lambda: len(waits(other.queue)) == 1, "the server to know that nobody waits")
        # and rows that are there are worked on
        batch = other.queue.get("work", 4)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 4).ack()
        assert other.queue.audit().consumed == 4
        # and when there is room, the put goes on, once
        disk.free()
        assert waiting().count == 1
        assert other.queue.audit().put == count + 1
        # and another server finds the same
        found = run.again()
        assert (found["rows"], found["differing"]) == (count - 3, 0)


def test_a_checkpoint_does_not_wait_for_room_and_its_trainer_goes_on(disk: SmallDisk, tmp_path: Path) -> None:
    with Durable(disk.path / "run", checkpoints=True) as run, run.client() as client, run.client("other") as other:
        client.queue.declare("train", needs=["x"], batch_rows=1)
        disk.fill()
        put_until_one_waits(client.queue, other.queue)
        # when what is reserved for work on existing rows is used up, too; the disk of checkpoints has room
        for nbytes in (300_000, 3_000, 1):
            with contextlib.suppress(MemoryFull):
                while True:
                    with pytest.raises(SchemaError, match=r"no put with key 'k{1,200}' is remembered"):
                        other.queue.cancel(key=nbytes * "k", reason="")

        def checkpoint() -> Path:
            return other.checkpoint(Path.touch, directory=tmp_path / "checkpoints")

        with pytest.raises(MemoryFull, match="the journal .* has no room for this request: No space left"):
            all(checkpoint() for _ in range(100))  # with what is left of it
        # then another one is made and found once there is room
        disk.free()
        checkpoint()
        assert other.resume(directory=tmp_path / "checkpoints").path is not None


async def give_up_a_put(queue: TransferQueue) -> None:
    putting = asyncio.create_task(queue.aio.put({"x": [1.0]}, timeout_s=120.0))
    while len(await asyncio.to_thread(waits, queue)) < 2:
        await asyncio.sleep(0.01)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting


def test_a_run_that_was_killed_on_a_full_disk_is_served_again_and_goes_on(disk: SmallDisk) -> None:
    # given a run of which nothing more can be recorded but what is in progress
    with Durable(disk.path / "run") as run, run.client() as client, run.client("other") as other:
        declare(client.queue)
        with run.client("third") as third:
            third.queue.put({"x": np.arange(10.0)}, key="third")
            rows = f"s{third.session}-*"
        disk.fill()
        last, waiting = put_until_one_waits(client.queue, other.queue)
        count = last - 1 + 10  # the put of ten rows came before
        # when it is killed, with its disk as full as before, and some of its shared memory is lost
        run.kill()
        (lost_rows,) = run.memory.glob(rows)
        lost_rows.unlink()
        found = run.start()
        # then it is served all the same, and says what it cannot do
        assert "No space left on device" in found["full"]
        assert "Existing rows are served; new rows wait until the disk has room" in found["text"]
        assert (found["lost"], found["differing"]) == (10, 0)
        live = found["rows"]
        batch = other.queue.get("work", 3)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 3).ack()
        until(lambda: waits(other.queue), "the put to wait again")
        # and what was done since is known to the next one, on the same disk
        found = run.again()
        assert (found["rows"], found["lost"], found["differing"]) == (live - 3, 0, 0)
        audit = other.queue.audit()
        assert (audit.consumed, audit.failed, audit.put) == (3, 10, count + 1)
        assert audit.balanced
        # and where there is room again, the put that waited through it all is carried out, once
        disk.free()
        assert waiting().count == 1
        assert other.queue.audit().put == count + 2
        found = run.again()
        assert (found["full"], found["differing"]) == ("", 0)
        assert other.queue.audit().put == count + 2


@pytest.mark.parametrize("shared_memory", [True, False], ids=["near", "far"])
def test_a_put_waits_for_room_where_its_rows_lie_on_the_disk(disk: SmallDisk, shared_memory: bool) -> None:
    with (
        Durable(disk.path / "run", durability="host") as run,
        run.client(shared_memory=shared_memory) as client,
        run.client("other") as other,
    ):
        declare(client.queue)
        disk.fill()
        values = np.arange(1 << 18).reshape(64, -1) * 1.0  # 2 MiB: a segment of its own
        with pytest.raises(DeadlineExceeded, match=r"after \d\.\d s: no room for .* more bytes in .*: No space left"):
            client.queue.put({"x": values}, timeout_s=0.0)
        call = in_thread(client.queue.put, {"x": values}, timeout_s=120.0)
        assert other.queue.audit().put == 0
        disk.free()
        assert call().count == 64
        assert other.queue.get("work", 64).array("x").tobytes() == values.tobytes()


def test_where_no_row_was_ever_put_a_full_disk_is_an_error(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises((MemoryFull, af.ConfigError), match="No space left"):
        af.serve(disk.path / "run", durability="process")
