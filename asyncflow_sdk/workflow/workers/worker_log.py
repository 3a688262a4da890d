"""WorkerLog: the events of one worker, sent to the run's recorder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ...queue import Connection
from ...types import Event
from ...types import events as ev


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
        """Report work of ``kind`` from ``began`` (monotonic seconds) until now. ``fields``: others
        of ``ev.Span``."""
        self.report(ev.Span, time_s=began, seconds=time.monotonic() - began, kind=kind, **fields)

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: Any) -> Iterator[None]:
        """Report this block, unless it raises, as a span of ``kind`` with the CPU time of this process."""
        began, cpu = time.monotonic(), time.process_time()
        yield
        self.span(kind, began, cpu_s=time.process_time() - cpu, **fields)
