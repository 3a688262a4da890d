"""Listeners: functions called by the queue server for its owner. Their exceptions are logged, and so
are the run's notes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ..errors import AsyncFlowError
from ..types import Batch, Event
from ..types import events as ev
from .protocol import error_text, user_trace

_log = logging.getLogger(__name__)
_run_log = logging.getLogger("asyncflow")
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}
GROUPS_PER_SAMPLE = 16
"""One group in so many is sampled for the record of a step, if columns are on other hosts."""
LOG_S = 5.0
"""Longest wait at the end for a handler of the log that blocks, as on a held terminal."""


class StepRows:
    """A step's rows, read once, at the first call. Thread-safe. ``unread``: True until then. ``sample``:
    reads some of them, if columns are on other hosts; then both reads may wait for these hosts, and
    must not run in the server's thread."""

    def __init__(self, read: Callable[[], Batch], sample: Callable[[], Batch] | None = None) -> None:
        self.unread, self.sample = True, sample
        self._read: Callable[[], Batch] | None = read
        self._found: Batch | Exception | None = None
        self._lock = threading.Lock()

    def __call__(self) -> Batch:
        """Return the rows. Raises LeaseLost, SchemaError, OSError if they cannot be read."""
        self.now()
        with self._lock:
            found, self._found = self._found, None
        assert found is not None, "the rows of a step are read once"
        if isinstance(found, Exception):
            raise found
        return found

    def now(self) -> None:
        """Read the rows, if unread, before their memory is freed. A later call raises its error."""
        with self._lock:
            read, self._read, self.unread = self._read, None, False
            if read is not None:
                try:
                    self._found = read()
                except (AsyncFlowError, OSError) as error:
                    self._found = error


class Listeners:
    """``on_event`` and ``on_step`` run in the server's thread and must return at once; ``on_final`` runs in a thread
    of its own, and the checkpoint waits for it. ``on_step`` gets the number of an acknowledged step, and its rows. A
    restarted server reports the steps not covered by a checkpoint again. ``on_final`` gets a number before a
    checkpoint makes the steps below it final; they are not reported again, so it returns only when they are no longer
    needed."""

    def __init__(
        self,
        on_event: Callable[[Event], None] | None = None,
        on_step: Callable[[int, StepRows], None] | None = None,
        on_final: Callable[[int], None] | None = None,
    ) -> None:
        self._listeners: dict[str, Callable[..., None] | None] = {
            "event": on_event,
            "step": on_step,
            "final": on_final,
        }
        self._muted = False
        self._lines: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._logging: threading.Thread | None = None

    def mute(self, muted: bool) -> None:
        """Call no listener from now on, as in a replay; or call them again."""
        self._muted = muted

    def has(self, kind: str) -> bool:
        """Return True if there is a listener for "event", "step" or "final"."""
        return self._listeners[kind] is not None and not self._muted

    def event(self, event: Event) -> None:
        """Log a note or the restart of a worker, and call the listener for events."""
        if isinstance(event, ev.Note):
            worker = f" ({event.worker})" if event.worker else ""
            self._log_line(_LEVELS.get(event.level, logging.INFO), f"{event.text}{worker}")
        elif isinstance(event, ev.WorkerState) and event.state == "restarting":
            self._log_line(logging.WARNING, f"worker {event.worker} {event.detail}")
        self.call("event", event)

    def call(self, kind: str, *arguments: object) -> None:
        """Call a listener, if there is one: with an event, with a step and its rows, or with the first step that a
        checkpoint does not make final (which may take long: in a thread of its own)."""
        listener = self._listeners[kind]
        if listener is None or self._muted:
            return
        try:
            listener(*arguments)
        except Exception as error:
            name = getattr(listener, "__qualname__", type(listener).__name__)
            _log.error("listener %s of the queue server failed: %s\n%s", name, error_text(error), user_trace(error))

    def _log_line(self, level: int, text: str) -> None:
        """Log a line in a thread of its own: a handler may block, and must not stop the server."""
        if self._muted or not _run_log.isEnabledFor(level):
            return
        if self._logging is None:
            self._logging = threading.Thread(target=self._log_lines, name="asyncflow-log", daemon=True)
            self._logging.start()
        self._lines.put((level, text))

    def _log_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            _run_log.log(*line)

    def close(self) -> None:
        """Log the rest."""
        if self._logging is not None:
            self._lines.put(None)
            self._logging.join(LOG_S)
