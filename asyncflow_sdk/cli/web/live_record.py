"""LiveRecord: the events of a run's directory, folded while they are written.

record = LiveRecord(directory / EVENTS)
record.read(); record.progress.reward, record.curves(), record.lanes(time.monotonic())
"""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

from ...types.events import Event, Note, Span, StepTrained, WorkerState
from ...workflow.events.event_file import decode_event
from ..report.timeline import flatten
from ..screens.run_progress import Curve, RunProgress

WINDOW_S = 60.0
"""Lanes show the last seconds."""
MOST_SPANS, MOST_NOTES = 500, 20
_READ_BYTES = 1 << 22


class LiveRecord:
    """The events at ``path``; None: there are none. ``step``: the newest trained step, -1 before the first.
    Its memory is bounded."""

    def __init__(self, path: Path | None) -> None:
        self.path = path or Path()
        self.progress = RunProgress(0)
        self.step = -1
        names = ("reward", "reward_mean", "staleness_mean", "staleness_max")
        self._curves = {name: (Curve(), Curve()) for name in names}
        self._spans: dict[str, deque[Span]] = {}
        self._notes: deque[tuple[float, str, str]] = deque(maxlen=MOST_NOTES)
        self._at = 0

    @property
    def exists(self) -> bool:
        """True if there is a file of events."""
        return self.path.is_file()

    def read(self) -> None:
        """Add the events written since the last call. A missing file has none."""
        if not self.exists:
            return
        with self.path.open("rb") as file:
            while True:
                file.seek(self._at)
                found = file.read(_READ_BYTES)
                whole = found.rfind(b"\n") + 1
                if not whole:
                    return
                self._at += whole
                for line in found[:whole].splitlines():
                    if (event := decode_event(line)) is not None:
                        self._add(event)

    def curves(self) -> dict[str, list[list[float]]]:
        """Return the steps and the values of each curve, as at most 256 means."""
        return {name: [steps.means, values.means] for name, (steps, values) in self._curves.items()}

    def lanes(self, now_s: float) -> dict[str, list[list[Any]]]:
        """Return the work of each worker in the last ``WINDOW_S``: seconds ago of start and end, kind,
        version."""
        since_s = now_s - WINDOW_S
        recent = {n: [s for s in spans if s.time_s + s.seconds > since_s] for n, spans in self._spans.items()}
        self._spans = {name: self._spans[name] for name, spans in recent.items() if spans}
        return {
            name: [
                [round(now_s - max(each.start, since_s), 3), round(now_s - each.end, 3), each.kind, each.version]
                for each in flatten(spans)
            ]
            for name, spans in recent.items()
        }

    def notes(self) -> list[tuple[float, str, str]]:
        """Return the newest warnings, errors and failures: seconds since the start, worker, text."""
        return [(time_s - self.progress.start_s, worker, text) for time_s, worker, text in reversed(self._notes)]

    def _add(self, event: Event) -> None:
        self.progress.add(event)
        if isinstance(event, Span):
            self._spans.setdefault(event.worker or "driver", deque(maxlen=MOST_SPANS)).append(event)
        elif isinstance(event, StepTrained):
            self.step = event.step
            values = {**event.metrics, "reward_mean": self.progress.reward_mean}
            for name, (steps, curve) in self._curves.items():
                if math.isfinite(value := values.get(name, math.nan)):
                    steps.add(event.step)
                    curve.add(value)
        elif isinstance(event, Note) and event.level != "info":
            self._notes.append((event.time_s, event.worker, f"{event.level}: {event.text}"))
        elif isinstance(event, WorkerState) and event.state in ("failed", "restarting"):
            self._notes.append((event.time_s, event.worker, f"{event.state}: {event.detail}"))
