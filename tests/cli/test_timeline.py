"""Timeline: shares never add up to more than the time there was; the zoom shows ordinary steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import START_S, synthetic_run

from asyncflow_sdk.cli.timeline import Piece, flatten, lag_curve, order, shares, steady_window
from asyncflow_sdk.types.events import Loaded, Published, Span, StepTrained, WorkerState

SPANS = st.lists(
    st.builds(
        lambda start, ticks, kind: Span(time_s=start / 8, seconds=ticks / 8, kind=kind),
        st.integers(0, 80),
        st.integers(0, 40),
        st.sampled_from(["generate", "load", "wait", "odd"]),
    ),
    max_size=12,
)


def span(kind: str, start: float, end: float, version: int = -1) -> Span:
    return Span(time_s=start, seconds=end - start, kind=kind, version=version)


@given(SPANS)
def test_pieces_cover_exactly_what_the_spans_cover(spans: list[Span]) -> None:
    pieces = flatten(spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(pieces))
    for tick in range(8 * 15):
        moment = (tick + 0.5) / 8
        kinds = {s.kind for s in spans if s.time_s <= moment < s.time_s + s.seconds}
        found = [p.kind for p in pieces if p.start <= moment < p.end]
        assert found == order(kinds)[:1]


@given(SPANS)
def test_shares_add_up_to_the_time_covered(spans: list[Span]) -> None:
    pieces = flatten(spans)
    edges = np.linspace(0, 16, 24)
    found = shares(pieces, edges)
    total = sum(found.values(), start=np.zeros(23))
    assert (total <= 1 + 1e-9).all()
    covered = sum(p.end - p.start for p in pieces)
    assert float(total.sum()) * (16 / 23) == pytest.approx(covered)


def test_work_goes_before_waiting_and_neighbours_are_joined() -> None:
    spans = [span("wait", 0, 10), span("generate", 2, 4, 7), span("generate", 3, 6, 7), span("generate", 6, 8, 8)]
    assert flatten(spans) == [
        Piece(0, 2, "wait", -1),
        Piece(2, 6, "generate", 7),
        Piece(6, 8, "generate", 8),
        Piece(8, 10, "wait", -1),
    ]


def test_the_window_is_ten_ordinary_steps_away_from_a_restart() -> None:
    events = synthetic_run(restart_at=150)
    steps = [e for e in events if isinstance(e, StepTrained)]
    failed = next(e.time_s for e in events if isinstance(e, WorkerState) and e.state == "failed")

    window = steady_window(steps)

    assert window is not None
    start, end = window
    assert sum(start < s.time_s <= end for s in steps) == 10
    assert not start <= failed <= end
    assert START_S + 50 < start < START_S + 200


@pytest.mark.parametrize("count", [0, 1])
def test_without_two_steps_there_is_no_window(count: int) -> None:
    assert steady_window([StepTrained(time_s=k, step=k, version=k, metrics={}) for k in range(count)]) is None


def test_lag_rises_when_a_version_is_published_and_falls_when_the_slowest_loads_it() -> None:
    times, lags = lag_curve(
        [
            Loaded(time_s=0, worker="a", version=0, lag=0),
            Loaded(time_s=0, worker="b", version=0, lag=0),
            Published(time_s=1, version=1, nbytes=0, root=""),
            Loaded(time_s=2, worker="a", version=1, lag=0),
            Published(time_s=3, version=2, nbytes=0, root=""),
            WorkerState(time_s=4, worker="b", state="failed"),
            Loaded(time_s=5, worker="a", version=2, lag=0),
        ]
    )
    assert list(zip(times, lags, strict=True)) == [(0, 0), (1, 1), (3, 2), (4, 1), (5, 0)]
