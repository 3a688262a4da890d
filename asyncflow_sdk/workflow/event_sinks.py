"""Sinks of a run's events: the recorder, trackers, and users' callbacks.

The server calls ``EventSinks`` in its thread; a sink that may block takes its events from an
``EventInbox`` in a thread of its own.

sinks = EventSinks([recorder, trackers, Callbacks(on_event)])
sinks.event(event)
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..types import Batch, Event
from ..types import events as ev

GATHER_S = 0.25
"""Delay of an empty inbox's reader: events come in bursts, and each wake-up takes the GIL from the server (seconds)."""
ReadRows: TypeAlias = Callable[[], Batch]


class EventSink(abc.ABC):
    """Receives a run's events in the server's thread. The methods must return soon and not raise."""

    records_steps: bool = False
    """True if it takes the rows of steps."""

    @abc.abstractmethod
    def event(self, event: Event) -> None:
        """Called for each event."""

    def step(self, step: int, read: ReadRows) -> None:
        """Called for each acknowledged step. ``read`` returns its rows, once, in any thread, at any time."""

    def settle(self, before: int) -> None:
        """Called before a checkpoint makes the steps below ``before`` final: a resumed run does not
        repeat their ``step``."""

    def close(self) -> None:
        """Take no more events, and finish those received."""


class EventSinks(EventSink):
    """Passes events to several sinks, in their order."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        self.sinks = tuple(sinks)
        self._recording = tuple(sink for sink in sinks if sink.records_steps)
        self.records_steps = bool(self._recording)

    def event(self, event: Event) -> None:
        """Pass an event on."""
        for sink in self.sinks:
            sink.event(event)

    def step(self, step: int, read: ReadRows) -> None:
        """Pass a step on."""
        for sink in self._recording:
            sink.step(step, read)

    def settle(self, before: int) -> None:
        """Pass the limit of final steps on."""
        for sink in self._recording:
            sink.settle(before)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close()


class Callbacks(EventSink):
    """Calls functions in the server's thread."""

    def __init__(
        self,
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, ReadRows], None] | None = None,
        on_final: Callable[[int], None] | None = None,
    ) -> None:
        self._on_event, self._on_step, self._on_final = on_event, on_step, on_final
        self.records_steps = on_step is not None or on_final is not None

    def event(self, event: Event) -> None:
        """Call ``on_event``."""
        if self._on_event is not None:
            self._on_event(event)

    def step(self, step: int, read: ReadRows) -> None:
        """Call ``on_step``."""
        if self._on_step is not None:
            self._on_step(step, read)

    def settle(self, before: int) -> None:
        """Call ``on_final``."""
        if self._on_final is not None:
            self._on_final(before)


class EventInbox:
    """Events, and numbers of steps, for one reading thread. With ``most`` waiting only trained steps
    and numbers are added. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.dropped = 0
        self._most = most
        self._events: queue.SimpleQueue[Event | int | None] = queue.SimpleQueue()
        self._closing = threading.Event()

    def put(self, item: Event | int) -> None:
        """Add an item, or drop it. Does not block."""
        if self._events.qsize() >= self._most and not isinstance(item, (ev.StepTrained, int)):
            self.dropped += 1
            return
        self._events.put(item)

    @property
    def is_empty(self) -> bool:
        """True if no event waits."""
        return self._events.empty()

    def get(self) -> Event | int | None:
        """Wait for the next item. Returns None once, after ``close`` and all items."""
        if self._events.empty():
            self._closing.wait(GATHER_S)
        return self._events.get()

    def close(self) -> None:
        """End the reader after the waiting events."""
        self._closing.set()
        self._events.put(None)
