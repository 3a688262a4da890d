"""The record of a run: the events and the summary in its directory, and the work of each worker.

    record = read_record(Path("runs/demo"))
    record.steps[-1].metrics["reward"], record.summary.get("status"), record.intervals["rollout-0"]

A killed run leaves a torn last line and no summary; a newer SDK writes unknown events. Such lines
are counted in ``skipped``; ``remarks`` explains everything missing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from ...types.events import Evaluated, Event, Loaded, Published, RowsEnded, Span, StepTrained, WorkerState
from ...workflow.loops.record_files import EVENTS, read_events, sample_rows, step_path
from ...workflow.loops.statistics import LengthStatistics
from ..figures import Figures, RunFold
from ..formats import by_name

SUMMARY = "summary.json"
KINDS = ("train", "generate", "reward", "load", "publish")
WAIT = "wait"


class Interval(NamedTuple):
    """Work of one ``kind`` from ``start`` to ``end``, seconds of the run's clock."""

    start: float
    end: float
    kind: str
    version: int


@dataclass(frozen=True)
class RunRecord:
    """The events in the order of writing, and the summary; {} if the run did not end. ``directory``: the directory of
    the run; None for an address. ``total_steps``: the wanted number of steps; 0 if unknown."""

    name: str
    total_steps: int = 0
    directory: Path | None = None
    events: list[Event] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    remarks: list[str] = field(default_factory=list)

    @cached_property
    def steps(self) -> list[StepTrained]:
        """One event per step, in order. A step trained again replaces itself and all later ones."""
        latest: dict[int, StepTrained] = {}
        for event in self.events:
            if isinstance(event, StepTrained):
                if event.step in latest:
                    latest = {step: known for step, known in latest.items() if step < event.step}
                latest[event.step] = event
        return [latest[step] for step in sorted(latest)]

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """All evaluations, in order."""
        return [event for event in self.events if isinstance(event, Evaluated)]

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """The spans by worker, sorted by name (rollout-2 before rollout-10)."""
        found: dict[str, list[Span]] = {}
        for event in self.events:
            if isinstance(event, Span) and math.isfinite(event.seconds) and event.seconds >= 0:
                found.setdefault(event.worker or "driver", []).append(event)
        return {name: found[name] for name in sorted(found, key=by_name)}

    @cached_property
    def intervals(self) -> dict[str, list[Interval]]:
        """The work of each worker as intervals without overlaps."""
        return {name: flatten(spans) for name, spans in self.spans.items()}

    @cached_property
    def failures(self) -> dict[str, list[float]]:
        """The times of each worker's failures."""
        found: dict[str, list[float]] = {}
        for event in self.events:
            if isinstance(event, WorkerState) and event.state == "failed":
                found.setdefault(event.worker, []).append(event.time_s)
        return found

    @cached_property
    def lags(self) -> dict[float, int]:
        """The slowest replica's publish lag at the times of its changes. A dead replica has none."""
        loaded: dict[str, int] = {}
        published, lags = 0, dict[float, int]()
        for event in sorted(self.events, key=lambda each: each.time_s):
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
            if not lags or lag != next(reversed(lags.values())):
                lags[event.time_s] = lag
        return lags

    @cached_property
    def figures(self) -> Figures:
        """The figures after the last event."""
        fold = RunFold(self.total_steps)
        for event in self.events:
            fold.add(event)
        return fold.figures()

    @cached_property
    def lengths(self) -> LengthStatistics:
        """The lengths of generated and trained responses."""
        lengths = LengthStatistics()
        for event in self.events:
            if isinstance(event, RowsEnded):
                lengths.add(event)
        return lengths

    @cached_property
    def samples(self) -> tuple[int, list[dict[str, str | float]]]:
        """The newest recorded step and its first rows; no rows if the last steps are not recorded."""
        newest = self.steps[-1].step if self.steps else -1
        for step in range(newest, max(newest - 4, -1), -1):
            with contextlib.suppress(OSError, ValueError, KeyError):  # not yet written
                return step, sample_rows(step_path(self.directory or Path(), step))
        return newest, []

    def metric(self, name: str) -> list[float]:
        """A metric, one value per step; nan if a step lacks it."""
        return [step.metrics.get(name, math.nan) for step in self.steps]


def read_record(run_dir: Path, running_steps: int | None = None) -> RunRecord:
    """Read a run directory. ``running_steps``: the wanted number of steps of a running run; its summary, left by an
    earlier process, is not read. Raises ConfigError if the directory holds no events."""
    path = run_dir / EVENTS
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {EVENTS}: give the directory of a run, such as runs/demo")
    found = list(read_events(path))
    if running_steps is not None and found and found[-1] is None:
        found.pop()  # it is being written
    events = [event for event in found if event is not None]
    skipped, remarks, summary = len(found) - len(events), list[str](), dict[str, Any]()
    if skipped:
        lines = "1 line" if skipped == 1 else f"{skipped:,} lines"
        remarks.append(f"{lines} of {EVENTS} could not be read (torn, or written by a newer SDK) and left out.")
    try:
        if running_steps is None:
            summary = msgspec.json.decode((run_dir / SUMMARY).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        remarks.append(f"There is no {SUMMARY}: the run is still going on, or was killed.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remarks.append(f"{SUMMARY} could not be read: {error}.")
    known = {key: value for key, value in summary.items() if value is not None}
    total_steps = running_steps or int(known.get("steps_wanted", 0))
    return RunRecord(run_dir.resolve().name, total_steps, run_dir, events, known, skipped, remarks)


def order(kinds: Iterable[str]) -> list[str]:
    """Sort kinds by rank: known work, other work, waiting."""
    found = set(kinds)
    known = [kind for kind in KINDS if kind in found]
    other = sorted(found - set(KINDS) - {WAIT})
    return [*known, *other, *([WAIT] if WAIT in found else [])]


def flatten(spans: Sequence[Span]) -> list[Interval]:
    """Convert the spans of one worker to intervals without overlaps; join equal neighbours. Spans may overlap (parallel
    requests, a load while generating): at each moment only the first kind of ``order`` counts."""
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
            last = intervals[-1] if intervals else Interval(0.0, -math.inf, "", 0)
            if (last.kind, last.version) == (kind, version) and before - last.end < 1e-6:
                intervals[-1] = last._replace(end=time_s)
            else:
                intervals.append(Interval(before, time_s, kind, version))
        before = time_s
        key = (span.kind, span.version)
        open_[key] = open_.get(key, 0) + change
        if not open_[key]:
            del open_[key]
    return intervals


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
