"""The charts of the page of a run as inline SVG. Importing this module imports matplotlib.

A chart of a run without data for it is "". Text and lines use the page's colours, so one picture serves the light and
the dark theme; text stays text in the page's font.
"""

from __future__ import annotations

import heapq
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from ...workflow.loops.statistics import bin_start
from ..figures import TRAILING
from ..formats import duration
from .run_record import WAIT, Interval, RunRecord, order, shares, steady_window

_Series = npt.NDArray[np.float64]
_INK, _GRID, _IDLE, _ACCENT = "#010203", "#010204", "#010205", "#010206"
"""Placeholders, replaced by the page's colours in the SVG."""
_PAGE_COLOURS = {_INK: "currentColor", _GRID: "var(--grid)", _IDLE: "var(--idle)", _ACCENT: "var(--accent)"}
_WIDTH_IN = 9.0
_POINTS = 1000
_DOTTED = 12
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "asyncflow",
    "text.parse_math": False,  # a worker may be called a$b$
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _GRID),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "legend.labelcolor"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    **dict.fromkeys(("xtick.major.pad", "ytick.major.pad"), 6),
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
}


_ORANGE, _RED = "#d55e00", "#d1242f"
_COLOURS = {
    "generate": "#0072b2",
    "train": _ORANGE,
    "reward": "#009e73",
    "publish": "#cc79a7",
    "load": "#e69f00",
    WAIT: _IDLE,
}
_OTHERS = ("#56b4e9", "#f0e442", "#8c6bb1", "#7f5539", "#2a9d8f")  # beside the Okabe-Ito colours above
_OTHER = "other"
LANES = 64
"""Most workers in a picture."""
MINUTE_S = 60.0
_INTERVALS = 1500
_CELLS = 3600
_MARKS = 40
_SMALL = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "logprob_drift": "log-prob drift",
    "tokens": "tokens in the step",
    "truncated_fraction": "truncated responses",
    "parts": "parts of the step",
}
_PARTS = {
    "staleness_in_flight_mean": ("in flight", "#56b4e9"),
    "staleness_in_queue_mean": ("in the queue", "#f0e442"),
}
_LARGE = {"reward", "staleness_mean", "staleness_max", "staleness_in_flight_max", "staleness_in_queue_max", *_PARTS}
"""Metrics with a chart of their own."""


def drawn(record: RunRecord, now_s: float | None) -> tuple[dict[str, str], int]:
    """Return all charts of a run by name, and the number of steps in the chart "zoom". ``now_s``: the time now of a
    running run, whose last minute is drawn, too."""
    lanes = _Lanes(record)
    window, steps = _steady(record, lanes)
    charts: dict[str, tuple[str, Callable[[Figure], None]]] = {
        "reward": ("Reward over steps", lambda figure: _reward(figure, record)),
        "staleness": ("Staleness per step and publish lag over time", lambda figure: _staleness(figure, record)),
        "lengths": ("Response lengths, generated and trained", lambda figure: _lengths(figure, record)),
        "whole": ("What each worker did over the whole run", lambda figure: _whole_run(figure, record, lanes)),
        "zoom": ("What each worker did during some steps", lambda figure: _work(figure, record, lanes, window)),
        "shares": ("Share of time by kind of work for each worker", lambda figure: _shares(figure, lanes)),
        "metrics": ("Other metrics over steps", lambda figure: _metrics(figure, record)),
    }
    if now_s is not None:
        minute = max(now_s - MINUTE_S, lanes.bounds[0]), now_s
        charts["minute"] = "What each worker did", lambda figure: _work(figure, record, lanes, minute)
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has a font for scripts missing in this one.
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        return {name: _svg(name, label, draw) for name, (label, draw) in charts.items()}, steps


def _svg(name: str, label: str, draw: Callable[[Figure], None]) -> str:
    """Return the figure drawn by ``draw`` as one SVG element; "" if it has no axes. ``name`` prefixes its ids: several
    figures share a page."""
    figure = Figure(figsize=(_WIDTH_IN, 3.0))
    draw(figure)
    if not figure.axes:
        return ""
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<\w[^<>]*?) style="([^"]*)"', _as_attributes, text)  # the policy of a live page allows no styles
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # 1/100 pt is enough
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for stand_in, colour in _PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    opening = f'<svg role="img" aria-label="{escape(label)}" xmlns:xlink="http://www.w3.org/1999/xlink" '
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', lambda found: f"{opening}{found[1]}>", text, count=1)
    return text.strip()


