"""Lines: what pictures on a terminal are laid out of. A line is a row of cells; a cell is text and its style."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

LABEL = 11
"""Cells of a label at the left."""
_BARS = "▁▂▃▄▅▆▇█"
_ASCII = str.maketrans("▁▂▃▄▅▆▇█━╸─●○·…–", "_..-=+*##--*o.~-")

Cell = tuple[str | Text, str]
"""Text and its style; a Text has its own."""


def laid_out(cells: Sequence[Cell], width: int, indent: str = " ", pad: bool = False) -> Text:
    """Cells one after another, in at most ``width`` cells after ``indent``."""
    line = Text(indent, no_wrap=True)
    for text, style in cells:
        if isinstance(text, Text):
            line.append_text(text)
        else:
            line.append(text, style)
    line.truncate(width + len(indent), overflow="ellipsis", pad=pad)
    return line


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """One bar a value, between ``low`` and ``high``."""
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(max(round((v - low) * scale), 0), len(_BARS) - 1)] for v in values)


def duration(seconds: float) -> str:
    """Seconds as people read them: 45 s, 2:05, 1:02:03. Unknown ones are a dash."""
    if not math.isfinite(seconds):
        return "–"
    whole = max(round(seconds), 0)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02}:{left:02}"
    return f"{minutes}:{left:02}" if minutes else f"{left} s"


def number(value: float, digits: int = 2) -> str:
    """A measured number; a dash when there is none."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "–"


def rate(value: float) -> str:
    """Rows a second in few cells: 0.4, 12, 3,400, 12.3k; a dash when it is not known."""
    if not math.isfinite(value):
        return "–"
    if 0 < value < 10:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 10_000 else f"{value / 1000:,.1f}k" if value < 1e6 else f"{value / 1e6:,.1f}M"


def size(nbytes: float) -> str:
    """Bytes as people read them."""
    if not math.isfinite(nbytes):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 100 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def printable(text: str) -> str:
    """``text`` on one line, without control characters: what workers write must not drive the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def to_ascii(text: str) -> str:
    """For terminals that know no other letters."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Parts joined by dots, on as many lines as they need."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + cell_len(part) + 3 <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def label(name: str) -> Cell:
    """What a line is about, at its left."""
    return f"{name:<{LABEL}}", "dim"


def head(name: str, width: int) -> Cell:
    """The head of a first column."""
    return f"{name:<{width}}", "bold dim"


def fit(text: str, width: int) -> str:
    """``text`` in exactly ``width`` cells, the last one blank."""
    cut = Text(printable(text))
    cut.truncate(width - 1, overflow="ellipsis", pad=True)
    return cut.plain + " "
