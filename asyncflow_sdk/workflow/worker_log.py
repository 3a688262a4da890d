"""WorkerLog: the events of one worker, sent to the run's recorder."""

from __future__ import annotations

import time
from typing import Any

from ..queue import Connection
from ..types import events as ev


class WorkerLog:
    """Reports events under the connection's name. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def note(self, text: str, level: str = "warning") -> None:
        """Report a message for people. ``level``: info, warning or error."""
        self._connection.report(
            ev.Note(time_s=time.monotonic(), worker=self._connection.name, text=text, level=level)
        )

    def span(self, kind: str, began: float, **fields: Any) -> None:
        """Report work of ``kind`` from ``began`` (monotonic seconds) until now. ``fields``: others of ``ev.Span``."""
        seconds = time.monotonic() - began
        self._connection.report(
            ev.Span(time_s=began, worker=self._connection.name, kind=kind, seconds=seconds, **fields)
        )
