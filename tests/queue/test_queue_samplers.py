"""Samplers over a real queue: their measures are read from payload, of every kind, whenever it was put."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from queue_runs import Served, running

from asyncflow_sdk.errors import ConfigError, DeadlineExceeded, PluginError
from asyncflow_sdk.interfaces import Candidates, Sampler, TransferQueue

LONGEST = ("by_column", {"column": "x"})


@pytest.fixture
def run() -> Iterator[Served]:
    with running(samplers={"moody": Moody}) as run:
        yield run


@pytest.fixture
def queue(run: Served) -> TransferQueue:
    return run.queue()


COLUMNS: dict[str, Any] = {
    "ragged": [np.arange(n, dtype=np.int32) for n in (2, 9, 0, 5)],
    "text": ["ab", "ääää", "", "12345"],
    "bytes": [b"\0\0", b"123456789", b"", b"12345"],
    "int": np.array([2, 9, -3, 5]),
    "bool": np.array([False, True, False, True]),
    "bfloat16": np.array([2, 9, -3, 5], ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_column_of_any_kind_is_measured_whenever_its_task_is_declared(
    queue: TransferQueue, kind: str, when: str
) -> None:
    if when == "after":
        queue.put({"x": COLUMNS[kind], "more": COLUMNS["ragged"]})
    queue.declare("work", needs=["x"], sampler=LONGEST)
    if when == "before":
        queue.put({"x": COLUMNS[kind], "more": COLUMNS["ragged"]})
    assert queue.get("work", 4).ids.tolist() == [1, 3, 0, 2]


def test_what_a_task_writes_is_measured(queue: TransferQueue) -> None:
    queue.declare("make", needs=["p"], gives=["x"])
    queue.declare("work", needs=["x"], sampler=LONGEST)
    queue.put({"p": np.arange(4)})
    with queue.get("make", 4) as batch:
        batch.complete({"x": [np.zeros(n) for n in (1, 8)]}, index=[0, 2])
        batch.complete({"x": [np.zeros(n) for n in (5, 3)]}, index=[1, 3])
    assert queue.get("work", 4).ids.tolist() == [2, 1, 3, 0]


def test_rows_of_many_puts_are_measured_when_a_sampler_comes_late(queue: TransferQueue) -> None:
    lengths = np.random.default_rng(0).permutation(300)
    for part in np.split(lengths, 20):
        queue.put({"x": ["a" * n for n in part]})
    queue.declare("work", needs=["x"], sampler=LONGEST)
    ids = queue.get("work", 300).ids
    assert lengths[ids].tolist() == list(range(299, -1, -1))


def test_an_unknown_sampler_and_unknown_options_are_errors_where_they_are_declared(queue: TransferQueue) -> None:
    with pytest.raises(PluginError, match="no sampler adapter is named 'nope'; installed: .*shuffled"):
        queue.declare("work", needs=["x"], sampler="nope")
    with pytest.raises(
        PluginError, match="no sampler adapter is named 'os:getpid'"
    ):  # nobody has a server import things
        queue.declare("work", needs=["x"], sampler="os:getpid")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'sead'"):
        queue.declare("work", needs=["x"], sampler=("shuffled", {"sead": 1}))
    queue.declare("work", needs=["x"], sampler=("shuffled", {"seed": 1}))
    queue.declare("work", needs=["x"], sampler=("shuffled", {"seed": 1}))
    with pytest.raises(ConfigError, match="already declared"):
        queue.declare("work", needs=["x"], sampler=("shuffled", {"seed": 2}))


class Moody(Sampler):
    fails = True

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        if Moody.fails:
            raise RuntimeError("not today")
        return super().choose(rows, count)


def test_a_sampler_that_raises_fails_one_request_and_the_queue_goes_on(queue: TransferQueue) -> None:
    queue.declare("work", needs=["x"], sampler="moody")
    queue.put({"x": np.arange(3)})
    with pytest.raises(PluginError, match="sampler 'moody' of task 'work' failed: RuntimeError: not today"):
        queue.get("work", 3)
    Moody.fails = False
    with queue.get("work", 3) as batch:
        assert batch.ids.tolist() == [0, 1, 2]
        batch.complete()
    assert queue.audit().consumed == 3


def test_priorities_and_fixed_batches_over_the_wire(queue: TransferQueue) -> None:
    queue.declare("work", needs=["x"])
    queue.put({"x": np.arange(2)})
    queue.put({"x": np.arange(2)}, priority=3)
    with pytest.raises(DeadlineExceeded, match="has 4 of 5 rows"):
        queue.get("work", 5, at_least=5, timeout_s=0)
    assert queue.get("work", 4, at_least=4).ids.tolist() == [2, 3, 0, 1]
