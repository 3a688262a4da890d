"""Rows that were promised can be read however late: also when their writer has left or died, and its memory is gone."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from queue_runs import ClientProcess, Served, running, values_of
from waiting import until

from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.types import Batch

ROWS = [2, 3000]
"""Blocks that are copied, and blocks that are viewed."""


@pytest.fixture
def steps() -> list[Callable[[], Batch]]:
    """What reads each step that was acknowledged."""
    return []


@pytest.fixture
def run(steps: list[Callable[[], Batch]]) -> Iterator[Served]:
    with running(on_step=lambda step, read: steps.append(read)) as run:
        yield run


def train(run: Served, rows: int) -> TransferQueue:
    queue = run.queue()
    queue.declare("train", needs=["x"], batch_rows=rows)
    return queue


def segments(run: Served, session: int | str = "*") -> list[Path]:
    return list(run.memory.glob(f"s{session}-*"))


def descriptors_under(folder: Path) -> int:
    """How many descriptors of this process are of files of this folder, also of removed ones."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith(str(folder))
        except FileNotFoundError:  # closed since
            continue
    return found


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_a_step_is_read_after_every_writer_of_its_rows_has_left(
    run: Served, steps: list[Callable[[], Batch]], rows: int, parts: int
) -> None:
    # given acknowledged steps that nobody has read, whose writers leave one after another
    queue = train(run, rows)
    for step in range(4):
        writer = run.client("writer")
        for part in np.split(np.arange(float(rows)) + step, [rows // 2] if parts == 2 else []):
            writer.queue.put({"x": part})
        queue.get("train").ack()
        writer.close()
        until(lambda: not segments(run, writer.session), "the end of its memory")  # noqa: B023
    assert segments(run) == []
    # when they are read, in any order
    for step in (3, 0, 2, 1):
        # then
        assert steps[step]()["x"].tolist() == (np.arange(float(rows)) + step).tolist()


@pytest.mark.parametrize("rows", ROWS)
def test_a_step_is_read_after_the_writer_of_its_rows_was_killed(
    run: Served, steps: list[Callable[[], Batch]], rows: int
) -> None:
    queue = train(run, rows)
    for _ in range(2):
        with ClientProcess(run.address) as child:
            child(f'queue.put({{"x": values_of(0, {rows})}}).count')
            queue.get("train").ack()
            child.kill()
        until(lambda: segments(run) == [], "the end of its memory")
    assert [read()["x"].tolist() for read in steps] == 2 * [values_of(0, rows).tolist()]


def test_steps_that_nobody_reads_keep_few_descriptors_open(run: Served, steps: list[Callable[[], Batch]]) -> None:
    queue = train(run, 2)
    most = 0
    for step in range(60):
        queue.put({"x": np.arange(2.0) + step})
        queue.get("train").ack()
        most = max(most, descriptors_under(run.memory))
    assert 0 < most < 40
    assert [read()["x"].tolist() for read in steps] == [[step, step + 1] for step in range(60)]


def test_a_step_whose_rows_cannot_be_read_says_why(run: Served, steps: list[Callable[[], Batch]]) -> None:
    queue = train(run, 2)
    queue.put({"x": np.arange(2.0)})
    batch = queue.get("train")
    (segment,) = segments(run)
    segment.unlink()
    batch.ack()
    with pytest.raises(Exception, match=f"segment {segment.name} is gone"):
        steps[0]()


def test_a_tensor_is_made_of_a_batch_whose_run_is_over() -> None:
    pytest.importorskip("torch")
    with running() as run:
        queue, writer = run.queue(), run.client("writer")
        queue.declare("work", needs=["x"])
        writer.queue.put({"x": np.arange(9000.0)})
        batch = queue.get("work", 9000)
        batch.ack()
        writer.close()
        until(lambda: not segments(run, writer.session), "the end of its memory")
        assert batch.torch("x").tolist() == list(range(9000))
    tensor = batch.torch("x")
    tensor += 1
    assert tensor.tolist() == list(range(1, 9001))
    assert batch["x"].tolist() == list(range(9000))