def _as_attributes(tag: re.Match[str]) -> str:
    """Write the inline style of a tag as attributes. The page sets the family of fonts."""
    found = [tag[1]]
    for declaration in tag[2].split("; "):
        name, _, value = declaration.partition(": ")
        found.append(f'font-size="{value.split("px")[0]}px"' if name == "font" else f'{name}="{value}"')
    return " ".join(found)


def _reward(figure: Figure, record: RunRecord) -> None:
    steps, rewards = _finite(record, "reward")
    if not len(steps):
        return
    axes = figure.add_subplot()
    axes.plot(*_thin(steps, rewards), color=_ACCENT, alpha=0.45, lw=0.9, label="each step")
    means = _trailing(rewards, TRAILING)
    axes.plot(*_thin(steps, means), color=_ACCENT, lw=2, label=f"mean of the last {TRAILING} steps")
    axes.set(xlabel="step", ylabel="mean reward")
    _step_axis(axes, steps)
    if scored := {each.version: each.score for each in record.evaluations}:
        curve = _thin(np.array([*scored], float), np.array([*scored.values()]))
        axes.plot(*curve, "s-", color=_ORANGE, lw=1.1, ms=4, label="evaluation of a version")
        axes.set_xlim(right=max(axes.get_xlim()[1], max(scored) + 0.5))
    axes.legend(loc="best")


def _staleness(figure: Figure, record: RunRecord) -> None:
    mean_steps, means = _finite(record, "staleness_mean")
    max_steps, most = _finite(record, "staleness_max")
    lags = [*record.lags.values(), next(reversed(record.lags.values()), 0)]  # the last one lasts until the end
    if not len(means) and not len(most) and len(record.lags) < 2:
        return
    figure.set_figheight(3.9)
    upper, lower = figure.subplots(2, 1)
    upper.plot(*_thin(max_steps, most, np.max), color=_ORANGE, lw=3, alpha=0.6, label="oldest token of the step")
    below = np.zeros(len(means))
    for name, (label, colour) in _PARTS.items():
        part_steps, part = _finite(record, name)
        if len(part_steps) == len(mean_steps):
            steps, top = _thin(mean_steps, below + part)
            upper.fill_between(steps, _thin(mean_steps, below)[1], top, color=colour, alpha=0.5, lw=0, label=label)
            below = below + part
    upper.plot(*_thin(mean_steps, means), color=_ACCENT, lw=1.2, label="mean over tokens")
    upper.set(xlabel="step", ylabel="staleness\n(versions)")
    upper.set_ylim(0, max([1.0, *most, *means]) * 1.4)
    _step_axis(upper, mean_steps if len(mean_steps) else max_steps)
    upper.legend(loc="upper right", ncols=4)
    start, end = _bounds(record)
    xs, ys = _thin(np.array([*record.lags, end]) - start, np.array(lags, float), np.max)
    lower.plot(xs, ys, color=_ACCENT, lw=0.9, drawstyle="steps-post")
    lower.set(xlabel="time since start", ylabel="publish lag\n(versions)")
    lower.set_ylim(0, max([1.0, *ys]) * 1.2)
    for axes in (upper, lower):
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    _time_axis(lower, 0.0, end - start)


def _lengths(figure: Figure, record: RunRecord) -> None:
    found = {"generated": record.lengths.generated, "trained": record.lengths.trained}
    if not all(lengths.rows for lengths in found.values()):
        return
    low = min(min(lengths.bins) for lengths in found.values())
    high = max(max(lengths.bins) for lengths in found.values()) + 1
    each = max((high - low) // 48, 1)  # bins of few rows would be noise
    edges = [*range(low, high, each), high]
    figure.set_figheight(2.6)
    axes = figure.add_subplot()
    for (name, lengths), colour in zip(found.items(), (_IDLE, _ACCENT), strict=True):
        bins, mean = lengths.bins, lengths.mean
        counts = [sum(bins.get(number, 0) for number in range(a, b)) for a, b in itertools.pairwise(edges)]
        percent, xs = 100 * np.array(counts) / lengths.rows, [bin_start(number) for number in edges]
        axes.stairs(percent, xs, fill=name == "generated", color=colour, lw=1.6, label=f"{name}: mean {mean:.4g}")
        axes.axvline(mean, color=colour, lw=1.2, ls=(0, (4, 2)))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(_short))
    axes.set(xlabel="tokens of a response", ylabel="share of rows, %")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)


