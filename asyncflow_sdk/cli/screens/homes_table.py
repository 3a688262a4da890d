"""The places of a run's payload: bytes, storage units, and what was lost with each."""

from __future__ import annotations

from rich.console import RenderableType

from ...ledger import StatusReport
from ...types.reports import HomeStatus
from ..formats import duration, plural, size
from .screen import Clipped, more, name, table

_STYLES = {"served": "green", "absent": "yellow", "lost": "red"}
_URGENT = ("absent", "lost", "served")


def homes_table(report: StatusReport, most: int, lines: int) -> tuple[list[RenderableType], int]:
    """Return a table of about ``most`` lines and their number of lines; none for a run with one home.
    Absent homes come first."""
    if not report.homes:
        return [], 0
    homes = sorted(report.homes, key=lambda home: (_URGENT.index(home.state), home.home))
    shown = homes if len(homes) <= most - 1 else homes[: max(most - 2, 1)]
    made = table("PAYLOAD IN", "bytes", f"{plural(len(homes), 'home')}", first=24)
    for home in shown:
        style = _STYLES[home.state]
        made.add_row(
            name(home.name, style), size(home.payload_bytes), Clipped(_text(home), "" if style == "green" else style, lines)
        )  # fmt: skip
    return [made, *more(len(homes) - len(shown), "home")], 1 + len(shown) + (len(shown) < len(homes))


def _text(home: HomeStatus) -> str:
    if home.state == "lost":
        state = f"lost: {home.detail}"
    elif home.state == "absent":
        state = f"no storage unit for {duration(home.absent_s)}"
    else:
        state = home.address or "this server's memory"
    if home.rows_failed:
        state += f" · {plural(home.rows_failed, 'row')} lost"
    return state
