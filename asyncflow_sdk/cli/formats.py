"""Numbers, times and names as text for people."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans("▁▂▃▄▅▆▇█━╸─●○·…–", "_..-=+*##--*o.~-")


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Draw one bar per value, scaled to the range from ``low`` to ``high``."""
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(max(round((v - low) * scale), 0), len(_BARS) - 1)] for v in values)


def sampled(values: Sequence[float], count: int) -> Sequence[float]:
    """Return the series as at most ``count`` means, each over about the same number of values."""
    edges = [i * len(values) // max(count, 1) for i in range(max(count, 0) + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if a < b]
    return means if len(values) > count else values


def duration(seconds: float) -> str:
    """Format seconds: 45 s, 2:05, 1:02:03. An infinite or nan value becomes a dash."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(round(seconds), 0)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left} s"


def number(value: float, digits: int = 2) -> str:
    """Format a measured number; an infinite or nan value becomes a dash."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def rate(value: float) -> str:
    """Format a count or a rate in few cells: 0.4, 12, 3,400, 12.3k. An infinite or nan value
    becomes a dash."""
    if not math.isfinite(value):
        return "–"
    if 0 < value < 10 and value % 1:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.1f}k" if value < 1e6 else f"{value / 1e6:,.1f}M"


def size(nbytes: float) -> str:
    """Format bytes with a decimal unit: 1.5 kB, 250 MB. An infinite or nan value becomes a dash."""
    if not math.isfinite(nbytes):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 lease, 2 leases."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Replace control characters and line breaks by spaces: text from workers must not control the
    terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def to_ascii(text: str) -> str:
    """Replace every character outside ASCII, for terminals without UTF-8."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def by_name(name: str) -> list[tuple[int, str]]:
    """Return a sorting key in natural order: rollout-2 before rollout-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
