"""``asyncflow top``: a running queue on the terminal. It reads the queue's status once a second and
changes nothing.

asyncflow top runs/x            # or an address; --once prints one screen, --json one object; q quits
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..errors import ServerLost
from ..types.defaults import CALL_S
from ..wire import probe
from ..workflow import Run, connect
from ..workflow.evaluation import read_evaluations
from ..workflow.loops.record_files import EVENTS, lasting_notes
from .figures import QueueFigures, RateWindow
from .queue_screen import queue_screen


class QueueMonitor:
    """Read the status of the queue at ``where``, an address or the directory of a run, every
    ``every_s`` seconds. ``key``, ``insecure``, ``timeout_s``: options of ``connect``."""

    def __init__(
        self,
        where: str,
        every_s: float = 1.0,
        key: Path | None = None,
        insecure: bool = False,
        timeout_s: float = CALL_S,
    ) -> None:
        if "://" in where:
            probe(where)  # connecting would wait for a server
        self._run: Run = connect(where, key=key, insecure=insecure, name="top", timeout_s=timeout_s)
        self.address = self._run.address
        self._title = where if where == self.address else f"{Path(where)} · {self.address}"
        self._directory = None if "://" in where else Path(where)
        self._warnings, self._read = list[str](), 0  # read so many bytes of the recorded events
        self._every_s = every_s
        self._window = RateWindow(max(5.0, 2 * every_s))

    def close(self) -> None:
        """Disconnect, unless the server has ended."""
        with contextlib.suppress(ServerLost):
            probe(self.address)
            self._run.close()

    def sample(self) -> QueueFigures:
        """Read the status once, without the session of this command. Raises ServerLost after the server has ended."""
        probe(self.address)  # a request to a lost server would wait for its deadline
        report = self._run.queue.status()
        sessions = tuple(session for session in report.sessions if session.id != self._run.session)
        report = msgspec.structs.replace(report, sessions=sessions, session_count=report.session_count - 1)
        if self._directory is not None:
            more, self._read = lasting_notes(self._directory / EVENTS, self._read)
            self._warnings += more
        return QueueFigures(
            title=self._title,
            report=report,
            rates=self._window.add(report),
            history=self._window.history,
            evaluations=read_evaluations(self._directory) if self._directory is not None else (),
            warnings=self._warnings,
        )

    def sample_twice(self) -> QueueFigures:
        """Read the status twice, to have rates, and return the second figures."""
        self.sample()
        time.sleep(self._every_s)
        return self.sample()

    def json(self, queue: QueueFigures) -> str:
        """Return the report, the rates and the scores as a JSON object. An unknown rate is null."""
        found = {
            "address": self.address,
            **_plain(queue.report),
            "per_second": _plain(queue.rates),
            "evaluations": {str(each.version): each.score for each in queue.evaluations},
            "warnings": queue.warnings,
        }
        return msgspec.json.encode(found).decode()

    def watch(self, console: Console) -> bool:
        """Draw until ``q`` is pressed or Ctrl-C. Return True if the server ended first."""
        foot = f"every {self._every_s:g} s · q quits"
        queue = self.sample()
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                due = time.monotonic() + self._every_s
                while (left := due - time.monotonic()) > 0:
                    screen.update(Group(*drawn(queue, console, foot)), refresh=True)
                    if wait(left) in ("q", "Q", "\x1b"):
                        return False
                try:
                    queue = self.sample()
                except ServerLost:
                    return True


def drawn(queue: QueueFigures, console: Console, foot: str = "") -> list[Text]:
    """Return a screen of the terminal's size; without a terminal, of any height."""
    height = console.size.height if console.is_terminal else 1000
    ascii_only = console.options.ascii_only
    return queue_screen(queue, width=console.size.width, height=height, foot=foot, ascii_only=ascii_only)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield ``wait(seconds)``: it returns a pressed key, or "" after the time."""
    files = [sys.stdin.fileno()] if sys.stdin is not None and sys.stdin.isatty() else []
    modes = [termios.tcgetattr(file) for file in files]
    for file in files:
        tty.setcbreak(file)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select(files, [], [], seconds)
        return os.read(ready[0], 1).decode("latin-1") if ready else ""

    try:
        yield wait
    finally:
        for file, mode in zip(files, modes, strict=True):
            termios.tcsetattr(file, termios.TCSADRAIN, mode)


def _plain(value: Any) -> Any:
    """Convert structs to objects (they travel as arrays), and infinite or nan numbers to null."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
