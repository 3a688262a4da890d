"""Dealing rows out to shards: always as many to each, and about equally heavy."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from asyncflow_sdk.ledger.balance import balance, imbalance, split

Weights = npt.NDArray[np.float64]


def lengths(random: np.random.Generator, n: int) -> Weights:
    """Heavy-tailed, cut off as responses are."""
    tail: Weights = np.minimum(np.floor(random.pareto(1.2, n) * 200 + 50), 16384)
    return tail


def greedy(weights: Weights, shards: int) -> npt.NDArray[np.int64]:
    """Each row, the heaviest first, to the lightest shard that has room: what is done where nobody thinks of it."""
    out = np.zeros(len(weights), np.int64)
    room = np.bincount(split(len(weights), shards), minlength=shards)
    lightest = [(0.0, s) for s in range(shards)]
    for row in np.argsort(-weights, kind="stable").tolist():
        total, s = heapq.heappop(lightest)
        out[row] = s
        room[s] -= 1
        if room[s]:
            heapq.heappush(lightest, (total + float(weights[row]), s))
    return out


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 20).map(float), max_size=80),
    st.integers(1, 9),
)
def test_every_shard_gets_as_many_rows_whatever_they_weigh(weights: list[float], shards: int) -> None:
    array = np.array(weights, np.float64)
    with np.errstate(over="ignore"):
        dealt = balance(array, shards)
        counts = np.bincount(dealt, minlength=shards)
        assert len(counts) == shards
        assert counts.max() - counts.min() <= 1
        assert (np.diff([int(np.flatnonzero(dealt == s)[0]) for s in range(shards) if (dealt == s).any()]) > 0).all()
        assert (balance(array, shards) == dealt).all()


def test_it_is_better_than_greedy_and_much_better_than_runs_of_rows() -> None:
    random = np.random.default_rng(7)
    for shards, rows in ((2, 64), (4, 64), (8, 256), (8, 1003), (16, 1024)):
        found: dict[str, list[float]] = {"balanced": [], "greedy": [], "contiguous": []}
        for _ in range(20):
            weights = lengths(random, rows)
            for name, dealt in (
                ("balanced", balance(weights, shards)),
                ("greedy", greedy(weights, shards)),
                ("contiguous", split(rows, shards)),
            ):
                found[name].append(imbalance(weights, dealt, shards))
        mean = {name: float(np.mean(values)) for name, values in found.items()}
        assert mean["balanced"] <= mean["greedy"], (shards, rows, mean)
        assert mean["balanced"] < 0.6 * mean["contiguous"], (shards, rows, mean)


def test_one_row_as_heavy_as_all_others_gets_light_company() -> None:
    weights = np.array([100.0, 9, 8, 7, 6, 5, 4, 3])
    dealt = balance(weights, 2)
    assert weights[dealt == 0].tolist() == [100, 5, 4, 3]


def test_rows_of_one_weight_stay_in_order() -> None:
    assert balance(np.ones(10), 4).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    assert balance(np.ones(2), 4).tolist() == [0, 1]
    assert len(balance(np.ones(0), 4)) == 0


def test_thousands_of_rows_take_work_in_proportion() -> None:
    import sys

    def work(rows: int) -> int:
        steps = 0

        def count(frame: object, event: str, arg: object) -> None:
            nonlocal steps
            steps += 1

        weights = lengths(np.random.default_rng(1), rows)
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            balance(weights, 8)
        finally:
            sys.setprofile(before)
        return steps

    assert work(16_384) < 16 * 1.5 * work(1024)
