"""The figures of a run, folded from its events, live or recorded. The terminal, the report and the live page draw them. The figures of a queue, read from its server, stand beside them.

    fold = RunFold(total_steps=300)
    for event in events:
        fold.add(event)
    fold.figures().reward_mean, fold.figures().lag, fold.figures().rows["train"]["ready"]
    window.add(queue.status()).completed["reward"]      # rows per second

The fold does no I/O and reads no clock: the time is that of the newest event. Beside one number per step, its memory
grows with the number of tasks and workers only. Not thread-safe; the figures are frozen.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..ledger import StatusReport
from ..types.events import (
    Chosen,
    Evaluated,
    Event,
    LeaseReturned,
    Loaded,
    Note,
    Published,
    RowsEnded,
    Span,
    Status,
    StepTrained,
    WorkerState,
)

TRAILING = 20
RATE_WINDOW_S = 30.0
_HISTORY = 240
_GONE = ("stopped", "failed")
_WORKERS_KEPT = 256


class WorkerFigures(msgspec.Struct, frozen=True):
    """A worker. ``version``: the version loaded last; None before the first load and after its process ended.
    ``seconds``: its recent time by kind of span, up to ``spanned_s``; older spans decay. ``part``: the part of a step
    trained last; "" while it trains whole steps."""

    state: str = ""
    detail: str = ""
    since_s: float = 0.0
    version: int | None = None
    restarts: int = 0
    part: str = ""
    seconds: Mapping[str, float] = {}
    spanned_s: float = 0.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A run at ``now_s``. None and nan: not known yet. ``metrics``: the metrics of the last step. ``reward_mean``: the
    mean of the last 20 steps. ``rewards``: the finite rewards of all steps. ``evaluated``, ``best``: the last and the
    best evaluation. ``tokens_per_s``: tokens generated per second over the last 30 seconds. ``seconds_left``: an
    estimate from the last 20 steps; nan before the third."""

    total_steps: int
    start_s: float = math.nan
    now_s: float = math.nan
    done: int = 0
    metrics: Mapping[str, float] = {}
    reward_mean: float = math.nan
    rewards: Sequence[float] = ()
    published: int | None = None
    evaluated: Evaluated | None = None
    best: Evaluated | None = None
    rows: Mapping[str, Mapping[str, int]] = {}
    ended: Mapping[str, int] = {}
    returned: int = 0
    waiting: Mapping[str, str] = {}
    workers: Mapping[str, WorkerFigures] = {}
    note: str = ""
    tokens_per_s: float = 0.0
    seconds_left: float = math.nan

    @property
    def lag(self) -> int | None:
        """Versions published and not loaded by the slowest replica; None without replicas."""
        loaded = [worker.version for worker in self.workers.values() if worker.version is not None]
        return max(self.published - min(loaded), 0) if self.published is not None and loaded else None

    def metric(self, name: str) -> float:
        """Return a metric of the last step; nan if it has none of this name."""
        return self.metrics.get(name, math.nan)


