"""The trace of a run in Chrome's format, for ui.perfetto.dev: one track a worker, its work as slices.

    path = write_trace(Path("runs/demo"))      # runs/demo/trace.json

Format: "Trace Event Format" of Chrome: complete events (X), instants (i), counters (C), names (M).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ...memory import private_opener
from ...types.events import Loaded, Note, Published, RowsEnded, StepTrained, WorkerState
from .run_record import RunRecord, read_record

RUN = 1
"""The process of the trace; its threads are the tracks."""
COUNTED = ("reward", "staleness_mean")
"""Metrics of a step drawn as counters."""


def write_trace(run_dir: Path) -> Path:
    """Write ``trace.json`` into a run directory and return its path. Raises ConfigError if the
    directory holds no events or is not writable."""
    target = run_dir / "trace.json"
    events = list(_events(read_record(run_dir)))
    try:
        with open(target, "wb", opener=private_opener) as file:
            file.write(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise ConfigError(f"the trace cannot be written to {target}: {error.strerror}") from error
    return target


def _events(record: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the events of all tracks. Times are microseconds since the first event of the run."""
    start_s = min((event.time_s for event in record.events), default=0.0)
    tracks: dict[tuple[str, int], int] = {}
    ended: dict[str, int] = {}

    def at(time_s: float, name: str, of: str, lane: int = 0, **more: Any) -> dict[str, Any]:
        track = tracks.setdefault((of, lane), len(tracks) + 1)
        return {"name": name, "ts": round((time_s - start_s) * 1e6), "pid": RUN, "tid": track, **more}

    for worker, spans in record.spans.items():
        free_at: list[float] = []  # slices of one track cannot overlap: each is in the first lane free at its start
        for span in sorted(spans, key=lambda span: span.time_s):
            lane = next((i for i, time_s in enumerate(free_at) if time_s <= span.time_s), len(free_at))
            free_at[lane : lane + 1] = [span.time_s + span.seconds]
            args = {name: getattr(span, name) for name in ("rows", "tokens", "detail") if getattr(span, name)}
            args |= {"version": span.version} if span.version >= 0 else {}
            yield at(span.time_s, span.kind, worker, lane, ph="X", dur=round(span.seconds * 1e6), args=args)
    for event in record.events:
        worker = event.worker or "driver"
        match event:
            case Published():
                yield at(event.time_s, f"publish version {event.version}", worker, ph="i", s="g")
            case Loaded():
                yield at(event.time_s, f"loaded version {event.version}", worker, ph="i", s="t")
            case WorkerState():
                yield at(event.time_s, event.state, worker, ph="i", s="t", args={"detail": event.detail})
            case Note():
                yield at(event.time_s, event.text, worker, ph="i", s="t")
            case RowsEnded():
                ended[event.state] = ended.get(event.state, 0) + event.count
                yield at(event.time_s, "rows", "rows", ph="C", args=dict(ended))
            case StepTrained():
                for name in COUNTED:
                    if math.isfinite(value := event.metrics.get(name, math.nan)):
                        yield at(event.time_s, name, name, ph="C", args={name: value})
    for (of, lane), track in tracks.items():
        name = f"{of} ({lane + 1})" if lane else of
        yield {"name": "thread_name", "ph": "M", "pid": RUN, "tid": track, "args": {"name": name}}
        yield {"name": "thread_sort_index", "ph": "M", "pid": RUN, "tid": track, "args": {"sort_index": track}}
    yield {"name": "process_name", "ph": "M", "pid": RUN, "args": {"name": record.name}}
