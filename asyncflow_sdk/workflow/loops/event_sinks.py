"""Events of a run: their sources, the workers (``WorkerLog``), and their sinks: the recorder, trackers, and users'
functions. The server calls the sinks in its thread. A blocking sink is an ``EventThread``.

server = QueueServer(on_event=call_all(sink.event for sink in (recorder, trackers)))
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...queue import Connection
from ...queue.listeners import StepRows
from ...types import Event
from ...types import events as ev

GATHER_S = 0.25
"""Delay of an empty inbox's reader: events come in bursts, and each wake-up takes the GIL from the server
(seconds)."""
MOST_EVENTS = 200_000  # most events that wait for the disk, or for a listener as on a held terminal
LISTENER_CLOSE_S = 60.0
LINE_S = 10.0  # time between two lines of progress in the log (seconds)
_log = logging.getLogger("asyncflow")


class EventSink(abc.ABC):
    """Receives a run's events in the server's thread. The methods must return soon and not raise."""

    records_steps: bool = False  # True if it takes the rows of steps

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
    """Return a function to call each of these, except None, with its arguments; None without any."""
    given = [function for function in functions if function is not None]

    def _call(*arguments: Any) -> None:
        for function in given:
            function(*arguments)

    return _call if given else None


class EventThread(EventSink):
    """Takes events in a thread of its own, one by one: a slow sink delays nobody.

    With ``most_waiting`` events waiting only trained steps and numbers of steps are added;
    ``dropped`` counts the others. ``event`` is thread-safe.
    """

    def __init__(self, name: str, most_waiting: int) -> None:
        self.dropped = 0
        self.ended = False  # True if it takes no more events
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._most = most_waiting
        self._waiting: queue.SimpleQueue[Event | int | None] = queue.SimpleQueue()
        self._closing = threading.Event()

    def event(self, event: Event | int) -> None:
        """Have the thread take an event or the number of a step, or drop it. Does not block."""
        if not self.ended and (self._waiting.qsize() < self._most or isinstance(event, (ev.StepTrained, int))):
            self._waiting.put(event)
        elif not self.ended:
            self.dropped += 1

    @property
    def idle(self) -> bool:
        """True if nothing waits for the thread."""
        return self._waiting.empty()

    def finish(self, timeout_s: float = 0.0) -> bool:
        """End the thread after the waiting events, and wait for its end. Return True if it has ended."""
        if not self._closing.is_set():
            self._closing.set()
            self._waiting.put(None)
        if self.thread.ident is not None:
            self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def begin(self) -> None:
        """Called first in the thread. After an exception nothing else is called."""

    @abc.abstractmethod
    def take(self, item: Any) -> None:
        """Handle an event or the number of a step in the thread. After an exception it is not called any more."""

    def end(self) -> None:
        """Called last in the thread, also after an exception of ``take``."""

    def failed(self, error: BaseException) -> None:
        """Called in the thread for an exception of ``begin``, ``take`` or ``end``. Default: raise it."""
        raise error

    def attempt(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Call a function in the thread. Pass an exception to ``failed``, and return False."""
        try:
            call(*arguments)
        except (Exception, SystemExit) as error:
            self.ended = True
            self.failed(error)
            return False
        return True

    def _run(self) -> None:
        try:
            if self.attempt(self.begin):
                while (item := self._next()) is not None and self.attempt(self.take, item):
                    pass
                self.attempt(self.end)
        finally:
            self.ended = True

    def _next(self) -> Event | int | None:
        """Wait for the next item. Returns None after ``finish`` and all items."""
        if self.idle:
            self._closing.wait(GATHER_S)
        return self._waiting.get()


class Listener(EventThread):
    """A user's function with every event. ``problems``: its failures, after ``close``."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        super().__init__("listener", MOST_EVENTS)
        self._function = function
        self.problems: list[str] = []
        self.thread.start()

    def take(self, item: Event) -> None:
        """Call the function."""
        self._function(item)

    def failed(self, error: BaseException) -> None:
        """Note the problem."""
        name = getattr(self._function, "__qualname__", self._function)
        self.problems.append(f"{name} failed and was left out: {error!r}")

    def close(self) -> None:
        """Deliver the waiting events, and abandon a function blocking for ``LISTENER_CLOSE_S``."""
        if not self.finish(LISTENER_CLOSE_S):
            self.ended = True
            self.problems.append("a listener still blocks; its last events were left out")
        if self.dropped:
            self.problems.append(f"{self.dropped} events were left out while a listener blocked")


class ProgressLine:
    """Shows the progress of a run of ``steps`` steps: on a terminal in a line of stderr, rewritten after each
    step; elsewhere in the log, at INFO. Not thread-safe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._line = ""  # on the terminal
        self._began_s = self._logged_s = -math.inf

    def __call__(self, event: Event) -> None:
        if isinstance(event, ev.Begun):
            self._began_s = event.time_s
            self._show(0, "workers start", event.time_s)
        elif isinstance(event, ev.StepTrained):
            reward, seconds = event.metrics.get("reward", math.nan), event.time_s - self._began_s
            self._show(event.step + 1, f"reward {reward:.3f}, {seconds:.0f} s", event.time_s)
        elif isinstance(event, (ev.Note, ev.WorkerState)):  # the log may have written over the line
            self._write(self._line)

    def end(self) -> None:
        """Leave the line on the terminal."""
        self._write(f"{self._line}\n")

    def _show(self, done: int, text: str, now_s: float) -> None:
        line = f"step {done} of {self._steps}: {text}"
        if sys.stderr is not None and sys.stderr.isatty():
            self._line = line
            self._write(line)
        elif now_s >= self._logged_s + LINE_S or done == self._steps:
            self._logged_s = now_s
            _log.info(line)

    def _write(self, text: str) -> None:
        if self._line:
            with contextlib.suppress(OSError, ValueError):  # the terminal is gone; the run goes on
                sys.stderr.write(f"\r\x1b[K{text}\r")  # the log begins where the line does
                sys.stderr.flush()


class WorkerLog:
    """Reports events under the connection's name. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, event: type[Event], **fields: Any) -> None:
        """Report an event of now."""
        self._connection.report(event(**{"time_s": time.monotonic(), "worker": self._connection.name, **fields}))

    def note(self, text: str, level: str = "warning", lasting: bool = False) -> None:
        """Report a message for people. ``level``, ``lasting``: fields of ``ev.Note``."""
        self.report(ev.Note, text=text, level=level, lasting=lasting)

    def span(self, kind: str, began: float, **fields: Any) -> None:
        """Report work of ``kind`` from ``began`` (monotonic seconds) until now. ``fields``: others of ``ev.Span``."""
        self.report(ev.Span, time_s=began, seconds=time.monotonic() - began, kind=kind, **fields)

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: Any) -> Iterator[None]:
        """Report this block, unless it raises, as a span of ``kind`` with the CPU time of this process."""
        began, cpu = time.monotonic(), time.process_time()
        yield
        self.span(kind, began, cpu_s=time.process_time() - cpu, **fields)
