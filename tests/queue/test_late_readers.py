"""Whoever was promised rows reads them, however late: also when their writer has left or died, and its memory is gone."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from children import Child
from queue_children import produce, values_of
from queue_runs import Run, running
from waiting import until

from asyncflow_sdk.queue import TransferQueue, carrying
from asyncflow_sdk.types import Batch

ROWS = [2, 3000]
"""Blocks that are copied, and blocks that are viewed."""


def train(queue: TransferQueue, rows: int) -> TransferQueue:
    queue.declare("train", needs=["x"], batch_rows=rows)
    return queue


def segments(run: Run) -> list[str]:
    return sorted(path.name for path in run.server.directory.path.glob("s*"))


def descriptors_under(folder: Path) -> int:
    """How many descriptors of this process are of files of this folder, unlinked ones too."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
    return found


def leave(run: Run, writer: TransferQueue) -> None:
    connection = writer._port.connection
    connection.close()
    until(lambda: not list(run.server.directory.path.glob(f"s{connection.session}-*")), "the end of its memory")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_a_step_is_read_after_every_writer_of_its_rows_has_left(rows: int, parts: int) -> None:
    # given acknowledged steps that nobody has read, whose writers leave one after another
    told: list[Callable[[], Batch]] = []
    with running("ipc", on_step=lambda step, read: told.append(read)) as run:
        queue = train(run.queue(), rows)
        for step in range(4):
            writer = run.queue("writer")
            for part in np.split(np.arange(float(rows)) + step, [rows // 2] if parts == 2 else []):
                writer.put({"x": part})
            queue.get("train").ack()
            leave(run, writer)  # the next step's segment is mapped when this one is gone
        assert segments(run) == []
        # when they are read, in any order
        for step in (3, 0, 2, 1):
            # then
            assert told[step]()["x"].tolist() == (np.arange(float(rows)) + step).tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_a_step_is_read_after_the_writer_of_its_rows_was_killed(rows: int) -> None:
    told: list[Callable[[], Batch]] = []
    with running("ipc", on_step=lambda step, read: told.append(read)) as run:
        queue = train(run.queue(), rows)
        for _ in range(2):
            with Child(produce, run.address, rows) as child:
                child.hear()
                queue.get("train").ack()
                child.kill()
            until(lambda: segments(run) == [], "the end of its memory")
        assert [read()["x"].tolist() for read in told] == 2 * [values_of(0, rows).tolist()]


def test_steps_that_nobody_reads_keep_few_descriptors_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "MOST_UNREAD", 4)
    told: list[Callable[[], Batch]] = []
    with running("ipc", on_step=lambda step, read: told.append(read)) as run:
        queue = train(run.queue(), 2)
        most = 0
        for step in range(40):
            queue.put({"x": np.arange(2.0) + step})
            queue.get("train").ack()
            most = max(most, descriptors_under(run.server.directory.path))
        assert 0 < most < 40
        assert [read()["x"].tolist() for read in told] == [[step, step + 1] for step in range(40)]


def test_a_step_whose_rows_cannot_be_read_is_told_with_the_reason() -> None:
    told: list[Callable[[], Batch]] = []
    with running("ipc", on_step=lambda step, read: told.append(read)) as run:
        queue = train(run.queue(), 2)
        queue.put({"x": np.arange(2.0)})
        batch = queue.get("train")
        for path in run.server.directory.path.glob("s*"):
            path.unlink()
        batch.ack()
        (read,) = told
        with pytest.raises(Exception, match="segment s1-1 is gone"):
            read()


def test_a_tensor_is_made_of_a_batch_whose_run_is_over() -> None:
    pytest.importorskip("torch")
    with running("ipc") as run:
        queue, writer = run.queue(), run.queue("writer")
        queue.declare("work", needs=["x"])
        writer.put({"x": np.arange(9000.0)})
        batch = queue.get("work", 9000)
        batch.ack()
        leave(run, writer)
        assert batch.torch("x").tolist() == list(range(9000))
    tensor = batch.torch("x")
    tensor += 1
    assert tensor.tolist() == list(range(1, 9001))
    assert batch["x"].tolist() == list(range(9000))
