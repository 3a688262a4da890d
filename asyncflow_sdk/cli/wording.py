"""Wording: a summary in plain words, the same on the terminal and on the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .lines import duration

_GOOD, _BAD, _WARN = "good", "bad", "warn"
_TONES = {"completed": _GOOD, "failed": _BAD}
_NAMES = {
    "status": "status",
    "error": "error",
    "steps": "steps trained",
    "steps_wanted": "steps wanted",
    "reward_first": "reward at first",
    "reward_last": "reward at last",
    "reward_steps": "steps of each",
    "staleness_max": "staleness at most",
    "wall_s": "wall time",
    "rows_put": "rows put",
    "model": "model",
    "seed": "seed",
    "report": "report",
}


def outcome(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """How a run ended: a word, its tone, a sentence."""
    said = {key: _text(key, value) for key, value in summary.items() if value is not None}
    parts = []
    if "steps" in said:
        wanted = f" of {said['steps_wanted']}" if "steps_wanted" in said else ""
        took = f" in {said['wall_s']}" if "wall_s" in said else ""
        parts.append(f"{said['steps']}{wanted} steps{took}")
    parts += [f"{key} {said[key]}" for key in ("model", "seed") if key in said]
    status = said.get("status", "no summary")
    return status, _TONES.get(status, _WARN), " · ".join(parts)


def accounting(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Whether every row is accounted for: a sentence, its tone, and the same in two words."""
    ended = summary.get("rows")
    if not isinstance(ended, Mapping) or summary.get("balanced") is None:
        return (
            "Balance unknown: the run wrote no totals. What follows was counted from its events.",
            _WARN,
            "balance unknown",
        )
    total = sum(ended.values())
    put = total if summary.get("rows_put") is None else summary["rows_put"]
    live = summary.get("rows_live") or 0
    missing = put - total - live
    if summary["balanced"] and not missing:
        if live:
            return (
                f"Balanced: {put:,} rows were put; {total:,} ended in exactly one state each, and {live:,} were still"
                " live when the run ended.",
                _GOOD,
                "all accounted for",
            )
        return f"Balanced: {put:,} rows were put, and each ended in exactly one state.", _GOOD, "all accounted for"
    what = f"{missing:,} never ended" if missing > 0 else f"{-missing:,} more ended than were put"
    if not missing:
        what = "the totals agree, but the ledger's audit does not"
    held = f", {live:,} were still live" if live else ""
    return f"NOT BALANCED: {put:,} rows were put, {total:,} ended{held}; {what}.", _BAD, "NOT BALANCED"


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what a summary holds, the known ones first; rows are told apart."""
    said = {key: _text(key, value) for key, value in summary.items() if value is not None}
    keys = [key for key in _NAMES if said.get(key)]
    keys += [key for key, text in said.items() if text and key not in (*_NAMES, *_OWN_WORDS, "rows", "balanced")]
    found = [(_NAMES.get(key, key.replace("_", " ")), said[key]) for key in keys]
    own = [
        (name, words(summary[key]))
        for key, (name, words) in _OWN_WORDS.items()
        if isinstance(summary.get(key), Mapping)
    ]
    return found + [(name, text) for name, text in own if text]


def _staleness(of: Mapping[str, Any]) -> str:
    """Where the versions passed by which tokens were old."""
    names = {"total": "in all", "in_flight": "in flight", "in_queue": "in the queue"}
    return "\n".join(
        f"{name}: mean {of[key]['mean']:.2f}, at most {of[key]['max']:,}"
        for key, name in names.items()
        if isinstance(of.get(key), Mapping) and of[key].get("mean") is not None
    )


def _lag(of: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: mean {lag['mean']:.2f}, at most {lag['max']:,}" for name, lag in of.items())


def _lengths(of: Mapping[str, Any]) -> str:
    """Of responses: what was generated, and what of it was trained."""
    lines = [
        f"{what}: mean {of[what]['mean']:,.1f}, p50 {of[what]['p50']:,.0f}, p90 {of[what]['p90']:,.0f}, p99 {of[what]['p99']:,.0f}"
        for what in ("generated", "trained")
        if isinstance(of.get(what), Mapping) and of[what].get("rows")
    ]
    if isinstance(of.get("ratio"), Mapping) and of["ratio"]:
        lines.append(
            "trained / generated: " + ", ".join(f"{name} {value:.2f}" for name, value in of["ratio"].items())
        )
    return "\n".join(lines)


_OWN_WORDS = {
    "staleness": ("staleness", _staleness),
    "publish_lag": ("publish lag", _lag),
    "lengths": ("response lengths", _lengths),
}


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
