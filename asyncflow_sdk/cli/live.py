"""LiveView: a run on the terminal; plain lines where there is none.

    with LiveView(total_steps=300, title="demo") as view:
        run(..., sinks=[view])          # view(event), from any thread

On a terminal the picture is drawn once a second. In a pipe or in CI it is one line every ten steps, and
not more than one in ten seconds. Warnings, errors and what happens to workers is said at once in both.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..types.events import Event, Note, StepTrained, WorkerState
from .board import Board
from .frame import frame
from .lines import duration, number, printable

REFRESH_S = 1.0
LINE_STEPS = 10
LINE_S = 10.0
_SILENCE_S = 60.0
_STYLE = {"warning": "yellow", "error": "bold red", "failed": "bold red", "restarting": "yellow"}


class LiveView:
    """Draws a run from its events. Listening only: it never raises into the run it watches.

    Calling it is thread-safe and cheap; the drawing is done by a thread of its own. ``clock``: the clock
    of the events, seconds.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = Board(total_steps)
        self.title = title
        self._console = console or Console()
        self._clock = clock
        self._lock = threading.Lock()
        self._messages: deque[tuple[str, str]] = deque(maxlen=1000)
        self._states: dict[str, str] = {}
        self._lined_step = 0
        self._lined_s = float("-inf")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._live: Live | None = None
        self._muted = False

    def __call__(self, event: Event) -> None:
        """Take one event in."""
        with self._lock:
            self.board.add(event)
            message = self._message(event)
            if self._live is not None:
                # Printing here would take rich's lock inside ours; the drawing thread takes them the
                # other way round.
                if message:
                    self._messages.append(message)
                return
            if message:
                self._line(message[0])
            if isinstance(event, StepTrained) and self._line_is_due():
                self._progress_line()

    def __enter__(self) -> LiveView:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            try:
                self._live.start()
                self._thread = threading.Thread(target=self._draw_until_stopped, name="live view", daemon=True)
                self._thread.start()
            except BaseException:
                self._live.stop()  # Ctrl-C between hiding the cursor and returning
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is None:
            with self._lock:
                if self.board.done > self._lined_step:
                    self._progress_line()
            return
        try:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()
            self._draw()
        finally:
            # Also after a second Ctrl-C in the lines above: this is what gives the cursor back.
            with contextlib.suppress(OSError):
                self._live.stop()

    def lines(self) -> list[Text]:
        """The picture as it would be drawn now."""
        size = self._console.size
        ascii_only = self._console.options.ascii_only
        with self._lock:
            return frame(
                self.board,
                title=self.title,
                now_s=self._clock(),
                width=size.width,
                height=size.height - 1,
                ascii_only=ascii_only,
            )

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
            self._muted = True  # the terminal went away; the run goes on

    def _message(self, event: Event) -> tuple[str, str] | None:
        """What has to be said at once, and its style."""
        if isinstance(event, Note) and event.level != "info":
            who = f" ({event.worker})" if event.worker else ""
            return f"{event.level}{who}: {event.text}", _STYLE.get(event.level, "")
        if isinstance(event, WorkerState) and self._states.get(event.worker) != event.state:
            self._states[event.worker] = event.state
            if self._live is not None and event.state not in _STYLE:
                return None  # the table shows it
            detail = event.detail.strip() if event.state == "failed" else event.detail.strip().split("\n")[-1]
            return f"worker {event.worker}: {event.state}{f': {detail}' if detail else ''}", _STYLE.get(
                event.state, ""
            )
        return None

    def _line_is_due(self) -> bool:
        steps = self.board.done - self._lined_step
        seconds = self.board.now_s - self._lined_s
        last = self.board.done >= self.board.total_steps
        return (steps >= LINE_STEPS and seconds >= LINE_S) or (steps > 0 and (seconds >= _SILENCE_S or last))

    def _progress_line(self) -> None:
        board = self.board
        self._lined_step, self._lined_s = board.done, board.now_s
        lag = "-" if board.lag is None else str(board.lag)
        flying = f", {number(board.in_flight)} in flight" if math.isfinite(board.in_flight) else ""
        left = f"  left {duration(board.seconds_left)}" if board.done < board.total_steps else ""
        self._line(
            f"step {board.done}/{board.total_steps}  reward {number(board.reward, 3)}"
            f" (mean of 20: {number(board.reward_mean, 3)})  staleness {number(board.staleness_mean)}"
            f" (max {number(board.staleness_max, 0)}{flying})  lag {lag}  {board.tokens_per_s:.0f} tokens/s{left}"
        )

    def _line(self, text: str) -> None:
        since = duration(self.board.now_s - self.board.start_s)
        lines = [printable(line) for line in text.splitlines()]
        line = f"[{since:>7}] " + "\n          ".join(lines)
        stream = self._console.file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            if not self._muted:
                stream.write(line.replace("–", "-").encode(encoding, "replace").decode(encoding) + "\n")
                stream.flush()
        except (OSError, ValueError):
            self._muted = True  # the reader of the pipe left; the run goes on
