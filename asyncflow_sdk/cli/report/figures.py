"""Figures: matplotlib figures as inline ``<svg>``, and their common axes.

    svg("reward", "Reward over steps", 3.0, lambda figure: figure.add_subplot().plot(steps, rewards))

Importing this module imports matplotlib. Text and lines use the page's colours, so one figure
serves the light and the dark theme; text stays text in the page's font.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

Series = npt.NDArray[np.float64]
INK, GRID, IDLE, ACCENT = "#010203", "#010204", "#010205", "#010206"
"""Placeholders, replaced by the page's colours in the SVG."""
_PAGE_COLOURS = {INK: "currentColor", GRID: "var(--grid)", IDLE: "var(--idle)", ACCENT: "var(--accent)"}
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
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 8.5,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.pad": 6,
    "ytick.major.pad": 5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
}


def svg(name: str, label: str, height_in: float, draw: Callable[[Figure], None]) -> str:
    """Return the figure drawn by ``draw`` as SVG. ``name`` prefixes its ids: several figures share
    a page."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        # The browser has a font for scripts missing in this one.
        warnings.simplefilter("ignore", UserWarning)
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update(_STYLE)
        figure = Figure(figsize=(_WIDTH_IN, height_in))
        draw(figure)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)  # 1/100 pt is enough
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for stand_in, colour in _PAGE_COLOURS.items():
        text = text.replace(stand_in, colour)
    opening = f'<svg role="img" aria-label="{escape(label)}" xmlns:xlink="http://www.w3.org/1999/xlink" '
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]+")[^>]*>', lambda found: f"{opening}{found[1]}>", text, count=1)
    return text.strip()


def time_axis(axes: Axes, low: float, high: float) -> None:
    """Label the x axis with minutes and seconds, or with hours for a long run."""
    tenth = max(high - low, 1e-3) / 10
    scale = (0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
    step = next((s for s in scale if s >= tenth), math.ceil(tenth / 86400) * 86400)
    digits = next(d for d in range(4) if round(step, d) == step)

    def _clock(seconds: float, _: int | None) -> str:
        seconds = round(seconds, digits)
        whole = int(seconds)
        part = f"{seconds - whole:.{digits}f}"[1:] if digits else ""
        hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else f"{whole // 60}"
        return f"{hours}:{whole % 60:02}{part}"

    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    axes.set_xlabel(
        "time since start (hours:minutes:seconds)" if high >= 3600 else "time since start (minutes:seconds)"
    )


def step_axis(axes: Axes, steps: Series, most: int = 9) -> None:
    """Label the x axis with whole steps. Fewer than 12 steps are drawn as dots: one step makes no
    line."""
    low, high = (float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 0.0)
    room = max(0.01 * (high - low), 0.5)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(most, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    if len(steps) < _DOTTED:
        for line in axes.lines:
            line.set(marker="o", markersize=3.5)


def short(value: float, _: int | None) -> str:
    """Format a tick: 12, 340, 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:g}"


def trailing(values: Series, last: int) -> Series:
    """Return the mean of each value and up to ``last`` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - last, 0)
    means: Series = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def thin(xs: Series, ys: Series, merge: Callable[..., float] = np.mean) -> tuple[Series, Series]:
    """Reduce a curve to at most 1000 points by merging neighbours."""
    if len(xs) <= _POINTS:
        return xs, ys
    groups = np.array_split(np.arange(len(xs)), _POINTS)
    return np.array([xs[g[0]] for g in groups]), np.array([merge(ys[g]) for g in groups])
