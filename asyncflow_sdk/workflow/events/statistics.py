"""RunStatistics: staleness, publish lag and response lengths of a whole run, across all its driver
processes, for summary.json.

statistics = RunStatistics()
statistics.add(event)            # every event of the run, in order
statistics.step(step, ages)      # every acknowledged step; one trained again replaces its earlier ages
statistics.summary()             # {"staleness": ..., "publish_lag": ..., "lengths": ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...types import Event, TokenAges
from ...types import events as ev
from .lengths import LengthHistogram

QUANTILES = (0.5, 0.9, 0.99)
MOST_ERRORS = 3.0
"""Difference of the mean lengths of trained and generated responses, in standard errors, above which a run warns."""
LEAST_SHIFT = 0.01
"""Relative difference above which a run warns."""


@dataclass
class _Ages:
    """Count, sum and maximum of ages of tokens."""

    tokens: int = 0
    sum: int = 0
    most: int = 0

    @classmethod
    def of(cls, ages: npt.NDArray[np.int64]) -> _Ages:
        """Summarize ages."""
        return cls(len(ages), int(ages.sum()), int(ages.max(initial=0)))

    def join(self, other: _Ages) -> None:
        """Add the ages of another summary."""
        self.tokens += other.tokens
        self.sum += other.sum
        self.most = max(self.most, other.most)

    def plain(self) -> dict[str, Any]:
        """Return mean and maximum."""
        return {"mean": round(self.sum / self.tokens, 4) if self.tokens else None, "max": self.most}


@dataclass
class _Lag:
    """Publish lag of one replica over its time in the run. ``loaded``: its version; None while it
    is absent."""

    loaded: int | None = None
    since: float = 0.0
    seconds: float = 0.0
    area: float = 0.0
    most: int = 0

    def until(self, now: float, published: int) -> None:
        """Integrate the lag up to ``now``, with the newest version ``published``."""
        if self.loaded is None:
            return
        lag, took = max(published - self.loaded, 0), max(now - self.since, 0.0)
        self.area += lag * took
        self.seconds += took
        self.since, self.most = max(now, self.since), max(self.most, lag)

    def has(self, version: int, now: float, published: int) -> None:
        """Set the loaded version."""
        self.until(now, published)
        if self.loaded is None:
            self.since = now
        self.loaded = version


@dataclass
class LengthStatistics:
    """Response lengths by (state, reason) of their rows' end: of whole responses, and of unfinished
    ones so far."""

    whole: dict[tuple[str, str], LengthHistogram] = field(default_factory=dict)
    unfinished: dict[tuple[str, str], LengthHistogram] = field(default_factory=dict)

    def add(self, event: ev.RowsEnded) -> None:
        """Count the rows of an event."""
        end = event.state, event.reason
        if event.lengths:
            self.whole.setdefault(end, LengthHistogram()).add(event.lengths, event.tokens, event.squares)
        if event.unfinished:
            lengths = self.unfinished.setdefault(end, LengthHistogram())
            lengths.add(event.unfinished, event.unfinished_tokens, event.unfinished_squares)

    @property
    def trained(self) -> LengthHistogram:
        """Lengths of consumed rows."""
        return self._of(self.whole, lambda state: state == "consumed")

    @property
    def generated(self) -> LengthHistogram:
        """Lengths of all rows except cancelled ones; an estimate if some ended unfinished. Without
        dropped rows these would be trained."""
        whole, unfinished = (
            self._of(ends, lambda state: state != "cancelled") for ends in (self.whole, self.unfinished)
        )
        return whole.with_unfinished(unfinished)

    @staticmethod
    def _of(ends: Mapping[tuple[str, str], LengthHistogram], wanted: Any) -> LengthHistogram:
        total = LengthHistogram()
        for (state, _), lengths in ends.items():
            if wanted(state):
                total.merge(lengths)
        return total

    @property
    def bias(self) -> str:
        """A warning if trained responses differ in length from generated ones; "" if not."""
        trained, generated = self.trained, self.generated
        if trained.rows < 2 or not generated.tokens:
            return ""
        off = trained.mean - generated.mean
        errors = abs(off) / max(generated.deviation / math.sqrt(trained.rows), 1e-9)
        if errors <= MOST_ERRORS or abs(off) <= LEAST_SHIFT * generated.mean:
            return ""
        gone = {
            f"{state}{f' ({reason})' if reason else ''}": lengths.rows
            for ends in (self.whole, self.unfinished)
            for (state, reason), lengths in ends.items()
            if state not in ("consumed", "cancelled")
        }
        most = max(gone, key=lambda name: gone[name], default="")
        return (
            f"what is trained is {'shorter' if off < 0 else 'longer'} than what is generated: {trained.mean:.1f}"
            f" tokens a response against {generated.mean:.1f}, ratio {trained.mean / generated.mean:.2f},"
            f" {errors:.0f} standard errors" + (f"; most of the others ended {most}" if most else "")
        )

    def plain(self) -> dict[str, Any]:
        """As data: ``ratio`` is trained to generated, of the means and of each quantile."""
        trained, generated = self.trained, self.generated
        if not generated.rows:
            return {}
        one, other = _plain(trained), _plain(generated)
        ratio = {
            name: round(one[name] / other[name], 4)
            for name in one
            if name != "rows" and one[name] is not None and other[name]
        }
        ends = sorted({*self.whole, *self.unfinished})
        return {
            "trained": one,
            "generated": other,
            "ratio": ratio,
            "ended": {
                f"{state}: {reason}" if reason else state: {
                    name: _plain(of[state, reason])
                    for name, of in (("whole", self.whole), ("unfinished", self.unfinished))
                    if (state, reason) in of
                }
                for state, reason in ends
            },
        }


class RunStatistics:
    """Counts events and steps. Not thread-safe."""

    def __init__(self) -> None:
        self.lengths = LengthStatistics()
        self._steps: dict[int, dict[str, _Ages]] = {}
        self._lags: dict[str, _Lag] = {}
        self._published = -1
        self.before_s = 0.0
        """Running time of earlier driver processes, each up to its last event (seconds)."""
        self._began_s: float | None = None
        self._last_s = 0.0

    def add(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, ev.Begun):
            self._begin(event)
            return
        self.reached(event.time_s)
        if isinstance(event, ev.RowsEnded):
            self.lengths.add(event)
        elif isinstance(event, ev.Published):
            self._until(event.time_s)
            self._published = max(self._published, event.version)
        elif isinstance(event, ev.Loaded):
            self._published = max(self._published, event.version + event.lag)
            self._lags.setdefault(event.worker, _Lag()).has(event.version, event.time_s, self._published)

    def step(self, step: int, ages: TokenAges) -> None:
        """Set the ages of a step's tokens."""
        of = {"total": ages.total, "in_flight": ages.in_flight, "in_queue": ages.in_queue}
        self._steps[step] = {name: _Ages.of(values) for name, values in of.items()}

    @property
    def lags(self) -> dict[str, int]:
        """Published versions that each replica has not loaded."""
        return {
            name: max(self._published - lag.loaded, 0) for name, lag in self._lags.items() if lag.loaded is not None
        }

    def summary(self) -> dict[str, Any]:
        """Staleness in versions by tokens trained, publish lag by replica over time, lengths in
        tokens."""
        self._until(self._last_s)
        total = {"total": _Ages(), "in_flight": _Ages(), "in_queue": _Ages()}
        for step in self._steps.values():
            for name, ages in step.items():
                total[name].join(ages)
        return {
            "staleness": {name: ages.plain() for name, ages in total.items()},
            "publish_lag": {
                name: {"mean": round(lag.area / max(lag.seconds, 1e-9), 4), "max": lag.most}
                for name, lag in self._lags.items()
            },
            "lengths": self.lengths.plain(),
        }

    def reached(self, time_s: float) -> None:
        """Extend the running time to ``time_s``."""
        self._last_s = max(self._last_s, time_s)

    def _begin(self, event: ev.Begun) -> None:
        """A new driver process: earlier replicas are gone, and the time between the processes does
        not count."""
        self._until(self._last_s)
        for lag in self._lags.values():
            lag.loaded = None
        if self._began_s is not None:
            self.before_s += self._last_s - self._began_s
        self._began_s = self._last_s = event.time_s  # the clock restarts with the host

    def _until(self, now: float) -> None:
        for lag in self._lags.values():
            lag.until(now, self._published)


def _plain(lengths: LengthHistogram) -> dict[str, Any]:
    found = {"mean": lengths.mean, **{f"p{100 * q:.0f}": lengths.quantile(q) for q in QUANTILES}}
    return {"rows": round(lengths.rows), **{k: round(v, 2) if math.isfinite(v) else None for k, v in found.items()}}