class RunFold:
    """The figures of a run of ``total_steps`` steps so far."""

    def __init__(self, total_steps: int) -> None:
        self._figures = Figures(total_steps=total_steps, rewards=array("d"))
        self._workers: dict[str, WorkerFigures] = {}
        self._generated: deque[tuple[float, int]] = deque()  # the end and the tokens of recent spans
        self._generates_s = math.inf
        self._step_times: deque[float] = deque(maxlen=TRAILING + 1)
        self._first_step = 1

    def add(self, event: Event) -> None:
        """Add one event."""
        end_s = event.time_s + event.seconds if isinstance(event, Span) else event.time_s
        old = self._figures
        begun = not math.isnan(old.now_s)
        start_s, now_s = (min(old.start_s, event.time_s), max(old.now_s, end_s)) if begun else (event.time_s, end_s)
        self._figures = msgspec.structs.replace(old, start_s=start_s, now_s=now_s, **self._changes(event, end_s))

    def figures(self) -> Figures:
        """Return the figures after the last event."""
        now, times = self._figures, self._step_times
        trailing, left_s = now.rewards[-TRAILING:], math.nan
        if len(times) > 2 and now.total_steps:
            left_s = max(now.total_steps - now.done, 0) * (times[-1] - times[0]) / (len(times) - 1)
        since_s = max(now.now_s - RATE_WINDOW_S, self._generates_s)
        tokens = sum(count for end_s, count in self._generated if end_s > since_s)
        return msgspec.structs.replace(
            now,
            reward_mean=math.fsum(trailing) / len(trailing) if trailing else math.nan,
            workers=dict(self._workers),
            tokens_per_s=tokens / max(now.now_s - since_s, 1.0) if tokens else 0.0,
            seconds_left=left_s,
        )

    def _changes(self, event: Event, end_s: float) -> dict[str, Any]:
        """Return the changed fields, and update the workers and windows."""
        old = self._figures
        match event:
            case Span():
                self._add_span(event, end_s)
            case StepTrained():
                return self._add_step(event)
            case WorkerState():
                self._add_state(event)
            case Evaluated():
                return {"evaluated": event, "best": event if event.best else old.best}
            case Published():
                return {"published": max(event.version, old.published or 0)}
            case Loaded():
                self._change(event.worker, version=event.version)
                return {"published": max(event.version + event.lag, old.published or 0)}
            case Status():
                return {"rows": event.rows, "waiting": event.waiting, "ended": {**old.ended, **event.ended}}
            case RowsEnded():
                return {"ended": {**old.ended, event.state: old.ended.get(event.state, 0) + event.count}}
            case LeaseReturned():
                return {"returned": old.returned + event.count}
            case Note(level="info"):
                return {"note": event.text}
            case Chosen():
                return {"note": f"{event.what} {event.chosen}: {event.reason}"}
        return {}

    def _worker(self, name: str) -> WorkerFigures:
        if name not in self._workers and len(self._workers) >= _WORKERS_KEPT:
            del self._workers[
                next((n for n, w in self._workers.items() if w.state in _GONE), next(iter(self._workers)))
            ]
        return self._workers.setdefault(name, WorkerFigures())

    def _change(self, name: str, **fields: Any) -> None:
        self._workers[name] = msgspec.structs.replace(self._worker(name), **fields)

    def _add_span(self, span: Span, end_s: float) -> None:
        if span.kind == "generate":
            self._generates_s = min(self._generates_s, span.time_s)
            self._generated.append((end_s, span.tokens))
            while self._generated[0][0] <= end_s - RATE_WINDOW_S:
                self._generated.popleft()
        if span.worker:
            old = self._worker(span.worker)
            fade = math.exp(min(old.spanned_s - end_s, 0.0) / RATE_WINDOW_S)
            seconds = {kind: spent * fade for kind, spent in old.seconds.items()}
            seconds[span.kind] = seconds.get(span.kind, 0.0) + span.seconds
            part = span.detail if span.kind == "train" else old.part
            self._change(span.worker, seconds=seconds, spanned_s=max(old.spanned_s, end_s), part=part)

    def _add_step(self, event: StepTrained) -> dict[str, Any]:
        self._first_step = min(self._first_step, event.step)
        self._step_times.append(event.time_s)
        reward, old = event.metrics.get("reward", math.nan), self._figures
        if math.isfinite(reward):
            old.rewards.append(reward)  # type: ignore[attr-defined]
        return {"done": max(old.done, event.step - self._first_step + 1), "metrics": event.metrics}

    def _add_state(self, event: WorkerState) -> None:
        old = self._worker(event.worker)
        restarts = old.restarts + (event.state == "restarting")
        kept = old if event.state == "ready" else WorkerFigures(spanned_s=old.spanned_s)
        self._workers[event.worker] = msgspec.structs.replace(
            kept, state=event.state, detail=event.detail, since_s=event.time_s, restarts=restarts
        )


class Rates(msgspec.Struct, frozen=True):
    """Rows put and ended, and bytes written, per second; rows per second arrived at and completed by each task. nan: not
    known yet."""

    put: float = math.nan
    ended: float = math.nan
    written_bytes: float = math.nan
    arrived: Mapping[str, float] = {}
    completed: Mapping[str, float] = {}


class RateWindow:
    """Rates of a queue: differences between its status reports of the last ``window_s`` seconds. ``history``: rows per
    second completed by each task, one value per report."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._reports: deque[StatusReport] = deque()
        self.history: dict[str, deque[float]] = {}

    def add(self, report: StatusReport) -> Rates:
        """Add a report and return the rates. One older than the last is from a new server: discard the others."""
        reports = self._reports
        if reports and report.time_s <= reports[-1].time_s:
            reports.clear()
        if reports:
            for task, rate in _rates(reports[-1], report).completed.items():
                self.history.setdefault(task, deque(maxlen=_HISTORY)).append(rate)
        reports.append(report)
        while len(reports) > 2 and report.time_s - reports[1].time_s >= self._window_s:
            reports.popleft()
        return _rates(reports[0], report)


def _rates(first: StatusReport, last: StatusReport) -> Rates:
    seconds = last.time_s - first.time_s or math.nan

    def _by_task(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, float]:
        return {task: (count - before.get(task, 0)) / seconds for task, count in now.items()}

    return Rates(
        put=(last.put - first.put) / seconds,
        ended=(sum(last.ended.values()) - sum(first.ended.values())) / seconds,
        written_bytes=(last.written_bytes - first.written_bytes) / seconds,
        arrived=_by_task(last.arrived, first.arrived),
        completed=_by_task(last.completed, first.completed),
    )


class QueueFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A queue at one moment. ``history``: rows per second completed by each task so far. ``evaluations``,
    ``warnings``: those of the run; none without its directory."""

    title: str
    report: StatusReport
    rates: Rates = Rates()
    history: Mapping[str, Sequence[float]] = {}
    evaluations: Sequence[Evaluated] = ()
    warnings: Sequence[str] = ()
