"""The charts of the report page as inline SVG. Importing this module imports matplotlib.

Each function returns one ``<svg>`` element, or "" if the run has no data for it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...workflow.events.lengths import bin_start
from ..screens.run_progress import TRAILING
from .figures import ACCENT, IDLE, INK, Series, short, step_axis, svg, thin, time_axis, trailing
from .run_record import RunRecord
from .timeline import WAIT, Interval, flatten, lag_curve, order, shares, steady_window

_ORANGE, _RED = "#d55e00", "#d1242f"
_COLOURS = {
    "generate": "#0072b2",
    "train": _ORANGE,
    "reward": "#009e73",
    "publish": "#cc79a7",
    "load": "#e69f00",
    WAIT: IDLE,
}
_OTHERS = ("#56b4e9", "#f0e442", "#8c6bb1", "#7f5539", "#2a9d8f")  # beside the Okabe-Ito colours above
_OTHER = "other"
LANES = 64
"""Most workers in a picture."""
_INTERVALS = 1500
_CELLS = 3600
_SMALL = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "logprob_drift": "log-prob drift",
    "tokens": "tokens in the step",
    "truncated_fraction": "truncated responses",
    "parts": "parts of the step",
}
_PARTS = {"staleness_in_flight_mean": "in flight", "staleness_in_queue_mean": "in the queue"}
_SHOWN_ELSEWHERE = (
    "reward",
    "staleness_mean",
    "staleness_max",
    "staleness_in_flight_max",
    "staleness_in_queue_max",
    *_PARTS,
)


def reward_curve(record: RunRecord) -> str:
    """The reward of each step, its trailing mean, and the score of each evaluation."""
    steps, rewards = _finite(record, "reward")
    if not len(steps):
        return ""

    def _draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot(*thin(steps, rewards), color=ACCENT, alpha=0.45, lw=0.9, label="each step")
        means = trailing(rewards, TRAILING)
        axes.plot(*thin(steps, means), color=ACCENT, lw=2, label=f"mean of the last {TRAILING} steps")
        axes.set(xlabel="step", ylabel="mean reward")
        step_axis(axes, steps)
        if scored := {each.version: each.score for each in record.evaluations}:
            curve = thin(np.array([*scored], float), np.array([*scored.values()]))
            axes.plot(*curve, "s-", color=_ORANGE, lw=1.1, ms=4, label="evaluation of a version")
            axes.set_xlim(right=max(axes.get_xlim()[1], max(scored) + 0.5))
        axes.legend(loc="best")

    return svg("reward", "Reward over steps", 3.0, _draw)


def staleness_and_lag(record: RunRecord) -> str:
    """Staleness over steps, and publish lag over time below it."""
    mean_steps, means = _finite(record, "staleness_mean")
    max_steps, most = _finite(record, "staleness_max")
    times, lags = lag_curve(record.events)
    if not len(means) and not len(most) and len(lags) < 2:
        return ""

    def _draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1)
        upper.plot(*thin(max_steps, most, np.max), color=_ORANGE, lw=3, alpha=0.6, label="oldest token of the step")
        below = np.zeros(len(means))
        for (name, label), colour in zip(_PARTS.items(), ("#56b4e9", "#f0e442"), strict=True):
            part_steps, part = _finite(record, name)
            if len(part_steps) == len(mean_steps):
                steps, top = thin(mean_steps, below + part)
                upper.fill_between(steps, thin(mean_steps, below)[1], top, color=colour, alpha=0.5, lw=0, label=label)
                below = below + part
        upper.plot(*thin(mean_steps, means), color=ACCENT, lw=1.2, label="mean over tokens")
        upper.set(xlabel="step", ylabel="staleness\n(versions)")
        upper.set_ylim(0, max(1.0, *_at_least_one(most), *_at_least_one(means)) * 1.4)
        step_axis(upper, mean_steps if len(mean_steps) else max_steps)
        upper.legend(loc="upper right", ncols=4)
        start, end = _bounds(record)
        ends = [*(t - start for t in times), end - start]
        xs, ys = thin(np.array(ends), np.array([*lags, lags[-1] if lags else 0], float), np.max)
        lower.plot(xs, ys, color=ACCENT, lw=0.9, drawstyle="steps-post")
        lower.set(xlabel="time since start", ylabel="publish lag\n(versions)")
        lower.set_ylim(0, max(1.0, *_at_least_one(ys)) * 1.2)
        for axes in (upper, lower):
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        time_axis(lower, 0.0, end - start)

    return svg("staleness", "Staleness per step and publish lag over time", 3.9, _draw)


def length_histograms(record: RunRecord) -> str:
    """The lengths of generated and of trained responses."""
    tally = record.progress.lengths
    found = {"generated": tally.generated, "trained": tally.trained}
    if not all(lengths.rows for lengths in found.values()):
        return ""
    low = min(min(lengths.bins) for lengths in found.values())
    high = max(max(lengths.bins) for lengths in found.values()) + 1
    each = max((high - low) // 48, 1)  # bins of few rows would be noise
    edges = [*range(low, high, each), high]

    def _draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        xs = [bin_start(number) for number in edges]
        for (name, lengths), colour in zip(found.items(), (IDLE, ACCENT), strict=True):
            counts = [
                100 * sum(n for number, n in lengths.bins.items() if a <= number < b) / lengths.rows
                for a, b in itertools.pairwise(edges)
            ]
            axes.stairs(
                counts, xs, fill=name == "generated", color=colour, lw=1.6, label=f"{name}: mean {lengths.mean:.4g}"
            )
            axes.axvline(lengths.mean, color=colour, lw=1.2, ls=(0, (4, 2)))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        axes.set(xlabel="tokens of a response", ylabel="share of rows, %")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    return svg("lengths", "Response lengths, generated and trained", 2.6, _draw)


def whole_run(record: RunRecord) -> str:
    """One lane per worker: its shares of each slice of time."""
    intervals = _intervals(record)
    if not intervals:
        return ""
    start, end = _bounds(record)
    slices = int(np.clip(_CELLS // len(intervals), 40, 240))
    if 4 * len(record.steps) > slices:
        # Slices about as long as a step would show a beat pattern.
        slices = min(max(len(record.steps) // 2, 40), slices)
    edges = np.linspace(start, end, slices + 1)

    def _draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for lane, (worker, mine) in enumerate(intervals.items()):
            base = np.full(slices, lane + 0.4)
            for kind, share in shares(mine, edges).items():
                top = base - 0.8 * share
                axes.stairs(top, edges - start, baseline=base, fill=True, color=_colour(kind, intervals), lw=0)
                base = top
            failures = record.failures.get(worker, [])
            for time_s in dict(zip(np.digitize(failures, edges), failures, strict=True)).values():  # one a slice
                axes.plot([time_s - start] * 2, [lane - 0.46, lane + 0.46], color=_RED, lw=1.6)
                axes.plot(time_s - start, lane - 0.46, "v", color=_RED, ms=5, clip_on=False)
        failed = any(worker in record.failures for worker in intervals)
        extra = [Line2D([], [], color=_RED, marker="v", ms=5, lw=1.6, label="failed")] if failed else []
        _lanes(axes, intervals, extra)
        time_axis(axes, 0.0, end - start)

    return svg("whole-run", "What each worker did over the whole run", _height(intervals), _draw)


def zoom(record: RunRecord) -> tuple[str, int]:
    """Return the spans of some steady steps in the middle, and the number of steps."""
    everything = _intervals(record)
    for count in (10, 5, 3, 1):
        window = steady_window(record.steps, count)
        if window is None:
            return "", 0
        start, end = window
        intervals = {
            worker: [p._replace(start=max(p.start, start), end=min(p.end, end)) for p in mine if _within(p, window)]
            for worker, mine in everything.items()
        }
        if sum(map(len, intervals.values())) <= _INTERVALS:
            break
    else:
        most = _INTERVALS // len(intervals)
        intervals = {
            worker: heapq.nlargest(most, mine, lambda p: p.end - p.start) for worker, mine in intervals.items()
        }
    origin = _bounds(record)[0]
    steps = [step for step in record.steps if start <= step.time_s <= end][: count + 1]

    def _draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for lane, mine in enumerate(intervals.values()):
            for kind in order(p.kind for p in mine):
                bars = [(p.start - origin, p.end - p.start) for p in mine if p.kind == kind]
                axes.broken_barh(bars, (lane - 0.36, 0.72), color=_colour(kind, everything), lw=0)
            for p in mine:
                if p.kind in ("generate", "train") and p.version >= 0 and p.end - p.start > 0.035 * (end - start):
                    where = ((p.start + p.end) / 2 - origin, lane)
                    axes.text(*where, f"v{p.version}", color="white", ha="center", va="center", size=7)
        for step in steps:
            axes.axvline(step.time_s - origin, color=INK, lw=0.7, ls=(0, (2, 3)), alpha=0.6)
        _lanes(axes, intervals, [Line2D([], [], color=INK, lw=0.7, ls=(0, (2, 3)), label="a step is trained")])
        time_axis(axes, start - origin, end - origin)

    return svg("zoom", "What each worker did during some steps", _height(intervals), _draw), max(len(steps) - 1, 1)


def time_shares(record: RunRecord) -> str:
    """One bar per worker: its time by kind of work."""
    intervals = _intervals(record)
    if not intervals:
        return ""
    whole = np.array(_bounds(record))

    def _draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for lane, mine in enumerate(intervals.values()):
            left = 0.0
            for kind, share in shares(mine, whole).items():
                width = 100 * float(share[0])
                axes.barh(lane, width, left=left, height=0.62, color=_colour(kind, intervals), lw=0)
                if width >= 4:
                    ink = {WAIT: INK, "load": "black"}.get(kind, "white")
                    axes.text(left + width / 2, lane, f"{width:.0f}%", color=ink, ha="center", va="center", size=8)
                left += width
        _lanes(axes, intervals, [])
        axes.set(xlim=(0, 100), xlabel="share of the run, %")

    return svg("shares", "Share of time by kind of work for each worker", _height(intervals), _draw)


def small_multiples(record: RunRecord) -> str:
    """Every other metric, each in a small chart."""
    named = {name for step in record.steps for name in step.metrics} - set(_SHOWN_ELSEWHERE)
    names = [*(n for n in _SMALL if n in named), *sorted(named - set(_SMALL))][:12]
    series = {name: found for name in names if len((found := _finite(record, name))[0])}
    if not series:
        return ""
    columns = 2 if len(series) in (2, 4) else min(len(series), 3)
    rows = math.ceil(len(series) / columns)

    def _draw(figure: Figure) -> None:
        for i, (name, (steps, values)) in enumerate(series.items()):
            axes = figure.add_subplot(rows, columns, i + 1)
            axes.plot(*thin(steps, values), color=ACCENT, lw=0.6, alpha=0.45)
            axes.plot(*thin(steps, trailing(values, TRAILING)), color=ACCENT, lw=1.5)
            axes.set_title(_SMALL.get(name, _cut(name.replace("_", " "))))
            step_axis(axes, steps, most=5)
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axes.yaxis.set_major_formatter(FuncFormatter(short))

    return svg("metrics", "Other metrics over steps", 1.7 * rows + 0.1, _draw)


def _intervals(record: RunRecord) -> dict[str, list[Interval]]:
    """The work of the first workers. Kinds of work without a colour of their own are one kind."""
    lanes = itertools.islice(record.spans.items(), LANES)
    found = {worker: intervals for worker, spans in lanes if (intervals := flatten(spans))}
    others = set(_uncoloured(found)[len(_OTHERS) - 1 :])
    if len(others) < 2:
        return found
    return {
        worker: [p._replace(kind=_OTHER) if p.kind in others else p for p in mine] for worker, mine in found.items()
    }


def _uncoloured(intervals: Mapping[str, Sequence[Interval]]) -> list[str]:
    return [kind for kind in order(p.kind for mine in intervals.values() for p in mine) if kind not in _COLOURS]


def _bounds(record: RunRecord) -> tuple[float, float]:
    start = record.progress.start_s
    return start, max(record.progress.now_s, start + 1e-3)


def _within(piece: Interval, window: tuple[float, float]) -> bool:
    return piece.end > window[0] and piece.start < window[1]


def _height(lanes: Mapping[str, object]) -> float:
    return 0.95 + max(0.42 * min(len(lanes), 12), 0.2 * len(lanes))


def _colour(kind: str, intervals: Mapping[str, Sequence[Interval]]) -> str:
    if kind in _COLOURS:
        return _COLOURS[kind]
    return _OTHERS[_uncoloured(intervals).index(kind) % len(_OTHERS)]


def _lanes(axes: Axes, intervals: Mapping[str, Sequence[Interval]], extra: Sequence[Line2D]) -> None:
    axes.set_yticks(range(len(intervals)), [_cut(worker) for worker in intervals])
    axes.set_ylim(len(intervals) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    kinds = order(p.kind for mine in intervals.values() for p in mine)
    handles: list[Patch | Line2D] = [Patch(color=_colour(kind, intervals), label=_cut(kind)) for kind in kinds]
    handles += extra
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=8, handlelength=1.1, borderaxespad=0.2
    )


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _finite(record: RunRecord, name: str) -> tuple[Series, Series]:
    steps = np.array([step.step for step in record.steps], float)
    values = np.array(record.metric(name), float)
    good = np.isfinite(values)
    return steps[good], values[good]


def _at_least_one(values: Series) -> list[float]:
    return [float(values.max())] if len(values) else [0.0]
