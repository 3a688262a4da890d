"""Sinks of a run's events: the recorder, trackers, and users' functions.

The server calls them in its thread. A blocking sink is an ``EventThread``.

server = QueueServer(on_event=call_all(sink.event for sink in (recorder, trackers)))
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ...queue.listeners import StepRows
from ...types import Event
from ...types import events as ev

GATHER_S = 0.25
"""Delay of an empty inbox's reader: events come in bursts, and each wake-up takes the GIL from the server
(seconds)."""
MOST_EVENTS = 200_000
"""Most events that wait for the disk, or for a listener as on a held terminal."""
LISTENER_CLOSE_S = 60.0


class EventSink(abc.ABC):
    """Receives a run's events in the server's thread. The methods must return soon and not raise."""

    records_steps: bool = False
    """True if it takes the rows of steps."""

    @abc.abstractmethod
    def event(self, event: Event) -> None:
        """Called for each event."""

    def step(self, step: int, rows: StepRows) -> None:
        """Called for each acknowledged step."""

    def settle(self, before: int) -> None:
        """Called in a thread of its own before a checkpoint makes the steps below ``before`` final: a
        resumed run does not repeat their ``step``. It may take long: the checkpoint waits for it."""

    def close(self) -> None:
        """Take no more events, and finish those received."""


def call_all(functions: Iterable[Callable[..., None] | None]) -> Callable[..., None] | None:
    """Return a function that calls each of these, except None, with its arguments; None without
    any."""
    given = [function for function in functions if function is not None]

    def call(*arguments: Any) -> None:
        for function in given:
            function(*arguments)

    return call if given else None


class EventThread(EventSink):
    """Takes events in a thread of its own, one by one, so that a slow sink delays nobody.

    With ``most_waiting`` events waiting only trained steps and numbers of steps are added;
    ``dropped`` counts the others. ``put`` is thread-safe.
    """

    def __init__(self, name: str, most_waiting: int) -> None:
        self.dropped = 0
        self.ended = False
        """True if it takes no more events."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._most = most_waiting
        self._waiting: queue.SimpleQueue[Event | int | None] = queue.SimpleQueue()
        self._closing = threading.Event()

    def event(self, event: Event) -> None:
        """Have the thread take an event."""
        self.put(event)

    def put(self, item: Event | int) -> None:
        """Add an event or the number of a step, or drop it. Does not block."""
        if self.ended:
            return
        if self._waiting.qsize() >= self._most and not isinstance(item, (ev.StepTrained, int)):
            self.dropped += 1
            return
        self._waiting.put(item)

    @property
    def is_idle(self) -> bool:
        """True if nothing waits for the thread."""
        return self._waiting.empty()

    def finish(self) -> None:
        """End the thread after the waiting events. Does not wait."""
        self._closing.set()
        self._waiting.put(None)

    def begin(self) -> bool:
        """Called first in the thread. Returns False to end."""
        return True

    @abc.abstractmethod
    def take(self, item: Any) -> bool:
        """Handle an event or the number of a step in the thread. Returns False to end."""

    def end(self) -> None:
        """Called last in the thread."""

    def _run(self) -> None:
        try:
            if self.begin():
                while (item := self._next()) is not None and self.take(item):
                    pass
                self.end()
        finally:
            self.ended = True

    def _next(self) -> Event | int | None:
        """Wait for the next item. Returns None after ``finish`` and all items."""
        if self._waiting.empty():
            self._closing.wait(GATHER_S)
        return self._waiting.get()


class Listener(EventThread):
    """A user's function with every event. ``problems``: its failures, after ``close``."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        super().__init__("listener", MOST_EVENTS)
        self._function = function
        self.problems: list[str] = []
        self.thread.start()

    def take(self, item: Event) -> bool:
        """Call the function. Returns False after an exception."""
        try:
            self._function(item)
        except Exception as error:
            name = getattr(self._function, "__qualname__", self._function)
            self.problems.append(f"{name} failed and was left out: {error!r}")
            return False
        return True

    def close(self) -> None:
        """Deliver the waiting events, and abandon a function that blocks for ``LISTENER_CLOSE_S``."""
        self.finish()
        self.thread.join(LISTENER_CLOSE_S)
        if self.thread.is_alive():
            self.ended = True
            self.problems.append("a listener still blocks; its last events were left out")
        if self.dropped:
            self.problems.append(f"{self.dropped} events were left out while a listener blocked")
