"""The summary of a run in words, for the terminal and for the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.box import ROUNDED
from rich.table import Table
from rich.text import Text

from ..formats import duration

_GOOD, _BAD, _WARN = "good", "bad", "warn"
_TONES = {"completed": _GOOD, "failed": _BAD}
_STYLE = {_GOOD: "bold green", _BAD: "bold red", _WARN: "bold yellow"}
_NAMES = {
    "status": "status", "error": "error", "steps": "steps trained", "steps_wanted": "steps wanted",
    "reward_first": "first reward", "reward_last": "last reward",
    "best_score": "best evaluation", "best_version": "best version", "staleness_max": "largest staleness", "wall_s": "wall time", "rows_put": "rows put", "model": "model", "seed": "seed",
    "reasons": "not trained", "report": "report",
}  # fmt: skip


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
    return status, _TONES.get(status, _WARN), " · ".join(parts)


def accounting(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a sentence about the balance of rows, its tone, and a short form."""
    ended = summary.get("rows")
    if not isinstance(ended, Mapping) or summary.get("balanced") is None:
        unknown = "Balance unknown: the run wrote no totals. The counts below come from its events."
        return unknown, _WARN, "balance unknown"
    total = sum(ended.values())
    put = total if summary.get("rows_put") is None else summary["rows_put"]
    live = summary.get("rows_live") or 0
    missing = put - total - live
    if summary["balanced"] and not missing:
        text = f"Balanced: {put:,} rows were put, and each ended in exactly one state."
        if live:
            text = f"Balanced: {put:,} rows were put; {total:,} ended in exactly one state each, and {live:,} were still live when the run ended."
        return text, _GOOD, "all accounted for"
    what = f"{missing:,} never ended" if missing > 0 else f"{-missing:,} more ended than were put"
    if not missing:
        what = "the totals agree, but the ledger's audit does not"
    held = f", {live:,} were still live" if live else ""
    return f"NOT BALANCED: {put:,} rows were put, {total:,} ended{held}; {what}.", _BAD, "NOT BALANCED"


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values of a summary, known names first. ``accounting`` covers the counts
    of rows."""
    texts = {key: _text(key, value) for key, value in summary.items() if value is not None}
    if steps := texts.pop("reward_steps", ""):
        texts |= {
            key: f"{texts[key]} (mean of {steps} steps)" for key in ("reward_first", "reward_last") if key in texts
        }
    keys = [key for key in _NAMES if texts.get(key)]
    keys += [key for key, text in texts.items() if text and key not in (*_NAMES, *_FORMATS, "rows", "balanced")]
    found = [(_NAMES.get(key, key.replace("_", " ")), texts[key]) for key in keys]
    for key, format_ in _FORMATS.items():
        if isinstance(summary.get(key), Mapping) and (text := format_(summary[key])):
            found.append(("response lengths" if key == "lengths" else key.replace("_", " "), text))
    return found


def _staleness(of: Mapping[str, Any]) -> str:
    names = {"total": "total", "in_flight": "in flight", "in_queue": "in the queue"}
    return "\n".join(
        f"{name}: mean {of[key]['mean']:.2f}, at most {of[key]['max']:,}"
        for key, name in names.items()
        if isinstance(of.get(key), Mapping) and of[key].get("mean") is not None
    )


def _lag(of: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: mean {lag['mean']:.2f}, at most {lag['max']:,}" for name, lag in of.items())


def _lengths(of: Mapping[str, Any]) -> str:
    lines = [
        f"{what}: mean {of[what]['mean']:,.1f}, p50 {of[what]['p50']:,.0f}, p90 {of[what]['p90']:,.0f}, p99"
        f" {of[what]['p99']:,.0f}"
        for what in ("generated", "trained")
        if isinstance(of.get(what), Mapping) and of[what].get("rows")
    ]
    if isinstance(of.get("ratio"), Mapping) and of["ratio"]:
        lines.append(
            "trained / generated: " + ", ".join(f"{name} {value:.2f}" for name, value in of["ratio"].items())
        )
    return "\n".join(lines)


def _evaluations(of: Mapping[str, Any]) -> str:
    return "\n".join(f"version {version}: {score:.4g}" for version, score in of.items())


_FORMATS = {"evaluations": _evaluations, "staleness": _staleness, "publish_lag": _lag, "lengths": _lengths}


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key != "seed":
        return f"{value:,}"
    if isinstance(value, float):
        if key == "wall_s":
            return duration(value)
        return f"{value:.4g}" if math.isfinite(value) else "–"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_text('', item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return "\n".join(_text("", item) for item in value)
    return str(value)