def _metrics(figure: Figure, record: RunRecord) -> None:
    named = {name for step in record.steps for name in step.metrics} - _LARGE
    names = [*(name for name in _SMALL if name in named), *sorted(named - set(_SMALL))][:12]
    series = {name: found for name in names if len((found := _finite(record, name))[0])}
    columns = 2 if len(series) in (2, 4) else min(len(series), 3)
    rows = math.ceil(len(series) / max(columns, 1))
    figure.set_figheight(1.7 * rows + 0.1)
    for i, (name, (steps, values)) in enumerate(series.items()):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.plot(*_thin(steps, values), color=_ACCENT, lw=0.6, alpha=0.45)
        axes.plot(*_thin(steps, _trailing(values, TRAILING)), color=_ACCENT, lw=1.5)
        axes.set_title(_SMALL.get(name, _cut(name.replace("_", " "))))
        _step_axis(axes, steps, most=5)
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))


class _Lanes:
    """The work of the first workers, a colour for each kind of work, and axes with a lane per worker. Of many kinds
    without a colour of their own, some are drawn as one kind."""

    def __init__(self, record: RunRecord) -> None:
        self.bounds = _bounds(record)
        self.work = {name: mine for name, mine in itertools.islice(record.intervals.items(), LANES) if mine}
        others = [kind for kind in self._kinds(self.work) if kind not in _COLOURS]
        if len(others) > len(_OTHERS):
            joined = set(others[len(_OTHERS) - 1 :])
            others = [*others[: len(_OTHERS) - 1], _OTHER]
            for name, mine in self.work.items():
                self.work[name] = [each._replace(kind=_OTHER) if each.kind in joined else each for each in mine]
        self.colours = _COLOURS | dict(zip(others, _OTHERS, strict=False))

    def within(self, window: tuple[float, float]) -> dict[str, list[Interval]]:
        """Return the work within a window of time."""
        start, end = window
        return {
            name: [
                each._replace(start=max(each.start, start), end=min(each.end, end))
                for each in mine
                if each.end > start and each.start < end
            ]
            for name, mine in self.work.items()
        }

    def axes(self, figure: Figure, work: Mapping[str, Sequence[Interval]], *marks: Line2D) -> Axes:
        """Add axes with a lane per worker, and a legend of the kinds of work and of ``marks``."""
        figure.set_figheight(0.95 + max(0.42 * min(len(work), 12), 0.2 * len(work)))
        axes = figure.add_subplot()
        axes.set_yticks(range(len(work)), [_cut(worker) for worker in work])
        axes.set_ylim(len(work) - 0.45, -0.55)
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        kinds = [Patch(color=self.colours[kind], label=_cut(kind)) for kind in self._kinds(work)]
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        axes.legend(handles=[*kinds, *marks], ncols=8, handlelength=1.1, **place)
        return axes

    @staticmethod
    def _kinds(work: Mapping[str, Sequence[Interval]]) -> list[str]:
        return order(each.kind for mine in work.values() for each in mine)


