"""Dealing the rows of a lease out to ranks: always as many to each, and about equally heavy."""

from __future__ import annotations

import heapq
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_queue import TOKENS

from asyncflow_sdk.ledger import Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types.tasks import SamplerSpec

pytestmark = pytest.mark.fast
TASK = TaskSpec(name="ranks", needs=("prompt",), sampler=SamplerSpec("token_balanced", {"column": "prompt"}))


def ask_all(weights: list[float], shards: int) -> Ledger:
    """A ledger of rows of these weights, that all ranks but the last have asked for."""
    ledger = Ledger()
    put = cmd.AddRows(
        groups=len(weights),
        group_size=1,
        columns={"prompt": TOKENS},
        measures={"prompt": np.array(weights, "<f8").tobytes()},
    )
    for ticket, command in enumerate([cmd.OpenSession(name="w"), cmd.Declare(task=TASK), put]):
        ledger.apply(int(ticket > 0), command, 0.0, ticket)
    for rank in range(shards - 1):
        ledger.apply(1, lease(len(weights), rank, shards), 0.0, 10 + rank)
    ledger.drain()
    return ledger


def lease(count: int, rank: int, shards: int) -> cmd.LeaseRows:
    return cmd.LeaseRows(task="ranks", count=count, timeout_s=9, group="t", rank=rank, world_size=shards)


def deal(weights: list[float], shards: int) -> list[list[int]]:
    """The rows of each shard."""
    ledger = ask_all(weights, shards)
    ledger.apply(1, lease(len(weights), shards - 1, shards), 0.0, 99)
    dealt = sorted((reply for _, reply in ledger.drain().answers), key=lambda reply: reply.shard)
    return [unpack_ids(reply.ids).tolist() for reply in dealt]


def heaviest(weights: list[float], shards: list[list[int]]) -> float:
    """How much heavier than the mean the heaviest shard is."""
    sums = [sum(weights[i] for i in shard) for shard in shards]
    return max(sums) / (sum(sums) / len(sums)) - 1


def lengths(random: np.random.Generator, n: int) -> list[float]:
    """Heavy-tailed, cut off as responses are."""
    return list(np.minimum(np.floor(random.pareto(1.2, n) * 200 + 50), 16384).tolist())


def greedy(weights: list[float], shards: int) -> list[list[int]]:
    """Each row, the heaviest first, to the lightest shard that has room: what is done where nobody thinks of it."""
    dealt: list[list[int]] = [[] for _ in range(shards)]
    lightest = [(0.0, shard) for shard in range(shards)]
    for row in sorted(range(len(weights)), key=lambda row: -weights[row]):
        total, shard = heapq.heappop(lightest)
        dealt[shard].append(row)
        if len(dealt[shard]) < len(weights) // shards:
            heapq.heappush(lightest, (total + weights[row], shard))
    return dealt


@settings(max_examples=40)
@given(st.integers(1, 9).flatmap(lambda shards: st.tuples(
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 20).map(float), min_size=shards, max_size=80),
    st.just(shards),
)))  # fmt: skip
def test_every_shard_gets_as_many_rows_whatever_they_weigh(drawn: tuple[list[float], int]) -> None:
    weights, shards = drawn
    with np.errstate(over="ignore", invalid="ignore"):
        dealt = deal(weights, shards) if shards > 1 else [list(range(len(weights)))]
        again = deal(weights, shards) if shards > 1 else dealt
    assert dealt == again
    assert sorted(i for shard in dealt for i in shard) == list(range(len(weights)))
    sizes = [len(shard) for shard in dealt]
    assert max(sizes) - min(sizes) <= 1
    firsts = [shard[0] for shard in dealt if shard]
    assert firsts == sorted(firsts)


def test_it_is_better_than_greedy_and_much_better_than_runs_of_rows() -> None:
    random = np.random.default_rng(7)
    for shards, rows in ((2, 64), (4, 64), (8, 256)):
        found: dict[str, list[float]] = {"balanced": [], "greedy": [], "contiguous": []}
        for _ in range(10):
            weights = lengths(random, rows)
            found["balanced"].append(heaviest(weights, deal(weights, shards)))
            found["greedy"].append(heaviest(weights, greedy(weights, shards)))
            runs = np.array_split(np.arange(rows), shards)
            found["contiguous"].append(heaviest(weights, [run.tolist() for run in runs]))
        mean = {name: float(np.mean(values)) for name, values in found.items()}
        assert mean["balanced"] <= mean["greedy"], (shards, rows, mean)
        assert mean["balanced"] < 0.6 * mean["contiguous"], (shards, rows, mean)


def test_one_row_as_heavy_as_all_others_gets_light_company() -> None:
    assert deal([100.0, 9, 8, 7, 6, 5, 4, 3], 2)[0] == [0, 5, 6, 7]


def test_rows_of_one_weight_stay_in_order() -> None:
    assert deal([1.0] * 10, 4) == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]


def test_thousands_of_rows_take_work_in_proportion() -> None:
    def work(rows: int) -> int:
        steps = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal steps
            steps += 1

        ledger = ask_all(lengths(np.random.default_rng(1), rows), 8)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            ledger.apply(1, lease(rows, 7, 8), 0.0, 99)
        finally:
            sys.setprofile(before)
        return steps

    assert work(8_192) < 16 * 1.5 * work(512)
