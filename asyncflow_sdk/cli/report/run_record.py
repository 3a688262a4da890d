"""The record of a run: the events and the summary in its directory.

    record = read_record(Path("runs/demo"))
    record.steps[-1].metrics["reward"], record.summary.get("status")

A killed run leaves a torn last line and no summary; a newer SDK writes unknown events. Such lines
are counted in ``skipped``; ``remarks`` explains everything missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ...types.events import Evaluated, Event, Span, StepTrained, WorkerState
from ...workflow.events.event_file import EVENTS, read_events
from ..formats import by_name
from ..screens.run_progress import RunProgress

SUMMARY = "summary.json"


@dataclass(frozen=True)
class RunRecord:
    """The events in the order of writing, and the summary; {} if the run did not end."""

    name: str
    events: list[Event]
    summary: dict[str, Any]
    skipped: int
    remarks: list[str]

    @cached_property
    def steps(self) -> list[StepTrained]:
        """One event per step, in order. A step trained again replaces itself and all later ones."""
        latest: dict[int, StepTrained] = {}
        for event in self.events:
            if isinstance(event, StepTrained):
                if event.step in latest:
                    latest = {step: known for step, known in latest.items() if step < event.step}
                latest[event.step] = event
        return [latest[step] for step in sorted(latest)]

    @cached_property
    def evaluations(self) -> list[Evaluated]:
        """All evaluations, in order."""
        return [event for event in self.events if isinstance(event, Evaluated)]

    @cached_property
    def spans(self) -> dict[str, list[Span]]:
        """The spans by worker, sorted by name (rollout-2 before rollout-10)."""
        found: dict[str, list[Span]] = {}
        for event in self.events:
            if isinstance(event, Span) and math.isfinite(event.seconds) and event.seconds >= 0:
                found.setdefault(event.worker or "driver", []).append(event)
        return {name: found[name] for name in sorted(found, key=by_name)}

    @cached_property
    def failures(self) -> dict[str, list[float]]:
        """The times of each worker's failures."""
        found: dict[str, list[float]] = {}
        for event in self.events:
            if isinstance(event, WorkerState) and event.state == "failed":
                found.setdefault(event.worker, []).append(event.time_s)
        return found

    @cached_property
    def progress(self) -> RunProgress:
        """The progress after the last event."""
        progress = RunProgress(int(self.summary.get("steps_wanted") or 0))
        for event in self.events:
            progress.add(event)
        return progress

    def metric(self, name: str) -> list[float]:
        """A metric, one value per step; nan if a step lacks it."""
        return [step.metrics.get(name, math.nan) for step in self.steps]


def read_record(run_dir: Path) -> RunRecord:
    """Read a run directory. Raises ConfigError if it holds no events."""
    path = run_dir / EVENTS
    remarks: list[str] = []
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {EVENTS}: give the directory of a run, such as runs/demo")
    events: list[Event] = []
    skipped = 0
    for event in read_events(path):
        if event is None:
            skipped += 1
        else:
            events.append(event)
    if skipped:
        lines = "1 line" if skipped == 1 else f"{skipped:,} lines"
        remarks.append(f"{lines} of {EVENTS} could not be read (torn, or written by a newer SDK) and left out.")
    summary = _summary(run_dir / SUMMARY, remarks)
    return RunRecord(run_dir.resolve().name, events, summary, skipped, remarks)


def _summary(path: Path, remarks: list[str]) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return {key: value for key, value in found.items() if value is not None}
    except FileNotFoundError:
        remarks.append(f"There is no {SUMMARY}: the run is still going on, or was killed.")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        remarks.append(f"{SUMMARY} could not be read: {error}.")
    return {}
