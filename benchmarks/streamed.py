"""Rows of ``make bench-demo`` about steps trained in parts: real engines, whole and streamed, beside the plain loop.

The rollout decodes a quarter of a step at a time. All responses of this task are about as long: if all were decoded at once,
they would end at once, and nothing of a step could be trained before the rest of it is there.
"""

from __future__ import annotations

import json

from .table import Row

ROWS_AT_ONCE = 64
MODES = {False: "whole", True: "streamed"}


def _name(late: int, stream: bool) -> str:
    return f"max_staleness {late}, {MODES[stream]}"


def streamed_commands(ours: list[str]) -> dict[str, list[str]]:
    """By name of the run. ``ours``: the command of a run, without max_staleness."""
    rollout = ["--rollout", json.dumps({"options": {"max_rows": ROWS_AT_ONCE}})]
    return {
        _name(late, stream): [*ours, str(late), "--train", json.dumps({"stream": stream}), *rollout]
        for late in (0, 1)
        for stream in MODES
    }


def streamed_rows(seconds: dict[str, float], plain: float) -> list[Row]:
    """``seconds``: of a step, by name of the run; ``plain``: of the plain loop."""
    rows = []
    for late in (0, 1):
        whole, streamed = (seconds[_name(late, stream)] for stream in MODES)
        what = f"time a step, max_staleness {late}, {ROWS_AT_ONCE} rows decoded at once"
        rows += [
            Row(f"{what}: streamed against whole", "s", streamed, whole, whole / streamed),
            Row(f"{what}: whole against the plain loop", "s", whole, plain, plain / whole),
            Row(f"{what}: streamed against the plain loop", "s", streamed, plain, plain / streamed),
        ]
    return rows
