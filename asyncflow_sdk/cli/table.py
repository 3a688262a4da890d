"""The table that ends a run on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from .wording import accounting, facts, outcome

_STYLE = {"good": "bold green", "bad": "bold red", "warn": "bold yellow"}


def summary_table(summary: Mapping[str, Any]) -> Table:
    """A summary.json as a table. Missing keys are left out."""
    table = Table(box=ROUNDED, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    _, tone, _ = outcome(summary)
    for name, value in facts(summary):
        style = {"status": _STYLE[tone], "error": "red"}.get(name, "")
        table.add_row(name, Text(value, style=style))
    rows = summary.get("rows") or {}
    if rows:
        ended = sorted(rows.items(), key=lambda item: -item[1])
        table.add_row("rows ended", Text("\n".join(f"{state} {count:,}" for state, count in ended if count)))
    if rows or "balanced" in summary:
        text, tone, _ = accounting(summary)
        table.add_row("accounts", Text(text, style=_STYLE[tone]))
    return table
