"""Trackers of a run: each in a thread of its own, so that one that is slow or fails is nobody else's matter.

tracking = Tracking(trackers_of(["tensorboard", ("mine", {"project": "x"})]))
tracking.start(TrackedRun(...), say=report)          # opened in their threads
tracking(event) ...                                  # from the server's thread; never waits
tracking.close()
"""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ..errors import ConfigError, PluginError
from ..interfaces import TrackedRun, Tracker
from ..plugins import registry
from ..types import Event
from ..types import events as ev

MOST_WAITING = 10_000
"""So many events may wait for a tracker; beyond, only steps are kept for it."""
CLOSE_S = 30.0

Named: TypeAlias = str | Callable[..., Tracker]
Tracked: TypeAlias = Named | Tracker | tuple[Named, Mapping[str, Any]]
"""A name, "module:Class", a class, one of these with options; or a Tracker."""


def several(given: Tracked | Sequence[Tracked]) -> list[Any]:
    """One tracker, or a sequence of them, as a list."""
    return [given] if isinstance(given, (str, Tracker)) or callable(given) or _is_pair(given) else list(given)


def trackers_of(given: Tracked | Sequence[Tracked]) -> list[tuple[str, Tracker]]:
    """Made, with what people call them. Raises PluginError, ConfigError."""
    return [_made(each) for each in several(given)]


def check_tracker(given: Any) -> None:
    """Raises PluginError, ConfigError for one that cannot be made, as far as it is known without making it."""
    if not isinstance(given, Tracker):
        _found(given)


def label_of(given: Any) -> str:
    """What people call it."""
    of = given[0] if _is_pair(given) else given
    return of if isinstance(of, str) else str(getattr(of, "__qualname__", type(of).__name__))


def _made(given: Any) -> tuple[str, Tracker]:
    if isinstance(given, Tracker):
        return label_of(given), given
    factory, options = _found(given)
    made = factory(**options)
    if not isinstance(made, Tracker):
        raise PluginError(
            f"tracker {label_of(given)!r} is a {type(made).__name__}, which is no asyncflow_sdk.Tracker"
        )
    return label_of(given), made


def _found(given: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    of, options = given if _is_pair(given) else (given, {})
    if not (isinstance(of, str) or callable(of)):
        raise ConfigError(f"a tracker is a name, a class, or either with options, not {given!r:.100}")
    factory = registry().get("tracker", of).load() if isinstance(of, str) else of
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = ", ".join(map(str, inspect.signature(factory).parameters.values())) or "nothing"
        raise ConfigError(f"tracker {label_of(given)!r}: {error}; it takes: {known}") from None
    except ValueError:  # a factory that has no signature to be read
        pass
    return factory, dict(options)


def _is_pair(given: Any) -> bool:
    return isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Mapping)


class Tracking:
    """All trackers of a run. ``start`` and ``close`` are called once; events may come before, and from any thread."""

    def __init__(self, trackers: Sequence[tuple[str, Tracker]]) -> None:
        self._listening = [_Listening(name, tracker) for name, tracker in trackers]

    def __call__(self, event: Event) -> None:
        for each in self._listening:
            each.hear(event)

    def start(self, run: TrackedRun, say: Callable[[Event], None]) -> None:
        """``say`` is told of those that fail, in their threads."""
        for each in self._listening:
            each.start(run, say)

    def close(self) -> None:
        """Have them take what is left; those that do not in half a minute are left to themselves."""
        until = time.monotonic() + CLOSE_S
        for each in self._listening:
            each.end()
        for each in self._listening:
            each.join(max(0.0, until - time.monotonic()))


class _Listening:
    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = False
        self._skipped = False
        self._said = False

    def hear(self, event: Event) -> None:
        if self._over:
            return
        if self._inbox.qsize() >= MOST_WAITING and not isinstance(event, ev.StepTrained):
            self._skipped = True
            return
        self._inbox.put(event)

    def start(self, run: TrackedRun, say: Callable[[Event], None]) -> None:
        self._say = say
        self._thread = threading.Thread(target=self._run, args=(run,), name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._inbox.put(None)

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                self._over = True
                self._tell(f"has not closed in {CLOSE_S:g} s and is left to itself; its last numbers may be missing")

    def _run(self, run: TrackedRun) -> None:
        try:
            if not self._done("open", lambda: self._tracker.open(run)):
                return
            while (event := self._inbox.get()) is not None and self._take(event):
                if self._skipped and not self._said:
                    self._said = True
                    self._tell("is slower than the run: events that are no steps are left out for it")
            self._done("close", self._tracker.close)
        finally:
            self._over = True

    def _take(self, event: Event) -> bool:
        if isinstance(event, ev.StepTrained):
            step = event
            log = lambda: self._tracker.log(step.step, step.version, dict(step.metrics))  # noqa: E731
            if not self._done(f"log of step {step.step}", log):
                return False
        return self._done(f"event {type(event).__name__}", lambda: self._tracker.event(event))

    def _done(self, what: str, call: Callable[[], None]) -> bool:
        """Whether it went well."""
        try:
            call()
        except (Exception, SystemExit) as error:
            self._over = True
            self._tell(f"failed and is left out, the run goes on: {what}: {type(error).__name__}: {error}")
            return False
        return True

    def _tell(self, text: str) -> None:
        self._say(ev.Note(time_s=time.monotonic(), text=f"tracker {self._name!r} {text}", level="warning"))
