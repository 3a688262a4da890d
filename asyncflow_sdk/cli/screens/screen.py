"""Screens: rich tables fitted into a terminal.

    lines = fit(lambda lines: [Text("title"), rows(lines)], width=80, height=24, most=6)

``lines`` is the number of lines for a ``Clipped`` cell: as many as the height allows.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..formats import plural, printable, sparkline, to_ascii

PATIENCE_S = 1.0
"""A wait shorter than this is normal and not highlighted (seconds)."""


class Clipped:
    """A table cell: ``text`` wrapped to at most ``lines`` lines, then cut with an ellipsis."""

    def __init__(self, text: str, style: str = "", lines: int = 1) -> None:
        self.text, self._style, self._lines = printable(text), style, lines

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = cell_len(self.text)
        return Measurement(min(longest, 8), longest).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width, 1)
        parts = textwrap.wrap(self.text, width, max_lines=self._lines, placeholder="…", break_on_hyphens=False)
        for part in parts or [""]:
            yield Text(part, self._style, no_wrap=True, overflow="ellipsis")


class Sparkline:
    """A table cell: the newest of ``values`` as bars, as many as fit; nothing in less than 12
    cells."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = values

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, len(self._values)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._values[-options.max_width :] if options.max_width >= 12 or len(self._values) < 12 else []
        if len(shown) > 1 and max(shown):
            yield Text(sparkline(shown, 0.0, max(shown)), "cyan", no_wrap=True, overflow="crop")


def table(*heads: str, first: int | None = None, numbers: int = 0) -> Table:
    """Make a table without borders. ``first``: cells of its first column. ``numbers``: align the
    others right, at least so wide."""
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


def name(text: str, style: str | None = None, mark: str = "●") -> Text:
    """A worker's or client's name after a coloured mark; without ``style`` only the name."""
    return Text(printable(text)) if style is None else Text.assemble((f"{mark} ", style), printable(text))


def more(count: int, noun: str) -> list[Text]:
    """A line for entries left out of a table; no line for none."""
    return [Text(f"and {plural(count, f'more {noun}')}", "dim")] if count else []


def bar(done: int, total: int, width: int) -> Text:
    """Draw a progress bar of ``width`` cells; the part left is visible without colours, too."""
    filled = min(width * done // max(total, 1), width)
    return Text.assemble(("━" * filled, "cyan"), ("─" * (width - filled), "dim"))


def fit(
    draw: Callable[[int], Sequence[RenderableType]], width: int, height: int, *, most: int, ascii_only: bool = False
) -> list[Text]:
    """Render ``draw`` into at most ``height`` lines of fewer than ``width`` cells. It is called
    with the largest number of lines per cell, at most ``most``, for which the result fits."""
    for each in range(most, 0, -1):
        lines = _render(draw(each), width)
        if len(lines) <= height:
            break
    return [Text(to_ascii(line.plain), no_wrap=True) for line in lines[:height]] if ascii_only else lines[:height]


def _render(parts: Sequence[RenderableType], width: int) -> list[Text]:
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
