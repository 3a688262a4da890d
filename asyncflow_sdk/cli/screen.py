"""Parts of a screen: rich tables fitted into a terminal.

    lines = fit(lambda lines: [Text("title"), table(lines)], width=80, height=24, most=6)

``lines`` is the number of lines for a ``Clipped`` cell: as many as the height allows.
"""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .figures import Rates
from .formats import plural, printable, rate, sparkline, to_ascii

PATIENCE_S = 1.0
"""A wait shorter than this is normal and not highlighted (seconds)."""
NARROW, WIDE = 70, 90
_STATES = ("waiting", "ready", "selected", "leased", "done")
_Entry = TypeVar("_Entry")


class Clipped:
    """A table cell: ``text`` wrapped to at most ``lines`` lines, then cut with an ellipsis."""

    def __init__(self, text: str, style: str = "", lines: int = 1) -> None:
        self._text, self._style, self._lines = printable(text), style, lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = cell_len(self._text)
        return Measurement(min(longest, 8), longest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 1)
        parts = textwrap.wrap(self._text, width, max_lines=self._lines, placeholder="…", break_on_hyphens=False)
        for part in parts or [""]:
            yield Text(part, self._style, no_wrap=True, overflow="ellipsis")


def table(*heads: str, first: int | None = None, numbers: int = 0) -> Table:
    """Make a table without borders. ``first``: cells of its first column. ``numbers``: the least width of the other
    columns, then aligned right."""
    made = Table(
        box=None, padding=(0, 1 if numbers else 2, 0, 0), pad_edge=False, header_style="dim", show_header=any(heads)
    )
    for i, head in enumerate(heads):
        text = Text(head, "" if i else "bold dim")
        if i and numbers:
            made.add_column(text, justify="right", no_wrap=True, overflow="ellipsis", min_width=numbers)
        elif i and i == len(heads) - 1:
            made.add_column(text, overflow="ellipsis", min_width=12)
        else:
            made.add_column(text, no_wrap=True, overflow="ellipsis", width=None if i else first)
    return made


def first_width(names: Iterable[str], least: int, most: int) -> int:
    """Return the cells of a first column for ``names``, each after a mark."""
    return min(max([least, *(cell_len(printable(name)) + 2 for name in names)]), max(most, least), 28)


def name(text: str, style: str, mark: str = "●") -> Text:
    """A worker's or client's name after a coloured mark."""
    return Text.assemble((f"{mark} ", style), printable(text))


def cut(entries: Sequence[_Entry], most: int, noun: str) -> tuple[Sequence[_Entry], list[Text]]:
    """Return as many entries as fit into ``most`` lines, and the line for the others, if any."""
    shown = entries if len(entries) <= most else entries[: max(most - 1, 1)]
    rest = len(entries) - len(shown)
    return shown, [Text(f"and {plural(rest, f'more {noun}')}", "dim")] if rest else []


def bar(done: int, total: int, width: int) -> Text:
    """Draw a progress bar of ``width`` cells; the part left is visible without colours, too."""
    filled = min(width * done // max(total, 1), width)
    return Text.assemble(("━" * filled, "cyan"), ("─" * (width - filled), "dim"))


def task_table(
    rows: Mapping[str, Mapping[str, int]],
    width: int,
    most: int,
    rates: Rates | None = None,
    history: Mapping[str, Sequence[float]] | None = None,
) -> list[RenderableType]:
    """The rows of each task by state and, with ``rates``, the rows per second in and out, also of the past if there is
    room."""
    found = {state for counts in rows.values() for state, count in counts.items() if count or state != "selected"}
    states = [*(state for state in _STATES if state in found or not found), *sorted(found.difference(_STATES))]
    shown, rest = cut(list(rows), most - 1, "task")
    first, numbers = first_width(shown, 9, max(width // 4, 10)), 8 if width >= NARROW else 5
    exact = 10 ** (9 if width >= WIDE else 6 if width >= NARROW else 0)
    heads = [*states, *(("in/s", "out/s") if rates else ())]
    made = table("ROWS", *heads, first=first, numbers=numbers)
    room = width - first - (numbers + 1) * len(heads) - 2
    if room >= 12:
        made.add_column(no_wrap=True)
    for task in shown:
        counts = [rows[task].get(state, 0) for state in states]
        cells = [Text(f"{n:,}" if n < exact else rate(n), "" if n else "dim") for n in counts]
        if rates:
            flow = (rates.arrived.get(task, math.nan), rates.completed.get(task, math.nan))
            cells += [Text(rate(value), "" if value > 0 else "dim") for value in flow]
        past = [*(history or {}).get(task, ())][-room:]
        if room >= 12 and len(past) > 1 and max(past):
            cells.append(Text(sparkline(past, 0.0, max(past)), "cyan"))
        made.add_row(printable(task), *cells)
    return [made, *rest, *([] if rows else [Text("none is declared yet", "dim")])]


def ended_rows(ended: Mapping[str, int], first: int, per_second: float = math.nan) -> Table:
    """The ended rows by state, most first."""
    made = table("", "", first=first)
    parts = [f"{state} {count:,}" for state, count in sorted(ended.items(), key=lambda item: -item[1]) if count]
    parts += [f"{rate(per_second)}/s"] if math.isfinite(per_second) else []
    made.add_row(Text("ended", "dim"), Clipped(" · ".join(parts) or "–", lines=2))
    return made


def fit(
    draw: Callable[[int], Sequence[RenderableType]], width: int, height: int, *, most: int, ascii_only: bool = False
) -> list[Text]:
    """Render ``draw`` into at most ``height`` lines of fewer than ``width`` cells. It is called
    with the largest number of lines per cell, at most ``most``, for which the result fits."""
    for each in range(most, 0, -1):
        lines = render(draw(each), width)
        if len(lines) <= height:
            break
    return [Text(to_ascii(line.plain), no_wrap=True) for line in lines[:height]] if ascii_only else lines[:height]


def render(parts: Sequence[RenderableType], width: int) -> list[Text]:
    """Render to lines. A column stays free on both sides: a filled last cell makes some terminals
    wrap."""
    console = _console()
    options = console.options.update(width=width - 2, no_wrap=True, overflow="ellipsis")
    lines = []
    for part in parts:
        for segments in console.render_lines(part, options, pad=False):
            line = Text(" ", no_wrap=True)
            for text, style, *_ in segments:
                line.append(text, style)
            line.rstrip()
            line.truncate(width - 1, overflow="ellipsis")
            lines.append(line)
    return lines


@functools.cache
def _console() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system="256", _environ={})
