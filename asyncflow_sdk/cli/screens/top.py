"""``asyncflow top``: a running queue on the terminal. It reads the queue's status once a second and
changes nothing.

asyncflow top runs/x            # or an address; --once prints one screen, --json one object; q quits
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live

from ...errors import ServerLost
from ...ledger import StatusReport
from ...types.defaults import CALL_S
from ...types.events import Evaluated
from ...wire import probe
from ...workflow import Run, connect
from ...workflow.evaluator import read_evaluations
from ...workflow.events.event_file import EVENTS, lasting_notes
from .queue_rates import QueueRates
from .queue_screen import queue_screen

NAME = "top"


class QueueMonitor:
    """Read the status of the queue at ``where``, an address or the directory of a run, every
    ``every_s`` seconds. ``key``, ``insecure``, ``timeout_s``: as for ``connect``."""

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
        self._run: Run = connect(where, key=key, insecure=insecure, name=NAME, timeout_s=timeout_s)
        self.address = self._run.address
        self.title = where if where == self.address else f"{Path(where)} · {self.address}"
        self._directory = None if "://" in where else Path(where)
        self._warnings, self._read = list[str](), 0  # read so many bytes of the recorded events
        self.every_s = every_s
        self.rates = QueueRates(max(5.0, 2 * every_s))

    def __enter__(self) -> QueueMonitor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect, unless the server has ended."""
        with contextlib.suppress(ServerLost):
            probe(self.address)
            self._run.close()

    def sample(self) -> StatusReport:
        """Read the status once. Raises ServerLost after the server has ended."""
        probe(self.address)  # a request to a lost server would wait for its deadline
        report = _without(self._run.queue.status(), self._run.session)
        self.rates.add(report)
        if self._directory is not None:
            more, self._read = lasting_notes(self._directory / EVENTS, self._read)
            self._warnings += more
        return report

    def sample_twice(self) -> StatusReport:
        """Read the status twice, to have rates, and return the second report."""
        self.sample()
        time.sleep(self.every_s)
        return self.sample()

    def draw(self, report: StatusReport, console: Console, foot: str = "") -> Group:
        """Return a screen of the terminal's size; without a terminal, of any height."""
        height = console.size.height if console.is_terminal else 1000
        return Group(
            *queue_screen(
                report, self.rates, title=self.title, width=console.size.width, height=height, foot=foot,
                evaluations=self._evaluations, warnings=self._warnings, ascii_only=console.options.ascii_only,
            )
        )  # fmt: skip

    @property
    def _evaluations(self) -> list[Evaluated]:
        """The evaluations so far; none for an address, without the run's files."""
        return [] if self._directory is None else read_evaluations(self._directory)

    def json(self, report: StatusReport) -> str:
        """Return ``plain`` as a JSON object. An unknown rate is null."""
        return msgspec.json.encode(self.plain(report)).decode()

    def plain(self, report: StatusReport) -> dict[str, Any]:
        """Return the report, the rates and the scores in JSON types."""
        names = ("put", "ended", "written_bytes", "arrived", "completed")
        rates = {name: getattr(self.rates, name) for name in names}
        scores = {str(each.version): each.score for each in self._evaluations}
        return {
            "address": self.address,
            **_plain(report),
            "per_second": _plain(rates),
            "evaluations": scores,
            "warnings": self._warnings,
        }

    def watch(self, console: Console) -> bool:
        """Draw until ``q`` is pressed or Ctrl-C. Return True if the server ended first."""
        foot = f"every {self.every_s:g} s · q quits"
        report = self.sample()
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                due = time.monotonic() + self.every_s
                while (left := due - time.monotonic()) > 0:
                    screen.update(self.draw(report, console, foot), refresh=True)  # also after a change of its size
                    if wait(left) in ("q", "Q", "\x1b"):
                        return False
                try:
                    report = self.sample()
                except ServerLost:
                    return True


def _without(report: StatusReport, session: int) -> StatusReport:
    """Remove this command's own session from a report."""
    sessions = tuple(s for s in report.sessions if s.id != session)
    return msgspec.structs.replace(report, sessions=sessions, session_count=report.session_count - 1)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield ``wait(seconds)``: it returns a pressed key, or "" after the time or a change of the
    terminal's size."""
    stdin = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    resized, resize = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.signal(signal.SIGWINCH, lambda *_: os.write(resize, b"\0"))
    modes = None
    if stdin is not None:
        import termios
        import tty

        modes = termios.tcgetattr(stdin)
        tty.setcbreak(stdin)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([resized] if stdin is None else [resized, stdin], [], [], seconds)
        if resized in ready:
            os.read(resized, 4096)
        return os.read(stdin, 1).decode("latin-1") if stdin is not None and stdin in ready else ""

    try:
        yield wait
    finally:
        if stdin is not None and modes is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, modes)
        signal.signal(signal.SIGWINCH, before)
        os.close(resized)
        os.close(resize)


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
