"""StreamDataLoader: what a training loop takes for a data loader, with a queue's guarantees behind it."""

import multiprocessing
import threading
from typing import Any

import numpy as np
import pytest
import torch
from queue_runs import Served, in_threads, runs_over
from torch.utils.data import DataLoader
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TransferQueue

run = runs_over("ipc")


@pytest.fixture
def queue(run: Served) -> TransferQueue:
    """Ten rows, put one at a time, and the end."""
    queue = run.queue()
    queue.declare("train", needs=["x", "ids", "text"], lease_s=30.0)
    for i in range(10):
        queue.put({"x": np.array([i * 1.0]), "ids": [np.arange(i % 3)], "text": [f"row {i}"]})
    queue.end()
    return queue


@pytest.fixture(params=[0, 1], ids=["plain", "prefetch"])
def prefetch(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def consumed(queue: TransferQueue) -> int:
    audit = queue.audit()
    assert audit.balanced
    return audit.consumed


def test_batches_are_tensors_and_the_loop_ends_with_the_stream(queue: TransferQueue, prefetch: int) -> None:
    # given
    loader: Any = af.StreamDataLoader(queue, "train", ["x", "ids"], 4, prefetch=prefetch)
    # when
    batches = list(loader)
    # then
    assert [set(batch) for batch in batches] == [{"x", "ids"}] * 3
    assert torch.cat([batch["x"] for batch in batches]).tolist() == list(range(10))
    values, seqlens = batches[0]["ids"]
    assert (values.tolist(), seqlens.tolist()) == ([0, 0, 1], [0, 0, 1, 3, 3])
    assert (consumed(queue), loader.lease) == (10, None)
    assert list(loader) == []  # and stays over


def test_asking_for_the_next_acknowledges_the_last(queue: TransferQueue, prefetch: int) -> None:
    batches = iter(af.StreamDataLoader(queue, "train", ["x"], 3, prefetch=prefetch))
    for done in (0, 3, 6):
        assert next(batches)["x"].tolist() == [done, done + 1, done + 2]
        assert consumed(queue) == done
    assert len(next(batches)["x"]) == 1
    assert next(batches, None) is None
    assert consumed(queue) == 10


def test_a_loop_left_early_gives_back_what_it_had_not_finished(queue: TransferQueue, prefetch: int) -> None:
    # given
    loader = af.StreamDataLoader(queue, "train", ["x"], 3, prefetch=prefetch)
    # when
    for batch in loader:
        if 3.0 in batch["x"]:
            break
    # then
    assert consumed(queue) == 3
    assert queue.status().lease_count == 0
    # and the next loop goes on, with nothing twice and nothing left out
    rest = [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(rest) == [3, 4, 5, 6, 7, 8, 9]
    assert consumed(queue) == 10


def test_a_batch_may_be_acknowledged_before_the_loop_is_left(queue: TransferQueue, prefetch: int) -> None:
    loader = af.StreamDataLoader(queue, "train", ["x"], 3, prefetch=prefetch)
    for _ in loader:
        loader.ack()
        loader.ack()
        break
    assert consumed(queue) == 3
    assert sum(len(batch["x"]) for batch in loader) == 7


def test_one_batch_is_leased_ahead_and_waits_in_the_background(run: Served) -> None:
    # given fewer rows than two batches
    queue = run.queue()
    queue.declare("train", needs=["x"])
    queue.put({"x": np.arange(5.0)})
    batches = iter(af.StreamDataLoader(queue, "train", count=3, prefetch=1))
    # when
    first = next(batches)
    # then the next is leased while this one is worked on
    assert first["x"].tolist() == [0, 1, 2]
    until(lambda: queue.status().lease_count == 2, "the batch ahead")
    assert next(batches)["x"].tolist() == [3, 4]
    # and then one is waited for, until the loop is left
    until(lambda: queue.status().parked, "the request ahead")
    batches.close()  # type: ignore[attr-defined]
    until(lambda: not queue.status().parked, "its end")
    assert (queue.status().lease_count, consumed(queue)) == (0, 3)
    assert queue.get("train", 5).array("x").tolist() == [3, 4]
    assert not [thread for thread in threading.enumerate() if thread.name == "asyncflow-ahead"]


def test_a_batch_that_waited_ahead_for_too_long_is_left_to_others(run: Served) -> None:
    # given a slow step
    queue, other = run.queue(), run.queue("other")
    queue.declare("train", needs=["x"], lease_s=60.0, max_attempts=10)
    queue.put({"x": np.arange(6.0)})
    loader: Any = af.StreamDataLoader(queue, "train", count=2, prefetch=1)
    batches = iter(loader)
    first = next(batches)["x"].tolist()
    until(lambda: queue.status().lease_count == 2, "the batch ahead")
    loader.ack()
    run.pass_time(61.0)
    until(lambda: queue.status().lease_count == 0, "the end of its lease")
    # when another takes it meanwhile
    taken = other.get("train", 2)
    seen = taken.array("x").tolist()
    taken.ack()
    # then the loop goes on with what is left
    queue.end()
    seen += [x for batch in batches for x in batch["x"].tolist()]
    assert sorted(first + seen) == [0, 1, 2, 3, 4, 5]
    assert consumed(queue) == 6


def test_a_step_longer_than_its_lease_is_told_so(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.declare("train", needs=["x"], lease_s=0.1, max_attempts=10)
    queue.put({"x": [1.0]})
    batches = iter(af.StreamDataLoader(queue, "train", prefetch=prefetch))
    next(batches)
    until(lambda: queue.status().lease_count == 0, "the end of its lease")
    with pytest.raises(af.LeaseLost, match="is not held by test: completed, expired"):
        next(batches)
    assert consumed(queue) == 0


def test_rows_that_collate_fails_on_are_blamed_and_others_go_on(run: Served, prefetch: int) -> None:
    # given
    queue = run.queue()
    queue.declare("train", needs=["x"], max_attempts=2)
    queue.put({"x": [1.0, 2.0, 3.0]})
    queue.end()

    def collate(batch: Any) -> float:
        return 1.0 / (2.0 - float(batch.array("x")[0]))

    loader = af.StreamDataLoader(queue, "train", collate=collate, prefetch=prefetch)
    # when
    seen, failures = [], 0
    while True:
        try:
            seen += list(loader)
            break
        except ZeroDivisionError:
            failures += 1
    # then
    assert failures == 2
    audit = queue.audit()
    assert audit.balanced
    assert audit.failed == 1
    assert "ZeroDivisionError" in str(audit.reasons)
    assert audit.consumed == 2 == audit.put - audit.failed


def test_columns_that_are_not_named_are_not_even_located(queue: TransferQueue) -> None:
    loader: Any = af.StreamDataLoader(queue, "train", ["text"], 10, collate=lambda batch: batch)
    for batch in loader:
        assert list(batch.columns) == ["text"]
        assert batch.texts("text") == [f"row {i}" for i in range(10)]
    assert consumed(queue) == 10


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        (["x", "y"], "task 'train' is not declared to need column 'y'; it needs: 'x', 'ids', 'text'"),
        ("x", r"'x' is one text: write \['x'\]"),
    ],
)
def test_columns_that_the_task_does_not_need(queue: TransferQueue, columns: Any, error: str) -> None:
    with pytest.raises(af.SchemaError, match=error):
        next(iter(af.StreamDataLoader(queue, "train", columns)))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"rank": 2, "world_size": 2}, "rank 2 of 2"), ({"rank": -1}, "rank -1 of 1"), ({"prefetch": 2}, "not 2")],
)
def test_what_cannot_work_is_refused_at_once(queue: TransferQueue, wrong: Any, error: str) -> None:
    with pytest.raises(af.ConfigError, match=error):
        af.StreamDataLoader(queue, "train", **wrong)


