"""Top: a running queue on the terminal, live. ``q`` ends it. It looks once a second and changes nothing.

asyncflow top runs/x            # or an address; --once prints one picture, --json one object
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live

from ..errors import ServerLost
from ..ledger import StatusReport
from ..wire import probe
from ..workflow import Run, connect
from .flow import Flow
from .queue_frame import queue_frame

NAME = "top"


class Top:
    """Watches the queue at ``where``, an address or the directory of a run, every ``every_s`` seconds.
    ``key``, ``insecure``: as of ``connect``."""

    def __init__(self, where: str, every_s: float = 1.0, key: Path | None = None, insecure: bool = False) -> None:
        if "://" in where:
            probe(where)  # connecting would wait for a server
        self._run: Run = connect(where, key=key, insecure=insecure, name=NAME)
        self.address = self._run.address
        self.title = where if where == self.address else f"{Path(where)} · {self.address}"
        self.every_s = every_s
        self.flow = Flow(max(5.0, 2 * every_s))

    def __enter__(self) -> Top:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ServerLost):
            probe(self.address)
            self._run.close()

    def look(self) -> StatusReport:
        """Take a sample. Raises ServerLost when the server has ended."""
        probe(self.address)  # a request to a server that is gone would wait for its deadline
        report = _without(self._run.queue.status(), self._run.session)
        self.flow.add(report)
        return report

    def once(self) -> StatusReport:
        """Two samples, so that there are rates."""
        self.look()
        time.sleep(self.every_s)
        return self.look()

    def draw(self, report: StatusReport, console: Console, foot: str = "") -> Group:
        """The picture as large as the terminal; without one, as tall as it likes."""
        height = console.size.height if console.is_terminal else 1000
        return Group(
            *queue_frame(
                report, self.flow, title=self.title, width=console.size.width, height=height, foot=foot,
                ascii_only=console.options.ascii_only,
            )
        )  # fmt: skip

    def json(self, report: StatusReport) -> str:
        """The report and the rates by name, for programs. A rate that is not known is null."""
        flow = self.flow
        rates = {
            "put": flow.put, "ended": flow.ended, "written_bytes": flow.written,
            "came": flow.came, "passed": flow.passed,
        }  # fmt: skip
        whole = {"address": self.address, **_plain(report), "per_second": _plain(rates)}
        return msgspec.json.encode(whole).decode()

    def live(self, console: Console) -> bool:
        """Draw until ``q`` is pressed or Ctrl-C; True when the server has ended instead."""
        foot = f"every {self.every_s:g} s · q quits"
        report = self.look()
        with _keys() as wait, Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                due = time.monotonic() + self.every_s
                while (left := due - time.monotonic()) > 0:
                    screen.update(self.draw(report, console, foot), refresh=True)  # also when its size changed
                    if wait(left) in ("q", "Q", "\x1b"):
                        return False
                try:
                    report = self.look()
                except ServerLost:
                    return True


def _without(report: StatusReport, session: int) -> StatusReport:
    """The report as if nobody looked."""
    sessions = tuple(s for s in report.sessions if s.id != session)
    return msgspec.structs.replace(report, sessions=sessions, session_count=report.session_count - 1)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Keys as they are pressed, where stdin is a terminal: ``wait(seconds)`` gives one, or "" when the time is up
    or the terminal has another size."""
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
    """Structs as objects, not as the arrays they travel as; what is no number as null."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
