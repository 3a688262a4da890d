"""ProgressLine: the progress of a run in one line, for scripts and notebooks."""

from __future__ import annotations

import contextlib
import logging
import math
import sys

from ...types import Event
from ...types import events as ev

LINE_S = 10.0
"""Time between two lines in the log (seconds)."""
_log = logging.getLogger("asyncflow")


class ProgressLine:
    """Shows the progress of a run of ``steps``: on a terminal in a line of stderr, rewritten after each
    step; elsewhere in the log, at INFO. Not thread-safe."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._line = ""  # on the terminal
        self._began_s = self._logged_s = -math.inf

    def __call__(self, event: Event) -> None:
        """Add one event."""
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
