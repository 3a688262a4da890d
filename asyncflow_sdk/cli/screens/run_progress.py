"""The progress of a run, folded from its events.

    progress = RunProgress(total_steps=300)
    for event in events:
        progress.add(event)
    progress.reward, progress.lag, progress.rows["train"]["ready"]

It does no I/O and reads no clock: the time is that of the newest event. Its memory grows with the
number of tasks and workers, not with the length of the run. Not thread-safe.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field

from ...types.events import (
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
from ...workflow.events.statistics import LengthStatistics

TRAILING = 20
RATE_WINDOW_S = 30.0
_GONE = ("stopped", "failed")
_WORKERS_KEPT = 256


class Curve:
    """A series of any length as at most ``limit`` means, each over the same number of values."""

    def __init__(self, limit: int = 256) -> None:
        self.means: list[float] = []
        self._limit = limit
        self._each = 1
        self._sum = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Append a value; ignore one that is not finite."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count == self._each:
            self.means.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.means) == self._limit:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=False)]
            self._each *= 2

    def sampled(self, count: int) -> list[float]:
        """Return the series as at most ``count`` means."""
        n = len(self.means)
        if n <= count:
            return self.means
        if count < 1:
            return []
        edges = [i * n // count for i in range(count + 1)]
        return [math.fsum(self.means[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


class TokenRate:
    """Tokens per second over a sliding window. A span counts in the second of its end."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._seconds: deque[list[float]] = deque(maxlen=math.ceil(window_s) + 2)
        self._start_s = math.inf

    def add(self, span: Span) -> None:
        """Count the tokens of a span."""
        end_s = span.time_s + span.seconds
        self._start_s = min(self._start_s, span.time_s)
        second = math.floor(end_s)
        # Workers report slightly out of order: count a late span in the newest second.
        if self._seconds and second <= self._seconds[-1][0]:
            self._seconds[-1][1] += span.tokens
        else:
            self._seconds.append([second, span.tokens])

    def at(self, now_s: float) -> float:
        """Return the tokens per second of the window before ``now_s``."""
        if not self._seconds:
            return 0.0
        since_s = max(now_s - self._window_s, self._start_s)
        tokens = sum(count for second, count in self._seconds if second + 1 > since_s)
        return tokens / max(now_s - since_s, 1.0)


@dataclass
class WorkerProgress:
    """The state of one worker.

    ``seconds``: its recent time by kind of span; older spans decay. ``part``: the part of a step
    that it trained last; "" while it trains whole steps.
    ``version``: of the weights loaded last; None before the first load and after its process ended.
    """

    state: str = ""
    detail: str = ""
    since_s: float = 0.0
    version: int | None = None
    restarts: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    part: str = ""
    _spanned_s: float = 0.0

    def add_time(self, kind: str, seconds: float, end_s: float) -> None:
        """Add the duration of a span and let older ones decay."""
        fade = math.exp(min(self._spanned_s - end_s, 0.0) / RATE_WINDOW_S)
        self._spanned_s = max(self._spanned_s, end_s)
        self.seconds = {k: s * fade for k, s in self.seconds.items()}
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds


@dataclass
class RunProgress:
    """The current state of a run. ``None`` and ``nan``: not known yet. ``in_flight``, ``in_queue``: the parts of
    ``staleness_mean``. ``truncated``: share of the last step's responses. ``evaluated``, ``best``: the last and the
    best evaluation."""

    total_steps: int
    start_s: float = math.nan
    now_s: float = math.nan
    done: int = 0
    reward: float = math.nan
    staleness_mean: float = math.nan
    staleness_max: float = math.nan
    in_flight: float = math.nan
    in_queue: float = math.nan
    truncated: float = math.nan
    published: int | None = None
    evaluated: Evaluated | None = None
    best: Evaluated | None = None
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    returned: int = 0
    waiting: dict[str, str] = field(default_factory=dict)
    workers: dict[str, WorkerProgress] = field(default_factory=dict)
    note: str = ""
    rewards: Curve = field(default_factory=Curve)
    lengths: LengthStatistics = field(default_factory=LengthStatistics)
    _trailing: deque[float] = field(default_factory=lambda: deque(maxlen=TRAILING))
    _step_times: deque[float] = field(default_factory=lambda: deque(maxlen=TRAILING + 1))
    _rate: TokenRate = field(default_factory=TokenRate)
    _first_step: int = 1

    def add(self, event: Event) -> None:
        """Update the state with one event."""
        end_s = event.time_s + event.seconds if isinstance(event, Span) else event.time_s
        if math.isnan(self.now_s):
            self.start_s, self.now_s = event.time_s, end_s
        self.start_s, self.now_s = min(self.start_s, event.time_s), max(self.now_s, end_s)
        if isinstance(event, Span):
            self._add_span(event)
        elif isinstance(event, StepTrained):
            self._add_step(event)
        elif isinstance(event, WorkerState):
            self._add_worker(event)
        elif isinstance(event, Evaluated):
            self.evaluated, self.best = event, event if event.best else self.best
        elif isinstance(event, Published):
            self.published = max(event.version, self.published or 0)
        elif isinstance(event, Loaded):
            self._worker(event.worker).version = event.version
            self.published = max(event.version + event.lag, self.published or 0)
        elif isinstance(event, Status):
            self.rows, self.waiting = event.rows, event.waiting
            self.ended.update(event.ended)
        elif isinstance(event, RowsEnded):
            self.ended[event.state] = self.ended.get(event.state, 0) + event.count
            self.lengths.add(event)
        elif isinstance(event, LeaseReturned):
            self.returned += event.count
        elif isinstance(event, Note) and event.level == "info":
            self.note = event.text

    @property
    def reward_mean(self) -> float:
        """Mean reward of the last 20 steps; nan before the first."""
        return math.fsum(self._trailing) / len(self._trailing) if self._trailing else math.nan

    @property
    def lag(self) -> int | None:
        """Versions published and not loaded by the slowest replica; None without replicas."""
        if self.published is None:
            return None
        loaded = [w.version for w in self.workers.values() if w.version is not None]
        return max(self.published - min(loaded), 0) if loaded else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated per second over the last 30 seconds."""
        return self._rate.at(self.now_s)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds to the last step, from the last 20; nan before the third step."""
        times = self._step_times
        if len(times) < 3 or not self.total_steps:
            return math.nan
        pace_s = (times[-1] - times[0]) / (len(times) - 1)
        return max(self.total_steps - self.done, 0) * pace_s

    def _worker(self, name: str) -> WorkerProgress:
        if name not in self.workers and len(self.workers) >= _WORKERS_KEPT:
            gone = next((n for n, w in self.workers.items() if w.state in _GONE), next(iter(self.workers)))
            del self.workers[gone]
        return self.workers.setdefault(name, WorkerProgress())

    def _add_span(self, span: Span) -> None:
        if span.kind == "generate":
            self._rate.add(span)
        if span.worker:
            worker = self._worker(span.worker)
            worker.add_time(span.kind, span.seconds, span.time_s + span.seconds)
            worker.part = span.detail if span.kind == "train" else worker.part

    def _add_step(self, event: StepTrained) -> None:
        self._first_step = min(self._first_step, event.step)
        self.done = max(self.done, event.step - self._first_step + 1)
        nan = math.nan
        self.reward = event.metrics.get("reward", nan)
        self.staleness_mean = event.metrics.get("staleness_mean", nan)
        self.staleness_max = event.metrics.get("staleness_max", nan)
        self.in_flight = event.metrics.get("staleness_in_flight_mean", nan)
        self.in_queue = event.metrics.get("staleness_in_queue_mean", nan)
        self.truncated = event.metrics.get("truncated_fraction", nan)
        if math.isfinite(self.reward):
            self._trailing.append(self.reward)
        self.rewards.add(self.reward)
        self._step_times.append(event.time_s)

    def _add_worker(self, event: WorkerState) -> None:
        worker = self._worker(event.worker)
        if event.state != "ready":
            worker.version, worker.seconds, worker.part = None, {}, ""
        worker.restarts += event.state == "restarting"
        worker.state, worker.detail, worker.since_s = event.state, event.detail, event.time_s
