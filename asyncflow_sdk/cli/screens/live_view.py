"""LiveView: a run on the terminal, or as lines in a pipe.

    with LiveView(total_steps=300, title="demo") as view:
        run(..., sinks=[view])          # view(event), from any thread

A terminal is redrawn once a second. A pipe or a CI log gets one line every ten steps, at most one
in ten seconds. Warnings, errors and changes of workers are printed at once in both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...types.events import Event, Note, StepTrained, WorkerState
from ..formats import duration, number, printable
from .run_progress import RunProgress
from .run_screen import run_screen

REFRESH_S = 1.0
LINE_STEPS = 10
LINE_S = 10.0
_SILENCE_S = 60.0
_STYLE = {"warning": "yellow", "error": "bold red", "failed": "bold red", "restarting": "yellow"}


class LiveView:
    """Show a run from its events. It never raises an error into the run.

    Calling it is thread-safe and cheap: a separate thread draws. ``clock``: the clock of the
    events, seconds.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = RunProgress(total_steps)
        self.title = title
        self._console = console or Console()
        self._clock = clock
        self._lock = threading.Lock()
        self._messages: deque[tuple[str, str]] = deque(maxlen=1000)
        self._states: dict[str, str] = {}
        self._line_step, self._line_s = 0, -math.inf
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._muted = False
        self._handler = logging.NullHandler()  # warnings are shown here; without a handler, Python shows them, too

    def __call__(self, event: Event) -> None:
        """Add one event."""
        with self._lock:
            self.progress.add(event)
            message = self._message(event)
            if self._live is not None:
                # The drawing thread prints: it takes rich's lock before ours, and printing here would do the reverse.
                if message:
                    self._messages.append(message)
                return
            if message:
                self._line(message[0])
            if isinstance(event, StepTrained) and self._line_is_due():
                self._progress_line()

    def __enter__(self) -> LiveView:
        logging.getLogger("asyncflow").addHandler(self._handler)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            try:
                self._live.start()
                self._thread = threading.Thread(target=self._draw_until_stopped, name="live view", daemon=True)
                self._thread.start()
            except BaseException:
                self._live.stop()  # Ctrl-C after the cursor was hidden
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        logging.getLogger("asyncflow").removeHandler(self._handler)
        if self._live is None:
            with self._lock:
                if self.progress.done > self._line_step:
                    self._progress_line()
            return
        try:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._draw()
        finally:
            # Shows the cursor again, also after a second Ctrl-C in the lines above.
            with contextlib.suppress(OSError):
                self._live.stop()

    def lines(self) -> list[Text]:
        """Return the current screen, line by line."""
        size, ascii_only = self._console.size, self._console.options.ascii_only
        with self._lock:
            return run_screen(
                self.progress, title=self.title, now_s=self._clock(), width=size.width, height=size.height - 1,
                ascii_only=ascii_only,
            )  # fmt: skip

    def _draw_until_stopped(self) -> None:
        while not self._stop.wait(REFRESH_S):
            self._draw()

    def _draw(self) -> None:
        if self._live is None or self._muted:
            return
        try:
            while self._messages:
                text, style = self._messages.popleft()
                lines = [printable(line) for line in text.splitlines()]
                self._console.print(Text("\n".join(lines), style=style))
            self._live.update(Group(*self.lines()), refresh=True)
        except (OSError, ValueError):
            self._muted = True  # the terminal was closed; the run goes on

    def _message(self, event: Event) -> tuple[str, str] | None:
        """Return the text and style of an event to print at once, or None."""
        if isinstance(event, Note) and event.level != "info":
            worker = f" ({event.worker})" if event.worker else ""
            return f"{event.level}{worker}: {event.text}", _STYLE.get(event.level, "")
        if isinstance(event, WorkerState) and self._states.get(event.worker) != event.state:
            self._states[event.worker] = event.state
            if self._live is not None and event.state not in _STYLE:
                return None  # the screen shows it
            detail = event.detail.strip() if event.state == "failed" else event.detail.strip().split("\n")[-1]
            text = f"worker {event.worker}: {event.state}{f': {detail}' if detail else ''}"
            return text, _STYLE.get(event.state, "")
        return None

    def _line_is_due(self) -> bool:
        steps = self.progress.done - self._line_step
        seconds = self.progress.now_s - self._line_s
        last = self.progress.done >= self.progress.total_steps
        return (steps >= LINE_STEPS and seconds >= LINE_S) or (steps > 0 and (seconds >= _SILENCE_S or last))

    def _progress_line(self) -> None:
        run = self.progress
        self._line_step, self._line_s = run.done, run.now_s
        lag = "-" if run.lag is None else str(run.lag)
        in_flight = f", {number(run.in_flight)} in flight" if math.isfinite(run.in_flight) else ""
        left = f"  left {duration(run.seconds_left)}" if run.done < run.total_steps else ""
        self._line(
            f"step {run.done}/{run.total_steps}  reward {number(run.reward, 3)}"
            f" (mean of 20: {number(run.reward_mean, 3)})  staleness {number(run.staleness_mean)}"
            f" (max {number(run.staleness_max, 0)}{in_flight})  lag {lag}  {run.tokens_per_s:.0f} tokens/s{left}"
        )

    def _line(self, text: str) -> None:
        since = duration(self.progress.now_s - self.progress.start_s)
        lines = [printable(line) for line in text.splitlines()]
        line = f"[{since:>7}] " + "\n          ".join(lines)
        stream = self._console.file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            if not self._muted:
                stream.write(line.replace("–", "-").encode(encoding, "replace").decode(encoding) + "\n")
                stream.flush()
        except (OSError, ValueError):
            self._muted = True  # the reader closed the pipe; the run goes on
