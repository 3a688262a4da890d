"""The recorded events of a run, one JSON object a line.

for event in read_events(directory / EVENTS): ...          # None: an unreadable line
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...types.events import Event, Note, StepTrained

EVENTS = "events.jsonl"
LASTING = b'"lasting":true'
"""Part of the line of a lasting note."""
TRACED = b'{"event":"traced"'
"""Begin of lines about single rows, as older SDKs wrote them. Nothing reads them."""
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def read_events(path: Path) -> Iterator[Event | None]:
    """Yield the recorded events; None for a line torn by a killed run, or of a newer SDK."""
    with path.open("rb") as lines:
        for line in lines:
            if line.strip() and not line.startswith(TRACED):
                yield decode_event(line)


def lasting_notes(path: Path, begin: int) -> tuple[list[str], int]:
    """Return the texts of lasting notes from byte ``begin`` of recorded events, and the end of the whole lines."""
    texts, end = [], begin
    with contextlib.suppress(OSError), path.open("rb") as lines:
        lines.seek(begin)
        for line in lines:
            end += len(line) if line.endswith(b"\n") else 0
            if LASTING in line and isinstance(event := decode_event(line), Note):
                texts.append(event.text)
    return texts, end


def decode_event(line: bytes) -> Event | None:
    """Return the event of a line; None if it cannot be read."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _step_with_nan(line)


def _step_with_nan(line: bytes) -> Event | None:
    """Read a step with null metrics: JSON has no NaN, and a NaN loss is written as null."""
    try:
        fields = msgspec.json.decode(line)
        metrics = {k: math.nan if v is None else v for k, v in fields["metrics"].items()}
        return msgspec.convert({**fields, "metrics": metrics}, StepTrained)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return None
