"""The timeline of each worker as intervals without overlaps.

    intervals = flatten(record.spans["rollout-0"])     # one kind at a time, in order
    shares(intervals, edges)["generate"]               # its share of each slice of time

Spans of one worker may overlap: parallel requests, a load while generating. At each moment only the
first of ``KINDS`` counts, and the shares never exceed 1 in sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...types.events import Event, Loaded, Published, Span, StepTrained, WorkerState

KINDS = ("train", "generate", "reward", "load", "publish")
WAIT = "wait"
_TOUCHING_S = 1e-6


class Interval(NamedTuple):
    """Work of one ``kind`` from ``start`` to ``end``, seconds of the run's clock."""

    start: float
    end: float
    kind: str
    version: int


def order(kinds: Iterable[str]) -> list[str]:
    """Sort kinds by rank: known work, other work, waiting."""
    found = set(kinds)
    known = [kind for kind in KINDS if kind in found]
    other = sorted(found - set(KINDS) - {WAIT})
    return [*known, *other, *([WAIT] if WAIT in found else [])]


def flatten(spans: Sequence[Span]) -> list[Interval]:
    """Convert the spans of one worker to intervals without overlaps; join equal neighbours."""
    rank = {kind: i for i, kind in enumerate(order(span.kind for span in spans))}
    marks = [(span.time_s, 1, span) for span in spans]
    marks += [(span.time_s + span.seconds, -1, span) for span in spans]
    marks.sort(key=lambda mark: (mark[0], mark[1]))
    open_: dict[tuple[str, int], int] = {}
    intervals: list[Interval] = []
    before = 0.0
    for time_s, change, span in marks:
        if open_ and time_s > before:
            kind, version = min(open_, key=lambda key: (rank[key[0]], key[1]))
            _append(intervals, Interval(before, time_s, kind, version))
        before = time_s
        key = (span.kind, span.version)
        open_[key] = open_.get(key, 0) + change
        if not open_[key]:
            del open_[key]
    return intervals


def _append(intervals: list[Interval], new: Interval) -> None:
    last = intervals[-1] if intervals else None
    same = last is not None and (last.kind, last.version) == (new.kind, new.version)
    if last is not None and same and new.start - last.end < _TOUCHING_S:
        intervals[-1] = last._replace(end=new.end)
    else:
        intervals.append(new)


def shares(intervals: Sequence[Interval], edges: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the share (0 to 1) of each slice between ``edges``, by kind: (len(edges) - 1,)."""
    found: dict[str, npt.NDArray[np.float64]] = {}
    for kind in order(interval.kind for interval in intervals):
        mine = [interval for interval in intervals if interval.kind == kind]
        times = np.array([t for interval in mine for t in (interval.start, interval.end)])
        spent = np.cumsum([t for interval in mine for t in (0.0, interval.end - interval.start)])
        # The time spent is constant between intervals and grows by 1 s/s within one: interpolate linearly.
        until = np.interp(edges, times, spent, left=0.0, right=float(spent[-1]))
        found[kind] = np.diff(until) / np.diff(edges)
    return found


def steady_window(steps: Sequence[StepTrained], count: int = 10) -> tuple[float, float] | None:
    """Return the start and end of ``count`` typical steps in the middle of the run; None for fewer
    than two steps, and for steps without a duration.

    In the middle half, take the window with a duration nearest to the median; of equals the most
    central.
    """
    times = [step.time_s for step in steps]
    count = min(count, len(times) - 1)
    if count < 1:
        return None
    starts = range(len(times) - count)
    quarter = len(starts) // 4
    middle = starts[quarter : len(starts) - quarter] or starts
    spans = {i: times[i + count] - times[i] for i in middle if times[i + count] > times[i]}
    if not spans:
        return None
    typical = float(np.median(list(spans.values())))
    centre = (len(times) - count) / 2
    best = min(spans, key=lambda i: (round(abs(spans[i] - typical) / max(typical, 1e-9), 2), abs(i - centre)))
    return times[best], times[best + count]


def lag_curve(events: Iterable[Event]) -> tuple[list[float], list[int]]:
    """Return the times and new values of the slowest replica's publish lag. A dead replica has
    none."""
    loaded: dict[str, int] = {}
    published = 0
    times: list[float] = []
    lags: list[int] = []
    for event in sorted(events, key=lambda e: e.time_s):
        if isinstance(event, Published):
            published = max(published, event.version)
        elif isinstance(event, Loaded):
            loaded[event.worker] = event.version
            published = max(published, event.version + event.lag)
        elif isinstance(event, WorkerState) and event.state != "ready":
            loaded.pop(event.worker, None)
        else:
            continue
        lag = published - min(loaded.values()) if loaded else 0
        if not lags or lag != lags[-1]:
            times.append(event.time_s)
            lags.append(lag)
    return times, lags
