"""Teams over a real queue: ranks in threads and processes, one lease for all of them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from queue_runs import ClientProcess, Served, in_threads, running
from waiting import in_thread, until

from asyncflow_sdk.errors import DeadlineExceeded, Ended
from asyncflow_sdk.interfaces import Candidates, Sampler, TransferQueue

SIZE = 4


def prepared(run: Served, steps: int, **more: Any) -> TransferQueue:
    """A training task with ``steps`` steps of 8 rows, all of them there."""
    queue = run.queue("admin")
    queue.declare("train", needs=["x"], batch_rows=8, lease_s=60, **more)
    random = np.random.default_rng(0)
    for _ in range(steps):
        queue.put({"x": [np.arange(n) for n in random.integers(1, 200, 8)]})
    queue.end()
    return queue


def train(queue: TransferQueue, rank: int, **more: Any) -> list[tuple[int, list[int], float]]:
    """Every step of one rank: its number, the rows, the imbalance."""
    done = []
    while True:
        try:
            with queue.get("train", group="dp", rank=rank, world_size=SIZE, timeout_s=100, **more) as batch:
                assert (batch.rank, batch.world_size) == (rank, SIZE)
                assert [len(row) for row in batch["x"]] == [row[-1] + 1 for row in batch["x"]]
                batch.ack()
                done.append((batch.index, batch.ids.tolist(), batch.imbalance))
        except Ended:
            return done


@pytest.mark.parametrize("shards", [0, 2])
def test_ranks_train_the_steps_together_each_its_shard_and_each_step_is_told_once(shards: int) -> None:
    told: list[tuple[int, list[int]]] = []
    with running(on_step=lambda step, read: told.append((step, sorted(read().ids.tolist())))) as run:
        queue = prepared(run, 3, sampler=("token_balanced", {"column": "x"}))
        queues = [run.queue(f"rank-{r}") for r in range(SIZE)]
        done = in_threads(SIZE, lambda rank: train(queues[rank], rank, shards=shards))
        for step in range(3):
            rows = [done[rank][step][1] for rank in range(SIZE)]
            if shards:
                assert rows[0] == rows[1]
                assert rows[2] == rows[3]
                rows = [rows[0], rows[2]]
            assert sorted(i for part in rows for i in part) == list(range(8 * step, 8 * step + 8))
            assert len({len(part) for part in rows}) == 1
            assert len({done[rank][step][2] for rank in range(SIZE)}) == 1
            assert done[0][step][2] < 0.5
        assert queue.audit().consumed == 24
    assert told == [(step, list(range(8 * step, 8 * step + 8))) for step in range(3)]


def lease_on(*ranks: ClientProcess) -> list[Any]:
    """The steps that ranks in processes of their own get."""
    for rank, process in enumerate(ranks):
        process.say(f'(batch := queue.get("train", group="dp", rank={rank}, world_size=2, timeout_s=60)).index')
    return [process.hear() for process in ranks]


def test_a_killed_rank_takes_the_step_from_all_and_is_restarted(run: Served) -> None:
    # given two ranks as processes, one of which is killed with the second step in hand
    queue = prepared(run, 4)
    with ClientProcess(run.address) as first:
        with ClientProcess(run.address) as second:
            assert lease_on(first, second) == [0, 0]
            assert [child("batch.ack()") for child in (first, second)] == [None, None]
            assert lease_on(first, second) == [1, 1]
            second.kill()
        # when it is started again
        with ClientProcess(run.address) as second:
            until(lambda: queue.status().lease_count == 0, "the death of the other")
            # then both train that step and the rest, and every row once
            assert first("batch.ack()").startswith("LeaseLost")
            for step in (1, 2, 3):
                assert lease_on(first, second) == [step, step]
                assert [child("batch.ack()") for child in (first, second)] == [None, None]
            assert all(str(answer).startswith("Ended") for answer in lease_on(first, second))
    audit = queue.audit()
    assert (audit.consumed, audit.live) == (32, 0)


def test_a_rank_whose_request_was_too_late_asks_again(run: Served) -> None:
    prepared(run, 1)
    queues = [run.queue(f"rank-{r}") for r in range(2)]
    with pytest.raises(DeadlineExceeded, match="rank 1 of 2 of group 'dp' have not asked"):
        queues[0].get("train", group="dp", rank=0, world_size=2, timeout_s=0.05)

    def both(rank: int) -> int:
        with queues[rank].get("train", group="dp", rank=rank, world_size=2, timeout_s=100) as batch:
            batch.ack()
            return batch.rows

    assert in_threads(2, both) == [4, 4]


def test_rows_written_by_ranks_that_share_a_shard_are_written_once(run: Served) -> None:
    queue = run.queue("admin")
    queue.declare("score", needs=["x"], gives=["y"])
    queue.declare("last", needs=["y"])
    queue.put({"x": np.arange(7)})
    queue.end()
    queues = [run.queue(f"rank-{r}") for r in range(SIZE)]

    def work(rank: int) -> None:
        while True:
            try:
                batch = queues[rank].get("score", 4, group="tp", rank=rank, world_size=SIZE, shards=2, timeout_s=100)
            except Ended:
                return
            with batch:
                assert len(batch.complete({"y": batch["x"] * 10 + rank})) == 0

    in_threads(SIZE, work)
    with queue.get("last", 7) as batch:
        assert (batch["y"] // 10).tolist() == batch.ids.tolist()
        batch.ack()
    assert queue.audit().consumed == 7


def test_a_rank_without_rows_goes_on_like_the_others(run: Served) -> None:
    queue = run.queue("admin")
    queue.declare("score", needs=["x", "s"])
    queue.put({"x": np.arange(2), "s": ["a", "b"]})
    queue.end()
    queues = [run.queue(f"rank-{r}") for r in range(3)]

    def work(rank: int) -> int:
        with queues[rank].get("score", 8, group="t", rank=rank, world_size=3, timeout_s=100) as batch:
            assert set(batch) == {"x", "s"}
            assert len(batch["s"]) == batch.rows
            batch.ack()
            return batch.rows

    assert in_threads(3, work) == [1, 1, 0]
    assert queue.audit().consumed == 2


def test_a_rank_whose_rows_ended_before_it_read_them_works_on_the_same_lease_without_rows() -> None:
    with running() as run:
        queue, one = run.queue("admin"), run.queue("rank-0")
        proxy, other = run.proxied("rank-1")
        queue.declare("score", needs=["x"], gives=["y"])
        shared: dict[str, Any] = {"group": "t", "world_size": 2, "timeout_s": 60}
        # given a grant of which rank 1 has no word yet
        asked = in_thread(other.get, "score", 2, rank=1, **shared)
        until(lambda: run.run.queue.status().parked, "the request of rank 1")
        proxy.halt(there=False)
        queue.put({"x": [np.arange(9), np.arange(9)]})
        first = one.get("score", 2, rank=0, **shared)
        # when its row ends, and the memory of both is written anew
        queue.cancel([1 - first.ids[0]])
        first.complete({"y": [1.0]})
        queue.cancel(first.ids)
        for _ in range(3):
            queue.put({"x": [np.arange(9) + 1, np.arange(9) + 1]}, group_size=2)
        proxy.resume()
        # then it has its turn in this lease, and the next one is of both ranks again
        second = asked()
        assert (second.token, second.rows, set(second)) == (first.token, 0, {"x"})
        later = in_thread(other.get, "score", 6, rank=1, **shared)
        assert {one.get("score", 6, rank=0, **shared).rows, later().rows} == {3}


def test_ranks_iterate_over_the_steps_of_a_run() -> None:
    with running(samplers={"mine": Newest}) as run:
        queue = run.queue()
        queue.declare("note", needs=["x"], sampler="mine")
        queue.put({"x": [np.arange(n + 1) for n in range(16)]})
        queue.end()
        others = [run.client(f"rank-{rank}") for rank in range(2)]

        def work(rank: int) -> list[tuple[int, int, int]]:
            balanced = ("token_balanced", {"column": "x"})
            done = []
            for step in others[rank].consumer(
                "train", batch_size=8, needs=("x",), sampler=balanced, rank=rank, world_size=2
            ):
                done.append((step.index, step.rank, step.rows))
                step.ack()
            return done

        assert in_threads(2, work) == [[(0, r, 4), (1, r, 4)] for r in range(2)]
        with queue.get("note", 3) as batch:
            assert batch.ids.tolist() == [15, 14, 13]


class Newest(Sampler):
    may_starve = True

    def choose(self, rows: Candidates, count: int) -> npt.ArrayLike:
        return np.argsort(-rows.ids)[:count]
