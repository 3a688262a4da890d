"""Record: what a run directory says of its run.

    record = read_record(Path("runs/demo"))
    record.steps[-1].metrics["reward"], record.summary.get("status")

A run that was killed leaves a torn last line and no summary; a newer SDK leaves events this one does not
know. Neither stops the reading: such lines are counted in ``skipped``, the rest is in ``remarks``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from ..types.events import Event, Span, StepTrained, WorkerState
from .board import Board, by_name

EVENTS = "events.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Record:
    """The events in the order they were written, and the summary ({} for a run that did not end)."""

    name: str
    events: list[Event]
    summary: dict[str, Any]
    skipped: int
    remarks: list[str]

    @cached_property
    def steps(self) -> list[StepTrained]:
        """One event a step, by step; of a step trained twice (a resume) the later one."""
        latest = {event.step: event for event in self.events if isinstance(event, StepTrained)}
        return [latest[step] for step in sorted(latest)]

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """By worker, in order of name (rollout-2 before rollout-10)."""
        found: dict[str, list[Span]] = {}
        for event in self.events:
            if isinstance(event, Span) and math.isfinite(event.seconds) and event.seconds >= 0:
                found.setdefault(event.worker or "driver", []).append(event)
        return {name: found[name] for name in sorted(found, key=by_name)}

    @cached_property
    def failures(self) -> dict[str, list[float]]:
        """When each worker failed."""
        found: dict[str, list[float]] = {}
        for event in self.events:
            if isinstance(event, WorkerState) and event.state == "failed":
                found.setdefault(event.worker, []).append(event.time_s)
        return found

    @cached_property
    def board(self) -> Board:
        """The picture after the last event."""
        board = Board(int(self.summary.get("steps_wanted") or 0))
        for event in self.events:
            board.add(event)
        return board

    def metric(self, name: str) -> list[float]:
        """A metric, one value a step; nan where a step lacks it."""
        return [step.metrics.get(name, math.nan) for step in self.steps]


def read_record(run_dir: Path) -> Record:
    """Read a run directory. Raises ConfigError when it holds no events."""
    path = run_dir / EVENTS
    remarks: list[str] = []
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {EVENTS}: give the directory of a run, such as runs/demo")
    events: list[Event] = []
    skipped = 0
    for event in _events(path):
        if event is None:
            skipped += 1
        else:
            events.append(event)
    if skipped:
        lines = "1 line" if skipped == 1 else f"{skipped:,} lines"
        remarks.append(f"{lines} of {EVENTS} could not be read (torn, or of a newer SDK) and left out.")
    summary = _summary(run_dir / SUMMARY, remarks)
    return Record(run_dir.resolve().name, events, summary, skipped, remarks)


def _events(path: Path) -> Iterator[Event | None]:
    decoder = msgspec.json.Decoder(Event)
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                yield _step_with_nan(line)


def _step_with_nan(line: bytes) -> Event | None:
    """JSON has no NaN: a loss that became one is written as null. Such a step must not be lost."""
    try:
        fields = msgspec.json.decode(line)
        metrics = {k: math.nan if v is None else v for k, v in fields["metrics"].items()}
        return msgspec.convert({**fields, "metrics": metrics}, StepTrained)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        return None


def _summary(path: Path, remarks: list[str]) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return {key: value for key, value in found.items() if value is not None}
    except FileNotFoundError:
        remarks.append(f"There is no {SUMMARY}: the run is still going on, or was killed.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remarks.append(f"{SUMMARY} could not be read: {error}.")
    return {}
