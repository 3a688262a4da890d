"""Nothing that lies in shared memory can break a reader: damaged rows are an error, and those beside them are read."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Child, say
from queue_runs import Served, memory_of, running

import asyncflow_sdk as af
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import TransferQueue
from asyncflow_sdk.queue.block_index import BlockIndex
from asyncflow_sdk.types.blocks import Block

ROWS = 3
VALUES: dict[str, Any] = {"x": np.arange(3.0), "r": [np.arange(3), np.arange(1), np.arange(1)]}
"""Their block as int64: the arena's two words, rows, columns, bytes, and of each column where its values lie, how many bytes
they are, and where its offsets lie. Those of r come last."""


def words_of(path: Path) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """A file as int64, to be written into."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)


@pytest.fixture(scope="module")
def run() -> Iterator[Served]:
    with running() as run:
        yield run


@pytest.fixture(scope="module")
def queue(run: Served) -> TransferQueue:
    """Two blocks of three rows, and many values behind, so that much could be read."""
    queue = run.queue()
    queue.declare("read", needs=["x", "r"], max_attempts=1000)
    for _ in range(2):
        queue.put(VALUES)
    queue.put({"x": np.full(1000, float(1 << 40))}, partition="behind")
    return queue


def read_and_give_back(queue: TransferQueue, count: int) -> None:
    """Without blame, after which rows come alone."""
    with queue.get("read", count) as batch:
        try:
            batch.ragged("r")
        finally:
            batch.give_back()


def expect_damage(queue: TransferQueue, words: Any, at: int, value: int) -> None:
    """Put a value into a word of the first block: its rows cannot be read, alone or with others. Then undo it."""
    good = words[at]
    words[at] = value
    try:
        for count in (ROWS, 2 * ROWS):
            with pytest.raises(SchemaError, match="damaged|offsets"):
                read_and_give_back(queue, count)
    finally:
        words[at] = good
    with queue.get("read", 2 * ROWS) as batch:
        rows = batch.ids.tolist()
        assert batch.array("x").tolist() == [float(row % ROWS) for row in rows]
        assert [len(row) for row in batch.ragged("r")] == [(3, 1, 1)[row % ROWS] for row in rows]
        batch.give_back()


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (2, [5, -1]), (3, [0, 1 << 60]), (4, [64, 1 << 62]),  # rows, columns, bytes
        (5, [0, 65, -64, 1 << 62]), (6, [-8, 1 << 62, 8]), (7, [64, 1 << 62]),  # of x
        (8, [0, 65, 1 << 62]), (9, [-8, 1 << 62, 1 << 20, 8]),  # values of r
        (10, [-1, 64, 1 << 62, 1 << 10, -(1 << 63), 193]),  # offsets of r
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_is_a_clear_error(
    run: Served, queue: TransferQueue, at: int, values: list[int]
) -> None:
    (segment,) = run.memory.glob("s*")
    for value in values:
        expect_damage(queue, words_of(segment), at, value)


@pytest.mark.parametrize(
    ("at", "offset"), [(0, -8), (0, 4), (1, 9), (2, 1), (3, 6), (3, 1 << 40), (3, 1 << 62), (1, -(1 << 62))]
)
def test_offsets_that_do_not_fit_are_a_clear_error(run: Served, queue: TransferQueue, at: int, offset: int) -> None:
    (segment,) = run.memory.glob("s*")
    words = words_of(segment)
    offsets = int(words[10]) // 8
    assert words[offsets : offsets + 4].tolist() == [0, 3, 4, 5]
    expect_damage(queue, words, offsets + at, offset)


def read_damaged(seed: int, times: int) -> None:
    """Read blocks after bytes of them were changed, here and through the server; look at every byte that comes."""
    numbers = np.random.default_rng(seed)
    values = {
        "x": np.arange(40.0).reshape(4, 10), "r": [np.arange(n, dtype=np.int32) for n in (3, 0, 700, 5)],
        "t": ["a", "", "ccc", "dd"], "z": np.empty((4, 0)),
    }  # fmt: skip
    outcome: dict[str, Any] = {"read": 0, "refused": 0, "strange": []}
    with af.serve() as run, af.connect(run.address, shared_memory=False) as far:
        run.queue.declare("read", needs=list(values), max_attempts=10**6)
        for _ in range(10):
            run.queue.put(values)
        (segment,) = memory_of(run.addresses).glob("s*")
        size = run.queue.status().payload_bytes // 8
        words = words_of(segment)[:size]
        good = words.copy()
        for _ in range(times):
            # given
            words[:] = good
            for _ in range(int(numbers.integers(1, 4))):
                at = int(numbers.integers(2, 20 if numbers.random() < 0.7 else size // 10))
                at += int(numbers.integers(10)) * (size // 10)
                words[at] = numbers.choice([-1, 0, 1, 63, 64, 8 * size, 1 << 31, 1 << 62, -(1 << 63), words[at] ^ 64])
            # when
            queue = run.queue if numbers.random() < 0.7 else far.queue
            try:
                with queue.get("read", int(numbers.integers(1, 40)), timeout_s=5) as batch:
                    for name in values:
                        np.asarray(getattr(batch[name], "values", batch[name])).tobytes()
            except af.AsyncFlowError:
                outcome["refused"] += 1
            except Exception as error:
                outcome["strange"].append(repr(error))
            else:
                outcome["read"] += 1
    say(outcome)


def test_damaged_blocks_never_crash_a_reader() -> None:
    # when a process reads blocks in which bytes were changed at random, headers and offsets above all
    with Child(read_damaged, 0, 600) as child:
        outcome = child.hear()
        assert child.wait() == 0
    # then each time it got values or an error of ours
    assert outcome["strange"] == []
    assert outcome["refused"] > 50
    assert outcome["read"] > 50


def test_a_row_from_before_all_others_gets_a_block_when_none_is_left() -> None:
    # given an index that has moved on to newer rows, which have ended
    index = BlockIndex()
    index.add(np.array([3000]), Block("s1-a", 0, 1, 1, 64, ("x",)), np.array([0]))
    index.retire(np.array([3000]))
    # when an older row, which lost its columns, gets new ones, then they are found
    index.add(np.array([2990]), Block("s1-a", 64, 2, 1, 64, ("x",)), np.array([0]))
    (found,) = index.locate(np.array([2990]), ("x",))
    assert found.segments == ("s1-a",)
