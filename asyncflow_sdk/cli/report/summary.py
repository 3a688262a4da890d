"""The summary of a run in words, for the terminal and for the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ..formats import duration

_TONES = {"completed": "good", "failed": "bad"}
_STYLE = {"good": "bold green", "bad": "bold red", "warn": "bold yellow"}
_NAMES = {
    "status": "status", "error": "error", "steps": "steps trained", "steps_wanted": "steps wanted",
    "reward_first": "first reward", "reward_last": "last reward", "best_score": "best evaluation",
    "best_version": "best version", "staleness_max": "largest staleness", "wall_s": "wall time", "rows_put": "rows put",
    "model": "model", "seed": "seed", "reasons": "not trained", "report": "report", "evaluations": "evaluations by version",
    "staleness": "staleness", "publish_lag": "publish lag", "lengths": "response lengths",
}  # fmt: skip
"""Facts in their order; the others follow."""
_PARTS = {"in_flight": "in flight", "in_queue": "in the queue", "ratio": "trained / generated"}
_HIDDEN = ("rows", "balanced", "reward_steps")


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the content of a summary.json as a table. Missing keys are left out."""
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
        table.add_row("balance", Text(text, style=_STYLE[tone]))
    return table


def outcome(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the status of a run, its tone (good, bad or warn) and a sentence about it."""
    texts = {key: _text(key, value) for key, value in summary.items() if value is not None}
    parts = []
    if "steps" in texts:
        wanted = f" of {texts['steps_wanted']}" if "steps_wanted" in texts else ""
        took = f" in {texts['wall_s']}" if "wall_s" in texts else ""
        parts.append(f"{texts['steps']}{wanted} steps{took}")
    parts += [f"{key} {texts[key]}" for key in ("model", "seed") if key in texts]
    status = texts.get("status", "no summary")
    return status, _TONES.get(status, "warn"), " · ".join(parts)


def accounting(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a sentence about the balance of rows, its tone, and a short form."""
    ended = summary.get("rows")
    if not isinstance(ended, Mapping) or summary.get("balanced") is None:
        unknown = "Balance unknown: the run wrote no totals. The counts below come from its events."
        return unknown, "warn", "balance unknown"
    total, live = sum(ended.values()), summary.get("rows_live") or 0
    put = total if summary.get("rows_put") is None else summary["rows_put"]
    missing = put - total - live
    if summary["balanced"] and not missing:
        each = f"{total:,} ended in exactly one state each, and {live:,} were still live when the run ended."
        text = f"; {each}" if live else ", and each ended in exactly one state."
        return f"Balanced: {put:,} rows were put{text}", "good", "all accounted for"
    what = f"{missing:,} never ended" if missing > 0 else f"{-missing:,} more ended than were put"
    if not missing:
        what = "the totals agree, but the ledger's audit does not"
    held = f", {live:,} were still live" if live else ""
    return f"NOT BALANCED: {put:,} rows were put, {total:,} ended{held}; {what}.", "bad", "NOT BALANCED"


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a summary, known names first. ``accounting`` covers the counts
    of rows."""
    texts = {key: _text(key, value) for key, value in summary.items() if value is not None and key not in _HIDDEN}
    if steps := summary.get("reward_steps"):
        for key in {"reward_first", "reward_last"} & texts.keys():
            texts[key] += f" (mean of {steps} steps)"
    keys = [*(key for key in _NAMES if key in texts), *(key for key in texts if key not in _NAMES)]
    return [(_NAMES.get(key, key.replace("_", " ")), texts[key]) for key in keys if texts[key]]


def _text(key: str, value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case int() if key != "seed":
            return f"{value:,}"
        case float() if key == "wall_s":
            return duration(value)
        case float() if 1e4 <= abs(value) < 1e12:
            return f"{value:,.0f}"
        case float():
            return f"{value:.4g}" if math.isfinite(value) else "–"
        case Mapping():
            known = {_PARTS.get(n, n): _inline(item) for n, item in value.items() if (key, n) != ("lengths", "ended")}
            return "\n".join(f"{name}: {item}" for name, item in known.items() if item)
        case list() | tuple():
            return "\n".join(_text("", item) for item in value)
    return str(value)


def _inline(value: object) -> str:
    """Write a value of a table in one line, for example "mean 0.5, max 2"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_inline(item)}" for name, item in value.items() if item is not None)
    return "" if value is None else _text("", value)
