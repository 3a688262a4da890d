"""Replay recordings of a ledger: lines of JSON, each an input and what came of it, with the name of each recording before its lines.

{"recording": "..."}
{"input": "apply", "session": 1, "command": {...}, "now": 0.5, "ticket": 3, "answers": [...], "events": [...], "retired": [...]}
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Iterator
from pathlib import Path

from today import Json, LedgerOfToday

HERE = Path(__file__).parent
OUTPUTS = ("answers", "events", "retired", "look")
UNORDERED = ("answers", "events")


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Json]]]:
    """Return the lines of a file with their numbers, from 1."""
    with lzma.open(path, "rt") as file:
        for number, line in enumerate(file, 1):
            yield number, json.loads(line)


def differences(path: Path, most: int = 5) -> list[str]:
    """Return what today's ledger does otherwise, the first difference of each recording."""
    found: list[str] = []
    name, ledger = "", None
    for number, line in lines_of(path):
        if "recording" in line:
            name, ledger = line["recording"], LedgerOfToday()
        elif ledger is not None and (told := difference(ledger, line)):
            found.append(f"{path.name}, line {number}, recording {name}\n{told}")
            ledger = None
            if len(found) == most:
                break
    return found


def difference(ledger: LedgerOfToday, line: dict[str, Json]) -> str:
    """Carry out one input. Return "" if it led to what is recorded, or else what was expected and what came."""
    given = {name: value for name, value in line.items() if name not in OUTPUTS}
    expected = {name: value for name, value in line.items() if name in OUTPUTS}
    try:
        came = ledger.carry_out(line)
    except Exception as error:
        came = {"raised": repr(error)}
    if came == expected:
        return ""
    names = [name for name in {**expected, **came} if not _same_output(name, expected.get(name), came.get(name))]
    told = [f"  {name}:\n    expected {expected.get(name)}\n    came     {came.get(name)}" for name in names]
    return "\n".join([f"  input: {json.dumps(given)}", *told]) if names else ""


def _same_output(name: str, expected: Json, came: Json) -> bool:
    if name not in UNORDERED or not expected or not came or len(expected) != len(came):
        return same(expected, came)
    left = list(came)
    for each in expected:
        match = next((at for at, other in enumerate(left) if same(each, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def same(expected: Json, came: Json) -> bool:
    """True if two values mean the same. Fields that are only in ``came`` are new, and say nothing."""
    if expected == came:
        return True
    if isinstance(expected, dict) and isinstance(came, dict):
        fields = expected if "type" in expected else {**expected, **came}
        return all(name in expected and name in came and same(expected[name], came[name]) for name in fields)
    if isinstance(expected, list) and isinstance(came, list):
        return len(expected) == len(came) and all(map(same, expected, came))
    if isinstance(expected, float) and isinstance(came, int | float):
        return math.isclose(expected, came, rel_tol=1e-9, abs_tol=1e-9) or (expected != expected and came != came)
    return False
