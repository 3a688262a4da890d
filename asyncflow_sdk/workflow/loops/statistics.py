"""RunStatistics: staleness, publish lag and response lengths of a whole run, across all its driver
processes, for summary.json.

statistics = RunStatistics()
statistics.add(event)            # every event of the run, in order
statistics.step(step, ages)      # every acknowledged step; one trained again replaces its earlier ages
statistics.summary()             # {"staleness": ..., "publish_lag": ..., "lengths": ...}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...types import AgeSums, Event, TokenAges
from ...types import events as ev
from ...types.reports import BINS_PER_DOUBLING

QUANTILES = (0.5, 0.9, 0.99)
MOST_ERRORS = 3.0
"""Difference of the mean lengths of trained and generated responses, in standard errors, above which a run warns."""
LEAST_SHIFT = 0.01  # relative difference above which a run warns


@dataclass
class _Lag:
    """Publish lag of one replica over its time in the run. ``loaded``: its version; None while it is absent."""

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

    def load(self, version: int | None, now: float, published: int) -> None:
        """Set the loaded version."""
        self.until(now, published)
        if self.loaded is None:
            self.since = now
        self.loaded = version


def bin_start(number: int) -> float:
    """Return the lower bound of a bin."""
    return float(2 ** (number / BINS_PER_DOUBLING))


def bin_middle(number: int) -> float:
    """Return the middle of the integers in a bin."""
    low, high = math.ceil(bin_start(number) - 1e-9), math.ceil(bin_start(number + 1) - 1e-9) - 1
    return (low + max(low, high)) / 2


@dataclass
class LengthHistogram:
    """A histogram with exact mean and deviation. ``tokens``, ``squares``: sums of lengths and squares."""

    rows: float = 0
    tokens: float = 0
    squares: float = 0
    bins: dict[int, float] = field(default_factory=dict)

    def add(self, bins: Mapping[int, float], tokens: float, squares: float) -> None:
        """Add rows by bin, with the sums of their lengths and squared lengths."""
        self.rows += sum(bins.values())
        self.tokens += tokens
        self.squares += squares
        for number, rows in bins.items():
            self.bins[number] = self.bins.get(number, 0) + rows

    @property
    def mean(self) -> float:
        """The mean length; nan without rows."""
        return self.tokens / self.rows if self.rows else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 with fewer than two rows."""
        if self.rows < 2:
            return 0.0
        return math.sqrt(max(self.squares - self.tokens * self.tokens / self.rows, 0.0) / (self.rows - 1))

    def quantile(self, share: float) -> float:
        """Return the length not exceeded by ``share`` of the rows, with the precision of a bin; nan without rows."""
        left = share * self.rows
        for number in sorted(self.bins):
            left -= self.bins[number]
            if left <= 0:
                return bin_middle(number)
        return math.nan

    def with_unfinished(self, unfinished: LengthHistogram) -> LengthHistogram:
        """Return the estimated histogram of all responses, as if the ``unfinished`` ones had
        finished like the longer finished ones (Kaplan and Meier 1958, product-limit estimate)."""
        if not unfinished.rows:
            return self
        rows = at_risk = self.rows + unfinished.rows
        left, found = 1.0, LengthHistogram()
        for number in sorted({*self.bins, *unfinished.bins}):
            share = left * self.bins.get(number, 0) / at_risk
            at_risk -= self.bins.get(number, 0) + unfinished.bins.get(number, 0)
            left -= share
            if at_risk < 0.5:  # no longer response
                share, left = share + left, 0.0
            if share:
                length = bin_middle(number)
                found.add({number: share * rows}, share * rows * length, share * rows * length**2)
        return found


@dataclass
class LengthStatistics:
    """Response lengths by (state, reason) of their rows' end: of whole responses, and of unfinished ones so far."""

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
        return _merged(lengths for (state, _), lengths in self.whole.items() if state == "consumed")

    @property
    def generated(self) -> LengthHistogram:
        """Lengths of all rows except cancelled ones; an estimate if some ended unfinished. Without
        dropped rows these would be trained."""
        whole, unfinished = (
            _merged(lengths for (state, _), lengths in ends.items() if state != "cancelled")
            for ends in (self.whole, self.unfinished)
        )
        return whole.with_unfinished(unfinished)

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
        ended: dict[str, Any] = {}
        for state, reason in sorted({*self.whole, *self.unfinished}):
            found = {"whole": self.whole.get((state, reason)), "unfinished": self.unfinished.get((state, reason))}
            plain = {name: _plain(lengths) for name, lengths in found.items() if lengths is not None}
            ended[f"{state}: {reason}" if reason else state] = plain
        return {"trained": one, "generated": other, "ratio": ratio, "ended": ended}


class RunStatistics:
    """Counts events and steps. Not thread-safe."""

    def __init__(self) -> None:
        self.lengths = LengthStatistics()
        self._steps: dict[int, AgeSums] = {}
        self._lags: dict[str, _Lag] = {}
        self._published = -1
        self.before_s = 0.0  # running time of earlier driver processes, each up to its last event (seconds)
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
            self._lags.setdefault(event.worker, _Lag()).load(event.version, event.time_s, self._published)

    def step(self, step: int, ages: TokenAges) -> None:
        """Set the ages of a step's tokens."""
        self._steps[step] = AgeSums.of(ages)

    @property
    def lags(self) -> dict[str, int]:
        """Number of published versions not loaded yet, by replica."""
        return {
            name: max(self._published - lag.loaded, 0) for name, lag in self._lags.items() if lag.loaded is not None
        }

    def summary(self) -> dict[str, Any]:
        """Return staleness in versions by tokens trained, publish lag by replica over time, lengths in tokens."""
        self._until(self._last_s)
        ages, staleness = AgeSums.all(self._steps.values()), {}
        for part in ("", "_in_flight", "_in_queue"):
            total, most = ages.parts.get(f"staleness{part}", (0, 0))
            mean = round(total / ages.tokens, 4) if ages.tokens else None
            staleness[part.removeprefix("_") or "total"] = {"mean": mean, "max": most}
        return {
            "staleness": staleness,
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
        """Count a new driver process: earlier replicas are gone, and the time between the two does not count."""
        for lag in self._lags.values():
            lag.load(None, self._last_s, self._published)
        if self._began_s is not None:
            self.before_s += self._last_s - self._began_s
        self._began_s = self._last_s = event.time_s  # the clock restarts with the host

    def _until(self, now: float) -> None:
        for lag in self._lags.values():
            lag.until(now, self._published)


def _merged(histograms: Iterable[LengthHistogram]) -> LengthHistogram:
    total = LengthHistogram()
    for each in histograms:
        total.add(each.bins, each.tokens, each.squares)
    return total


def _plain(lengths: LengthHistogram) -> dict[str, Any]:
    found = {"mean": lengths.mean, **{f"p{100 * q:.0f}": lengths.quantile(q) for q in QUANTILES}}
    return {"rows": round(lengths.rows), **{k: round(v, 2) if math.isfinite(v) else None for k, v in found.items()}}
