"""Wording: a summary in plain words, the same on the terminal and on the report page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .frame import duration

_GOOD, _BAD, _WARN = "good", "bad", "warn"
_TONES = {"completed": _GOOD, "failed": _BAD}
_NAMES = {
    "status": "status",
    "error": "error",
    "steps": "steps trained",
    "steps_wanted": "steps wanted",
    "reward_first": "reward at first",
    "reward_last": "reward at last",
    "staleness_max": "staleness at most",
    "wall_s": "wall time",
    "rows_put": "rows put",
    "model": "model",
    "seed": "seed",
    "report": "report",
}


def outcome(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """How a run ended: a word, its tone, a sentence."""
    status = str(summary.get("status") or "no summary")
    sentence = []
    if "steps" in summary:
        wanted = f" of {_text('steps', summary['steps_wanted'])}" if "steps_wanted" in summary else ""
        sentence.append(f"{_text('steps', summary['steps'])}{wanted} steps")
    if "wall_s" in summary:
        sentence.append(f"in {_text('wall_s', summary['wall_s'])}")
    if "model" in summary:
        sentence.append(f"· model {summary['model']}")
    if "seed" in summary:
        sentence.append(f"· seed {summary['seed']}")
    return status, _TONES.get(status, _WARN), " ".join(sentence).removeprefix("· ")


def accounting(summary: Mapping[str, Any]) -> tuple[str, str, str]:
    """Whether every row is accounted for: a sentence, its tone, and the same in two words."""
    ended = summary.get("rows")
    if not isinstance(ended, Mapping) or "balanced" not in summary:
        return (
            "Balance unknown: the run wrote no totals. What follows was counted from its events.",
            _WARN,
            "balance unknown",
        )
    total = sum(ended.values())
    put = summary.get("rows_put", total)
    if summary["balanced"]:
        return f"Balanced: {put:,} rows were put, and each ended in exactly one state.", _GOOD, "all accounted for"
    missing = put - total
    what = f"{missing:,} never ended" if missing > 0 else f"{-missing:,} more ended than were put"
    if not missing:
        what = "the totals agree, but the ledger's audit does not"
    return f"NOT BALANCED: {put:,} rows were put, {total:,} ended; {what}.", _BAD, "NOT BALANCED"


def facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what a summary holds, the known ones first; rows are told apart."""
    keys = [key for key in _NAMES if summary.get(key) is not None]
    keys += [key for key in summary if key not in (*_NAMES, "rows", "balanced")]
    return [(_NAMES.get(key, key), _text(key, summary[key])) for key in keys]


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key != "seed":
        return f"{value:,}"
    if isinstance(value, float):
        if key == "wall_s":
            return duration(value)
        return f"{value:.4g}" if math.isfinite(value) else "–"
    return str(value)