def _whole_run(figure: Figure, record: RunRecord, lanes: _Lanes) -> None:
    """One lane per worker: its shares of each slice of time."""
    if not lanes.work:
        return
    start, end = lanes.bounds
    slices = int(np.clip(_CELLS // len(lanes.work), 40, 240))
    if 4 * len(record.steps) > slices:
        # Slices about as long as a step would show a beat pattern.
        slices = min(max(len(record.steps) // 2, 40), slices)
    edges = np.linspace(start, end, slices + 1)
    failed = [Line2D([], [], color=_RED, marker="v", ms=5, lw=1.6, label="failed")]
    axes = lanes.axes(figure, lanes.work, *(failed if lanes.work.keys() & record.failures.keys() else ()))
    for lane, (worker, mine) in enumerate(lanes.work.items()):
        base = np.full(slices, lane + 0.4)
        for kind, share in shares(mine, edges).items():
            top = base - 0.8 * share
            axes.stairs(top, edges - start, baseline=base, fill=True, color=lanes.colours[kind], lw=0)
            base = top
        failures = record.failures.get(worker, [])
        for time_s in dict(zip(np.digitize(failures, edges), failures, strict=True)).values():  # one a slice
            axes.plot([time_s - start] * 2, [lane - 0.46, lane + 0.46], color=_RED, lw=1.6)
            axes.plot(time_s - start, lane - 0.46, "v", color=_RED, ms=5, clip_on=False)
    _time_axis(axes, 0.0, end - start)


def _steady(record: RunRecord, lanes: _Lanes) -> tuple[tuple[float, float], int]:
    """Return the start and end of some steady steps in the middle, and their number; 0 if there are none."""
    window, steps = (0.0, 0.0), 0
    for count in (10, 5, 3, 1):
        found = steady_window(record.steps, count)
        if found is None:
            break
        window, steps = found, min(sum(found[0] <= step.time_s <= found[1] for step in record.steps) - 1, count)
        if sum(map(len, lanes.within(window).values())) <= _INTERVALS:
            break
    return window, max(steps, 1) if window[1] else 0


def _work(figure: Figure, record: RunRecord, lanes: _Lanes, window: tuple[float, float]) -> None:
    """Each piece of work within a window of time; of very many, the longest."""
    (start, end), origin, work = window, lanes.bounds[0], lanes.within(window)
    if not any(work.values()):
        return
    if sum(map(len, work.values())) > _INTERVALS:
        most = _INTERVALS // len(work)
        work = {name: heapq.nlargest(most, mine, lambda each: each.end - each.start) for name, mine in work.items()}
    axes = lanes.axes(figure, work, Line2D([], [], color=_INK, lw=0.7, ls=(0, (2, 3)), label="a step is trained"))
    for lane, mine in enumerate(work.values()):
        for kind in order(each.kind for each in mine):
            bars = [(each.start - origin, each.end - each.start) for each in mine if each.kind == kind]
            axes.broken_barh(bars, (lane - 0.36, 0.72), color=lanes.colours[kind], lw=0)
        for each in mine:
            wide = each.end - each.start > 0.035 * (end - start)
            if wide and each.kind in ("generate", "train") and each.version >= 0:
                where = ((each.start + each.end) / 2 - origin, lane)
                axes.text(*where, f"v{each.version}", color="white", ha="center", va="center", size=7)
    steps = [step.time_s - origin for step in record.steps if start <= step.time_s <= end]
    for time_s in steps if len(steps) <= _MARKS else ():
        axes.axvline(time_s, color=_INK, lw=0.7, ls=(0, (2, 3)), alpha=0.6)
    _time_axis(axes, start - origin, end - origin)


def _shares(figure: Figure, lanes: _Lanes) -> None:
    if not lanes.work:
        return
    axes = lanes.axes(figure, lanes.work)
    for lane, mine in enumerate(lanes.work.values()):
        left = 0.0
        for kind, share in shares(mine, np.array(lanes.bounds)).items():
            width = 100 * float(share[0])
            axes.barh(lane, width, left=left, height=0.62, color=lanes.colours[kind], lw=0)
            if width >= 4:
                ink = {WAIT: _INK, "load": "black"}.get(kind, "white")
                axes.text(left + width / 2, lane, f"{width:.0f}%", color=ink, ha="center", va="center", size=8)
            left += width
    axes.set(xlim=(0, 100), xlabel="share of the run, %")


def _bounds(record: RunRecord) -> tuple[float, float]:
    start = record.figures.start_s
    return start, max(record.figures.now_s, start + 1e-3)


def _cut(name: str, most: int = 28) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _finite(record: RunRecord, name: str) -> tuple[_Series, _Series]:
    steps = np.array([step.step for step in record.steps], float)
    values = np.array(record.metric(name), float)
    good = np.isfinite(values)
    return steps[good], values[good]


def _time_axis(axes: Axes, low: float, high: float) -> None:
    """Label the x axis with seconds, or with minutes and hours for a long run."""
    tenth = max(high - low, 1e-3) / 10
    scale = (0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
    step = next((each for each in scale if each >= tenth), math.ceil(tenth / 86400) * 86400)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: duration(s) if step >= 1 else f"{s:.3f}".rstrip("0")))
    axes.set_xlabel("time since start" if step >= 1 else "time since start (seconds)")


def _step_axis(axes: Axes, steps: _Series, most: int = 9) -> None:
    """Label the x axis with whole steps. Fewer than 12 steps are drawn as dots: one step makes no
    line."""
    low, high = (float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 0.0)
    room = max(0.01 * (high - low), 0.5)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    if len(steps) < _DOTTED:
        for line in axes.lines:
            line.set(marker="o", markersize=3.5)


def _short(value: float, _: int | None) -> str:
    """Format a tick: 12, 340, 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def _trailing(values: _Series, last: int) -> _Series:
    """Return the mean of each value and up to ``last`` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - last, 0)
    means: _Series = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def _thin(xs: _Series, ys: _Series, merge: Callable[..., float] = np.mean) -> tuple[_Series, _Series]:
    """Reduce a curve to at most 1000 points by merging neighbours."""
    if len(xs) <= _POINTS:
        return xs, ys
    groups = np.array_split(np.arange(len(xs)), _POINTS)
    return np.array([xs[g[0]] for g in groups]), np.array([merge(ys[g]) for g in groups])
