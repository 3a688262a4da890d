"""Board: what it shows is what the events said, and it does not grow with the run."""

from __future__ import annotations

import math

import pytest
from synthetic_run import BATCH, START_S, synthetic_run, synthetic_summary

from asyncflow_sdk.cli.board import Board, Curve, Rate
from asyncflow_sdk.cli.frame import frame
from asyncflow_sdk.types.events import (
    Event,
    Loaded,
    Note,
    Published,
    RowsEnded,
    Span,
    Status,
    StepTrained,
    WorkerState,
)


def folded(events: list[Event], total_steps: int = 300) -> Board:
    board = Board(total_steps)
    for event in events:
        board.add(event)
    return board


def trained(step: int, reward: float = 0.5, time_s: float = 1.0) -> StepTrained:
    return StepTrained(time_s=time_s, step=step, version=step, metrics={"reward": reward})


def test_a_whole_run() -> None:
    events = synthetic_run()
    rewards = [e.metrics["reward"] for e in events if isinstance(e, StepTrained)]

    board = folded(events)

    assert (board.done, board.total_steps) == (300, 300)
    assert board.reward == rewards[-1]
    assert board.reward_mean == pytest.approx(sum(rewards[-20:]) / 20)
    assert board.staleness_max == 1
    assert board.published == 300
    assert board.ended["consumed"] == 300 * (BATCH - 2)
    assert sum(board.ended.values()) == synthetic_summary()["rows_put"]
    assert board.returned == BATCH
    assert set(board.workers) == {"rollout-0", "train-0", "reward-0"}
    assert {w.state for w in board.workers.values()} == {"stopped"}
    assert board.workers["rollout-0"].restarts == 1
    assert board.start_s == START_S
    assert board.seconds_left == 0


def test_the_middle_of_a_run() -> None:
    events = synthetic_run(restart_at=None)
    half = [e for e in events if e.time_s < START_S + 100]

    board = folded(half)

    assert 100 < board.done < 150
    assert board.rows["train"]["leased"] == BATCH
    assert board.waiting["train-0"].startswith("after 0.2 s")
    assert board.lag in (1, 2)
    tokens = sum(e.tokens for e in half if isinstance(e, Span) and e.kind == "generate")
    assert board.tokens_per_s == pytest.approx(tokens / 98, rel=0.1)
    pace = 98 / board.done
    assert board.seconds_left == pytest.approx((300 - board.done) * pace, rel=0.15)
    shares = board.workers["train-0"].seconds
    assert shares["train"] > shares["wait"] > shares["publish"] > 0


@pytest.mark.parametrize(("first", "last"), [(0, 9), (1, 10)])
def test_steps_done_whether_counted_from_zero_or_one(first: int, last: int) -> None:
    board = folded([trained(k) for k in range(first, last + 1)], 10)
    assert board.done == 10


def test_nan_is_shown_but_not_averaged() -> None:
    board = folded([trained(0, 0.4), trained(1, 0.6), trained(2, math.nan)])
    assert math.isnan(board.reward)
    assert board.reward_mean == pytest.approx(0.5)


def test_before_anything_happened() -> None:
    board = Board(10)
    assert math.isnan(board.reward_mean)
    assert math.isnan(board.seconds_left)
    assert (board.lag, board.tokens_per_s, board.done) == (None, 0.0, 0)


def test_lag_is_of_the_slowest_living_replica() -> None:
    board = folded(
        [
            Published(time_s=1, version=5, nbytes=1, root=""),
            Loaded(time_s=2, worker="a", version=5, lag=0),
            Loaded(time_s=2, worker="b", version=3, lag=2),
        ]
    )
    assert board.lag == 2
    board.add(WorkerState(time_s=3, worker="b", state="failed"))
    assert board.lag == 0
    board.add(Published(time_s=4, version=6, nbytes=1, root=""))
    assert board.lag == 1


def test_a_status_corrects_the_count_of_ended_rows() -> None:
    board = folded([RowsEnded(time_s=1, state="consumed", count=8), RowsEnded(time_s=1, state="failed", count=1)])
    board.add(Status(time_s=2, rows={}, ended={"consumed": 16}, waiting={}))
    board.add(RowsEnded(time_s=3, state="consumed", count=8))
    assert board.ended == {"consumed": 24, "failed": 1}


def test_only_information_is_kept_as_the_note() -> None:
    board = folded([Note(time_s=1, text="shm"), Note(time_s=2, text="careful", level="warning")])
    assert board.note == "shm"


def test_workers_that_come_and_go_are_forgotten_the_gone_ones_first() -> None:
    board = Board(1)
    board.add(WorkerState(time_s=0, worker="trainer", state="ready"))
    for i in range(2_000):
        board.add(WorkerState(time_s=i, worker=f"replica-{i}", state="ready"))
        board.add(WorkerState(time_s=i, worker=f"replica-{i}", state="stopped"))
    assert len(board.workers) <= 256
    assert {"trainer", "replica-1999"} <= set(board.workers)


def test_curve_keeps_its_shape_in_bounded_memory() -> None:
    curve = Curve(limit=64)
    for i in range(10_000):
        curve.add(i)
    curve.add(math.inf)
    assert len(curve.means) < 64
    assert curve.means == sorted(curve.means)
    sampled = curve.sampled(10)
    assert len(sampled) == 10
    assert sum(sampled) / 10 == pytest.approx(5_000, rel=0.05)
    assert curve.sampled(0) == []


def test_rate_is_of_the_window_and_falls_when_nothing_comes() -> None:
    rate = Rate(window_s=10)
    for second in range(60):
        rate.add(Span(time_s=second, worker="r", kind="generate", seconds=1, tokens=100))
    assert rate.at(60) == pytest.approx(100, rel=0.11)
    assert rate.at(65) == pytest.approx(50, rel=0.25)
    assert rate.at(100) == 0


def test_rate_takes_a_span_that_is_reported_late() -> None:
    rate = Rate(window_s=10)
    rate.add(Span(time_s=8, kind="generate", seconds=1, tokens=100))
    rate.add(Span(time_s=5, kind="generate", seconds=1, tokens=300))
    assert rate.at(10) == pytest.approx(400 / 5)


def test_staleness_is_shown_in_parts_once_a_step_tells_them_apart() -> None:
    metrics = {"staleness_mean": 1.0, "staleness_in_flight_mean": 0.75, "staleness_in_queue_mean": 0.25}
    board = folded([StepTrained(time_s=1.0, step=0, version=0, metrics=metrics)])

    assert (board.in_flight, board.in_queue) == (0.75, 0.25)
    lines = [line.plain for line in frame(board, title="x", now_s=2.0, width=100, height=30)]
    assert any("0.75 in flight + 0.25 in the queue" in line for line in lines)
