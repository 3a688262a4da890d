"""Trackers of a run: event sinks with a thread each. A slow or failing one delays nobody.

trackers = Trackers(make_trackers(["tensorboard", ("mine", {"project": "x"})]))
trackers.start(TrackedRun(...), report)              # opens them in their threads
trackers.event(event) ...                            # from the server's thread; does not block
trackers.close()
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...errors import ConfigError, PluginError
from ...interfaces import TrackedRun, Tracker
from ...plugins import registry
from ...types import Event
from ...types import events as ev
from .event_sinks import EventSink, EventThread
from .record_files import sample_rows, step_path

MOST_WAITING = 10_000  # most events that wait for a tracker
CLOSE_S = 30.0  # time for all trackers to close (seconds)

Named: TypeAlias = str | Callable[..., Tracker]
Tracked: TypeAlias = Named | Tracker | tuple[Named, Mapping[str, Any]]
"""A name, "module:Class", a class, one of these with options; or a Tracker."""


def tracker_list(given: Tracked | Sequence[Tracked]) -> list[Any]:
    """Return one tracker or a sequence of them as a list."""
    return [given] if isinstance(given, (str, Tracker)) or callable(given) or _is_pair(given) else list(given)


def make_trackers(given: Tracked | Sequence[Tracked]) -> list[tuple[str, Tracker]]:
    """Return trackers with their labels. Raises PluginError, ConfigError."""
    return [(tracker_label(each), _made(each)) for each in tracker_list(given)]


def check_tracker(given: Any) -> None:
    """Check a tracker's name and options without making it. Raises PluginError, ConfigError."""
    if not isinstance(given, Tracker):
        _factory(given)


def tracker_label(given: Any) -> str:
    """Return the name of a tracker in texts."""
    of = given[0] if _is_pair(given) else given
    return of if isinstance(of, str) else str(getattr(of, "__qualname__", type(of).__name__))


def _made(given: Any) -> Tracker:
    if isinstance(given, Tracker):
        return given
    factory, options = _factory(given)
    made = factory(**options)
    if not isinstance(made, Tracker):
        kind = type(made).__name__
        raise PluginError(f"tracker {tracker_label(given)!r} is a {kind}, no asyncflow_sdk.interfaces.Tracker")
    if made.sample_every < 0:
        raise ConfigError(f"sample_every is a number of steps, 0 for none, not {made.sample_every}")
    return made


def _factory(given: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    of, options = given if _is_pair(given) else (given, {})
    if not (isinstance(of, str) or callable(of)):
        raise ConfigError(f"a tracker is a name, a class, or either with options, not {given!r:.100}")
    factory = registry().get("tracker", of).load() if isinstance(of, str) else of
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = ", ".join(map(str, inspect.signature(factory).parameters.values())) or "nothing"
        raise ConfigError(f"tracker {tracker_label(given)!r}: {error}; it takes: {known}") from None
    except ValueError:  # a factory without a readable signature
        pass
    return factory, dict(options)


def _is_pair(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Mapping)


class Trackers(EventSink):
    """All trackers of a run. ``start`` and ``close`` are called once; ``event`` at any time, in any thread."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]]) -> None:
        self._threads = [_TrackerThread(name, tracker) for name, tracker in trackers]

    def __bool__(self) -> bool:
        return bool(self._threads)

    def event(self, event: Event) -> None:
        """Pass an event to every tracker's thread."""
        for each in self._threads:
            each.event(event)

    def start(self, run: TrackedRun, report: Callable[[Event], None], settle: Callable[[int], None] | None) -> None:
        """Open the trackers. ``report`` receives a warning from the thread of a failing one; ``settle``
        blocks until the steps below a number are recorded; None: steps are not."""
        for each in self._threads:
            each.open(run, report, settle)

    def close(self) -> None:
        """Let the trackers finish, and abandon slower ones after ``CLOSE_S``."""
        until = time.monotonic() + CLOSE_S
        for each in self._threads:
            each.finish()
        for each in self._threads:
            each.leave(max(0.0, until - time.monotonic()))


class _TrackerThread(EventThread):
    """Passes events to a tracker. After its first exception the tracker gets no more."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        super().__init__(f"tracker-{name}", MOST_WAITING)
        self._name, self._tracker, self._doing = name, tracker, "open"
        self._warned = False
        self._to_sample: int | None = None  # a trained step; its rows are recorded before the next step is trained

    def open(self, run: TrackedRun, report: Callable[[Event], None], settle: Callable[[int], None] | None) -> None:
        """Open the tracker in its thread."""
        self._tracked, self._report, self._settle = run, report, settle
        self.thread.start()

    def leave(self, timeout_s: float) -> None:
        """Wait for the end of the thread, or abandon it with a warning."""
        if not self.finish(timeout_s):
            self.ended = True
            self._warn(f"has not closed in {CLOSE_S:g} s and is left to itself; its last numbers may be missing")

    def begin(self) -> None:
        """Open the tracker."""
        self._tracker.open(self._tracked)

    def take(self, item: Event) -> None:
        """Log a trained step, and pass every event on."""
        if isinstance(item, ev.StepTrained):
            self._sample()
            if self._tracker.sample_every and item.step % self._tracker.sample_every == 0:
                self._to_sample = item.step
            self._doing = f"log of step {item.step}"
            self._tracker.log(item.step, item.version, dict(item.metrics))
        self._doing = f"event {type(item).__name__}"
        self._tracker.event(item)
        if self.dropped and not self._warned:
            self._warned = True
            self._warn("is slower than the run: events that are no steps are left out for it")

    def end(self) -> None:
        """Close the tracker."""
        self.attempt(self._sample)
        self._doing = "close"
        self._tracker.close()

    def failed(self, error: BaseException) -> None:
        """Leave the tracker out."""
        self._warn(f"failed and is left out, the run goes on: {self._doing}: {type(error).__name__}: {error}")

    def _sample(self) -> None:
        step, self._to_sample = self._to_sample, None
        if step is None or self._settle is None:
            return
        self._doing = f"samples of step {step}"
        self._settle(step + 1)
        path = step_path(self._tracked.directory, step)
        if path.exists() and (rows := sample_rows(path)):  # else not acknowledged, or the disk refused it
            self._tracker.samples(step, rows)

    def _warn(self, text: str) -> None:
        self._report(ev.Note(time_s=time.monotonic(), text=f"tracker {self._name!r} {text}", level="warning"))
