"""Check of samplers.

def test_my_sampler():
    check_sampler(lambda: LongestFirst("response_ids"))
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ...interfaces import Candidates, Sampler
from .check import checks
from .lab import PlainLab

MOST = 4096  # candidates it is tried with, however large its window


def check_sampler(factory: Callable[[], Sampler], *, tries: int = 50) -> None:
    """Raise AssertionError with the fault and the candidates behind it.

    Positions must be valid; equal candidates give equal answers, from one object twice and from two
    objects; candidates are never written to; work grows about in proportion to the candidates;
    under continuing supply every row is chosen in the end, unless ``may_starve``.
    """
    sampler = factory()
    assert isinstance(sampler, Sampler), f"{sampler!r} is no asyncflow_sdk.interfaces.Sampler"
    assert isinstance(sampler.window, int), f"window must be an int, not {sampler.window!r}"
    assert sampler.window >= 1, f"window must be at least 1, not {sampler.window}"
    assert isinstance(sampler.measure, str), f"measure names a column, or is empty; not {sampler.measure!r}"
    random = np.random.default_rng(0)
    window = min(sampler.window, MOST)
    for number in range(tries):
        count = int(random.integers(1, 2 * window + 2))
        rows = _candidates(random, int(random.integers(1, max(window, count) + 1)), sampler, number)
        _check_choice(factory, sampler, rows, count)
    _check_work(sampler, random, window)
    if not sampler.may_starve:
        for rising in (0.0, 1.0, -1.0):
            _check_supply(sampler, random, window, rising)


def _candidates(random: np.random.Generator, n: int, sampler: Sampler, turn: int) -> Candidates:
    """Return heavy-tailed, equal or non-finite measures, in groups of different sizes."""
    ids = np.sort(random.choice(np.arange(20 * n), n, replace=False)).astype(np.int64) + (turn << 33)
    measures = np.floor(random.pareto(1.1, n) * 100) if turn % 3 else np.full(n, 7.0)
    if turn % 5 == 4:
        measures[random.random(n) < 0.2] = random.choice([np.nan, np.inf, -np.inf])
    priorities = np.sort(random.integers(-1, 2, n) * (turn % 2))[::-1].astype(np.int32)
    rows = Candidates(ids, ids - ids % 3, measures if sampler.measure else measures[:0], priorities, turn)
    for array in (rows.ids, rows.groups, rows.measures, rows.priorities):
        array.flags.writeable = False
    return rows


def _check_choice(factory: Callable[[], Sampler], sampler: Sampler, rows: Candidates, count: int) -> None:
    chosen = _chosen(sampler, rows, count)
    for other, whose in ((sampler, "the same object, asked again,"), (factory(), "another object")):
        again = _chosen(other, rows, count)
        assert np.array_equal(chosen, again), f"of {rows} {whose} chose {again}, not {chosen}"


def _chosen(sampler: Sampler, rows: Candidates, count: int) -> npt.NDArray[np.int64]:
    positions = np.asarray(sampler.choose(rows, count))
    said = f"choose({rows}, {count}) gave {positions}:"
    assert positions.ndim == 1, f"{said} {positions.ndim} dimensions, not 1"
    assert not len(positions) or positions.dtype.kind in "iu", f"{said} {positions.dtype}, not positions"
    assert len(positions) <= count, f"{said} more than {count}"
    assert ((positions >= 0) & (positions < len(rows))).all(), f"{said} positions that are not of {len(rows)} entries"
    assert len(np.unique(positions)) == len(positions), f"{said} an entry twice"
    return positions.astype(np.int64)


def _check_work(sampler: Sampler, random: np.random.Generator, window: int) -> None:
    small = max(window // 8, 1)
    few = _work(sampler, _candidates(random, small, sampler, 1), small)
    many = _work(sampler, _candidates(random, window, sampler, 1), small)
    most = 2 * few * window // small + 10_000
    assert many <= most, f"{few} bytecodes for {small} candidates, {many} for {window}: it does not scale"


def _work(sampler: Sampler, rows: Candidates, count: int) -> int:
    steps = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        """Count bytecodes."""
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        sampler.choose(rows, count)
    finally:
        sys.settrace(before)
    return steps


def _check_supply(sampler: Sampler, random: np.random.Generator, window: int, rising: float) -> None:
    """Replace chosen rows by new ones: the newest of the first rows must be chosen in a number of
    turns. ``rising``: measures of later rows are larger (1), smaller (-1), or random (0)."""
    count = max(1, window // 16)
    turns = 20 * -(-window // count) + 200
    ids = np.arange(window + count, dtype=np.int64)
    measures = np.floor(random.pareto(1.1, len(ids)) * 100)
    watched = int(ids[-1])
    for turn in range(turns):
        n = min(window, len(ids))
        shown = measures[:n].copy() if sampler.measure else measures[:0]
        rows = Candidates(ids[:n].copy(), ids[:n].copy(), shown, np.zeros(n, np.int32), turn)
        kept = np.ones(len(ids), bool)
        kept[_chosen(sampler, rows, count)] = False
        ids, measures = ids[kept], measures[kept]
        if not len(ids) or ids[0] > watched:
            return
        new = np.arange(1, (~kept).sum() + 1, dtype=np.int64) + max(int(ids[-1]), watched)
        ids = np.concatenate([ids, new])
        fresh = np.floor(random.pareto(1.1, len(new)) * 100) + rising * 1000.0 * (turn + 1)
        measures = np.concatenate([measures, fresh])
    left = int((ids <= watched).sum())
    raise AssertionError(
        f"{left} rows were not chosen in {turns} turns while others came (window {window}, {count} a turn); choose"
        " the oldest of the candidates sooner or later, or set may_starve = True"
    )


def choices(lab: PlainLab) -> None:
    """Positions are valid, the same for equal candidates, chosen in time proportional to the
    candidates, and reach every row in the end."""
    check_sampler(lab.made)


CHECKS = checks("sampler", {
    choices: ("basic", (), "rows are given twice or never, a resumed run chooses others than before, or every request"
        " waits for the sampler", "choose(): a function of its arguments and options alone, over arrays"),
})  # fmt: skip