def test_whole_steps_of_a_task_that_makes_them(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.configure(steps=3)
    queue.declare("train", needs=["x"], batch_rows=4)
    queue.put({"x": np.arange(12.0)})
    loader = af.StreamDataLoader(queue, "train", prefetch=prefetch)
    steps = []
    for batch in loader:
        assert loader.lease is not None
        steps.append((loader.lease.index, batch["x"].tolist()))
    assert steps == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, 9, 10, 11])]
    assert consumed(queue) == 12


def test_the_lease_is_there_for_stages_that_write(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.declare("score", needs=["x"], gives=["y"])
    queue.declare("end", needs=["y"])
    queue.put({"x": np.arange(5.0)})
    queue.end()
    loader: Any = af.StreamDataLoader(queue, "score", count=2, prefetch=prefetch)
    for batch in loader:
        loader.lease.complete({"y": batch["x"] * 2})
    assert queue.get("end", 5).array("y").tolist() == [0, 2, 4, 6, 8]


def test_a_deadline_says_what_is_missing(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.declare("train", needs=["x", "reward"])
    queue.put({"x": [1.0]})
    with pytest.raises(af.DeadlineExceeded, match="no task gives column 'reward'"):
        next(iter(af.StreamDataLoader(queue, "train", timeout_s=0.05, prefetch=prefetch)))


def test_a_deadline_counts_only_while_somebody_waits(run: Served) -> None:
    # given a request ahead that nobody waits for yet
    queue = run.queue()
    queue.declare("train", needs=["x"])
    queue.put({"x": [1.0]})
    batches = iter(af.StreamDataLoader(queue, "train", timeout_s=60.0, prefetch=1))
    next(batches)
    until(lambda: queue.status().parked, "the request ahead")
    # when its deadline is long over
    run.pass_time(61.0)
    until(lambda: not queue.status().parked, "its deadline")
    queue.put({"x": [2.0]})
    # then
    assert next(batches)["x"].tolist() == [2.0]


# ---- ranks


def train_as(run: Served, rank: int, prefetch: int, **options: Any) -> list[list[float]]:
    """The batches that one of two ranks sees."""
    loader = af.StreamDataLoader(
        run.queue(f"rank-{rank}"), "train", ["x"], rank=rank, world_size=2, prefetch=prefetch, **options
    )  # fmt: skip
    return [batch["x"].tolist() for batch in loader]


def test_ranks_get_shards_of_the_same_steps(run: Served, prefetch: int) -> None:
    # given three steps
    queue = run.queue()
    queue.configure(steps=3)
    queue.declare("train", needs=["x"], batch_rows=8)
    queue.put({"x": np.arange(24.0)})
    # when
    first, second = in_threads(2, lambda rank: train_as(run, rank, prefetch))
    # then
    assert [sorted(a + b) for a, b in zip(first, second, strict=True)] == [
        list(range(0, 8)), list(range(8, 16)), list(range(16, 24)),
    ]  # fmt: skip
    assert {len(shard) for shard in first + second} == {4}
    assert consumed(queue) == 24


def test_count_is_what_one_rank_gets(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.declare("train", needs=["x"])
    queue.put({"x": np.arange(15.0)})
    queue.end()
    first, second = in_threads(2, lambda rank: train_as(run, rank, prefetch, count=3))
    assert sorted(x for batch in first + second for x in batch) == list(range(15))
    assert [len(a) + len(b) for a, b in zip(first, second, strict=True)] == [6, 6, 3]
    assert consumed(queue) == 15


def test_ranks_that_need_the_same_rows_share_a_shard(run: Served, prefetch: int) -> None:
    queue = run.queue()
    queue.declare("train", needs=["x"])
    queue.put({"x": np.arange(6.0)})
    queue.end()
    first, second = in_threads(2, lambda rank: train_as(run, rank, prefetch, count=2, shards=1))
    assert first == second
    assert sorted(x for batch in first for x in batch) == list(range(6))
    assert consumed(queue) == 6


def test_a_rank_that_is_lost_is_started_again_and_each_step_is_trained_once_by_all(
    run: Served, prefetch: int
) -> None:
    # given two ranks in their first step
    queue = run.queue()
    queue.configure(steps=2)
    queue.declare("train", needs=["x"], batch_rows=4)
    queue.put({"x": np.arange(8.0)})
    lost = run.client("rank-1")
    batches = [iter(loader(queue, 0, prefetch)), iter(loader(lost.queue, 1, prefetch))]
    assert sorted(x for batch in in_threads(2, lambda rank: next(batches[rank])) for x in batch) == [0, 1, 2, 3]
    # when one is lost
    run.run.evict(lost.session)
    with pytest.raises(af.LeaseLost):
        next(batches[0])
    assert consumed(queue) == 0
    # then the step comes again, whole, to all
    again = in_threads(2, lambda rank: list(loader(run.queue(f"again-{rank}"), rank, prefetch)))
    assert [sorted(a + b) for a, b in zip(*again, strict=True)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert consumed(queue) == 8


def loader(queue: TransferQueue, rank: int, prefetch: int) -> Any:
    """The values of one of two ranks."""
    return af.StreamDataLoader(
        queue, "train", ["x"], rank=rank, world_size=2, prefetch=prefetch,
        collate=lambda batch: batch.array("x").tolist(),
    )  # fmt: skip


# ---- beside torch's own


def test_torchs_data_loader_takes_it(queue: TransferQueue, prefetch: int) -> None:
    # given
    loader = af.StreamDataLoader(queue, "train", ["x", "text"], 4, prefetch=prefetch)
    outer = DataLoader(loader, batch_size=None)
    # when / then
    seen = 0
    for batch in outer:
        assert batch["x"].tolist() == list(range(seen, seen + len(batch["x"])))
        assert batch["text"] == [f"row {i}" for i in range(seen, seen + len(batch["x"]))]
        assert consumed(queue) == seen
        seen += len(batch["x"])
    assert (seen, consumed(queue)) == (10, 10)
    for what in (loader, outer):
        with pytest.raises(TypeError):
            len(what)


def test_a_loader_cannot_be_sent_to_a_worker_process(queue: TransferQueue) -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process.*num_workers=0"):
        multiprocessing.get_context("spawn").Process(target=len, args=(af.StreamDataLoader(queue, "train"),)).start()


def test_tensors_outlive_their_rows(run: Served, prefetch: int) -> None:
    # given tensors that somebody keeps, and writes into
    queue = run.queue()
    queue.declare("train", needs=["x"])
    kept = []
    for i in range(20):
        queue.put({"x": np.full(1000, float(i))})
    queue.end()
    for batch in af.StreamDataLoader(queue, "train", count=1000, prefetch=prefetch):
        batch["x"].add_(100)
        kept.append(batch["x"])
    # when the memory is wanted again
    other = run.queue()
    assert other.audit().live == 0
    # then
    assert [tensor.unique().tolist() for tensor in kept] == [[100.0 + i] for i in range(20)]
