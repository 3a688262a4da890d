"""A full disk is like a full queue: new rows wait up to their deadline and say why, what is there goes on, and a server
that was killed comes back.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child
from full_disk_children import serve
from small_disk import SmallDisk, small_disk
from waiting import in_thread, until

import asyncflow_sdk as af
from asyncflow_sdk.errors import DeadlineExceeded, MemoryFull
from asyncflow_sdk.memory import sweep
from asyncflow_sdk.queue import TransferQueue
from asyncflow_sdk.queue.journal import Asked, Dropped, Gone, Head, Journal, Record, Recorded, Served, Ticked

KEY = "k" * 300_000  # a put with a key so long takes as much of the journal


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 40) as disk:
        yield disk


class OnDisk:
    """A run on a disk, served by a process of its own."""

    def __init__(self, disk: SmallDisk, durability: str = "process") -> None:
        self.path, self.durability = disk.path / "run", durability
        self.said: list[dict[str, Any]] = []
        self.start()
        self.run = af.connect(self.path)
        self.queue = self.run.queue
        self.queue.declare("work", needs=["x"], gives=["y"])
        self.queue.declare("end", needs=["y"])

    def start(self) -> None:
        self.server = Child(serve, str(self.path), self.durability)
        self.said.append(self.server.hear())

    def kill(self) -> None:
        self.server.kill()
        self.server.__exit__()

    def close(self) -> None:
        directory = self.run.queue._port.connection.directory
        self.kill()
        self.run.close()
        shutil.rmtree(self.path)
        sweep(directory.parent)
        assert not directory.exists()


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
    served = OnDisk(disk)
    with af.connect(served.path) as other:
        disk.fill()
        # when the journal's disk is full
        count, waiting = put_until_one_waits(served.queue, other.queue)
        # then it is told why, and a put that does not wait is told at once
        (why,) = waits(other.queue)
        assert "journal" in why
        assert "No space left on device" in why
        with pytest.raises(
            DeadlineExceeded, match=r"after 0\.\d s: the journal .* cannot take this request: No space left"
        ):
            other.queue.put({"x": [1.0]}, timeout_s=0.0)
        # and rows that are there are worked on
        batch = other.queue.get("work", 4)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 4).ack()
        assert other.queue.audit().consumed == 4
        # and when there is room, the put goes on, once
        disk.free()
        assert waiting().count == 1
        assert other.queue.audit().put == count + 1
    served.close()


def test_a_put_that_is_given_up_while_it_waits_leaves_nothing_behind(disk: SmallDisk) -> None:
    served = OnDisk(disk)
    with af.connect(served.path) as other:
        disk.fill()
        count, waiting = put_until_one_waits(served.queue, other.queue)
        arena = other.queue._port.connection.arena

        async def give_up() -> None:
            task = asyncio.create_task(other.queue.aio.put({"x": [1.0]}, timeout_s=120.0))
            while len(waits(served.queue)) < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(give_up())
        until(lambda: len(waits(served.queue)) == 1, "the server to know that nobody waits")
        disk.free()
        assert waiting().count == 1
        # then its row was never put, and its memory is free
        until(lambda: other.queue.flush() or arena.blocks == 0, "its block to be free")
        assert other.queue.audit().put == count + 1
        # and another server finds the same
        served.kill()
        served.start()
        assert (served.said[-1]["rows"], served.said[-1]["differing"]) == (count + 1, 0)
        assert other.queue.audit().put == count + 1
    served.close()


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "with lost payload"])
def test_a_run_that_was_killed_on_a_full_disk_is_served_again_and_goes_on(disk: SmallDisk, lost: bool) -> None:
    # given a run of which nothing more can be recorded but what is in progress
    served = OnDisk(disk)
    with af.connect(served.path) as other:
        with af.connect(served.path) as third:
            third.queue.put({"x": np.arange(10.0)}, key="third")
            rows = f"s{third.queue._port.connection.session}-*"
        disk.fill()
        last, waiting = put_until_one_waits(served.queue, other.queue)
        count = last - 1 + 10  # the put of ten rows came before
        directory = other.queue._port.connection.directory
        # when it is killed, and its disk is as full as before
        served.kill()
        if lost:
            (lost_rows,) = directory.glob(rows)
            lost_rows.unlink()
        served.start()
        # then it is served all the same, and says what it cannot do
        said = served.said[-1]
        assert "No space left on device" in said["full"]
        assert "The rows that are there are served, and new ones wait until there is room" in said["told"]
        assert (said["lost"], said["differing"]) == (10 * lost, 0)
        live = said["rows"]
        batch = other.queue.get("work", 3)
        batch.complete({"y": batch.array("x")})
        other.queue.get("end", 3).ack()
        until(lambda: waits(other.queue), "the put to wait again")
        # and what was done since is known to the next one, on the same disk
        served.kill()
        served.start()
        said = served.said[-1]
        assert (said["rows"], said["lost"], said["differing"]) == (live - 3, 0, 0)
        audit = other.queue.audit()
        assert (audit.consumed, audit.failed, audit.put) == (3, 10 * lost, count + 1)
        assert audit.balanced
        # and where there is room again, the put that waited through it all is carried out, once
        disk.free()
        assert waiting().count == 1
        assert other.queue.audit().put == count + 2
        served.kill()
        served.start()
        assert (served.said[-1]["full"], served.said[-1]["differing"]) == ("", 0)
        assert other.queue.audit().put == count + 2
    served.close()


def test_a_put_waits_for_room_where_its_rows_lie_on_the_disk(disk: SmallDisk) -> None:
    served = OnDisk(disk, "host")
    with af.connect(served.path) as other:
        disk.fill()
        values = np.arange(1 << 18).reshape(64, -1) * 1.0  # 2 MiB: a segment of its own
        with pytest.raises(DeadlineExceeded, match=r"after \d\.\d s: no room for .* more bytes in .*: No space left"):
            served.queue.put({"x": values}, timeout_s=0.0)
        call = in_thread(served.queue.put, {"x": values}, timeout_s=120.0)
        assert other.queue.audit().put == 0
        disk.free()
        assert call().count == 64
    served.close()


def test_a_put_from_afar_waits_for_room_where_its_rows_lie_on_the_disk(disk: SmallDisk) -> None:
    served = OnDisk(disk, "host")
    with af.connect(served.path, shared_memory=False) as far:
        disk.fill()
        values = np.arange(1 << 18).reshape(64, -1) * 1.0
        with pytest.raises(DeadlineExceeded, match=r"after \d\.\d s: no room for .* more bytes in .*: No space left"):
            far.queue.put({"x": values}, timeout_s=0.0)
        call = in_thread(far.queue.put, {"x": values}, timeout_s=120.0)
        assert served.queue.audit().put == 0
        disk.free()
        assert call().count == 64
        batch = served.queue.get("work", 64)
        assert batch.array("x").tobytes() == values.tobytes()
    served.close()


RECORDS: list[Record] = [
    Asked(2.0, "session", 1, 1, 1, b"hello" * 5), Ticked(3.0), Gone(4.0, "session", "its process ended"),
    Dropped(4.5, "session", 7), Served(5.0, b"\0" * 8, "boot", "before"),
]  # fmt: skip


@pytest.mark.parametrize("torn", [0, 1, 40], ids=lambda torn: f"{torn} bytes torn")
def test_a_journal_is_written_on_where_another_left_it(tmp_path: Path, torn: int) -> None:
    written = Journal(tmp_path / "journal", Head(1, "0", "run", "process", "/nowhere", "", "boot", 1.5), sync=False)
    for record in RECORDS[:3]:
        written.append(record)
    written.append(RECORDS[0])
    assert written.commit()
    written.close(keep_room=True)
    if torn:
        whole = written.path.read_bytes()
        cut = len(whole.rstrip(b"\0")) - torn
        written.path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
    recorded = Recorded(written.path)
    there = [entry.record for entry in recorded.entries()]
    torn_bytes = recorded.cut
    recorded.close()

    again = Journal.reopened(recorded, torn_bytes, sync=True)
    for record in RECORDS[3:]:
        again.append(record)
    assert again.commit()
    again.close()

    recorded = Recorded(written.path)
    assert [entry.record for entry in recorded.entries()] == [*there, *RECORDS[3:]]
    assert (recorded.cut, recorded.boot) == (0, "boot")
    recorded.close()


def test_where_no_row_was_ever_put_a_full_disk_is_an_error(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises((MemoryFull, af.ConfigError), match="No space left"):
        af.serve(disk.path / "run", durability="process")
