"""Gauges: what a server adds to the ledger's status: where its clients run, and bytes."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from .._version import __version__
from ..ledger import StatusReport
from .places import Places
from .protocol import Hello


class Gauges:
    """Not thread-safe: the server's thread owns it."""

    TRANSIENT = frozenset({"_directories", "_places", "_host"})

    def __init__(self, directories: set[Path], places: Places) -> None:
        self._directories, self._places = directories, places
        self._clients: dict[int, tuple[int, str]] = {}  # session → process and host
        self._host = socket.gethostname()

    def came(self, session: int, hello: Hello) -> None:
        self._clients[session] = hello.pid, hello.host

    def went(self, session: int) -> None:
        self._clients.pop(session, None)

    def held(self) -> int:
        """Bytes of shared memory of the run."""
        total = 0
        with contextlib.suppress(OSError):  # a file may go meanwhile
            for directory in self._directories:
                total += sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return total

    def fill(self, report: StatusReport, garbage: int) -> StatusReport:
        """The report with what the ledger does not know."""
        sessions = []
        for session in report.sessions:
            pid, host = self._clients.get(session.id, (0, ""))
            sessions.append(msgspec.structs.replace(session, pid=pid, host=host))
        return msgspec.structs.replace(
            report, sessions=tuple(sessions), payload_bytes=self._places.live_bytes, held_bytes=self.held(),
            written_bytes=self._places.written_bytes, garbage=garbage, pid=os.getpid(), host=self._host,
            sdk=__version__,
        )  # fmt: skip
