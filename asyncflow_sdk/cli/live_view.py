"""LiveView: a run on the terminal, or as lines in a pipe.

    with LiveView(total_steps=300, title="demo") as view:
        run(..., sinks=[view])          # view(event), from any thread

A terminal is redrawn once a second. A pipe or a CI log gets one line every ten steps, at most one
in ten seconds. Of a run without a last step, each step is a line in both. Warnings, errors and changes of workers are printed in both.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..types.events import Chosen, Event, Note, StepTrained, WorkerState
from .figures import Figures, RunFold, WorkerFigures
from .formats import by_name, duration, number, printable, sampled, sparkline
from .screen import PATIENCE_S, Clipped, bar, cut, ended_rows, first_width, fit, name, render, table, task_table

REFRESH_S = 1.0
LINE_STEPS = 10
LINE_S = 10.0
END_S = 5.0
"""A blocked terminal or pipe delays the end of a view for at most this long (seconds)."""
_SILENCE_S = 60.0
_TALL = 20
_STATE_STYLE = {"ready": "green", "failed": "bold red", "stopped": "dim"}
_URGENT = {"failed": 0, "restarting": 1, "starting": 2, "stopped": 4}
_STYLE = {"warning": "yellow", "error": "bold red", "failed": "bold red", "restarting": "yellow"}


class LiveView:
    """Show a run of ``total_steps`` steps, 0 if their number is unknown, from its events. It never raises an error
    into the run, and never waits for the terminal.

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
        self.title = title
        self._fold = RunFold(total_steps)
        self._console = console or Console()
        self._clock = clock
        self._lock = threading.Lock()
        self._messages: deque[tuple[str, str]] = deque(maxlen=1000)
        self._states: dict[str, str] = {}
        self._line_step, self._line_s = 0, -math.inf
        self._live: Live | None = None
        self._muted = self._ends = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._show_until_end, name="live view", daemon=True)
        self._handler = logging.NullHandler()  # warnings are shown here; without a handler, Python shows them, too

    def __call__(self, event: Event) -> None:
        """Add one event."""
        with self._lock:
            self._fold.add(event)
            if not self._ends:
                self._add_message(event)

    def __enter__(self) -> LiveView:
        logging.getLogger("asyncflow").addHandler(self._handler)
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
        try:
            if self._live is not None:
                self._live.start()
            self._thread.start()
        except BaseException:
            if self._live is not None:
                self._live.stop()  # Ctrl-C after the cursor was hidden
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        logging.getLogger("asyncflow").removeHandler(self._handler)
        with self._lock:
            self._add_progress(last=True)
            self._ends = True
        try:
            self._wake.set()
            self._thread.join(END_S)
        finally:
            # Shows the cursor again, also after a second Ctrl-C in the lines above.
            if self._live is not None:
                with contextlib.suppress(OSError):
                    self._live.stop()

    def lines(self) -> list[Text]:
        """Return the current screen, line by line."""
        with self._lock:
            run = self._fold.figures()
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        return run_screen(
            run, title=self.title, now_s=self._clock(), width=width, height=height - 1, ascii_only=ascii_only
        )

    def _show_until_end(self) -> None:
        ends = False
        while not ends:
            self._wake.wait(REFRESH_S if self._live is not None else None)
            self._wake.clear()
            ends = self._ends  # read before the messages: the last ones are shown
            self._show()

    def _show(self) -> None:
        try:
            while self._messages and not self._muted:
                self._print(*self._messages.popleft())
            if self._live is not None and not self._muted:
                self._live.update(Group(*self.lines()), refresh=True)
        except (OSError, ValueError):
            self._muted = True  # the terminal was closed, or the reader of the pipe left; the run goes on

    def _print(self, text: str, style: str) -> None:
        if self._live is not None:
            self._console.print(Text(text, style=style))
            return
        stream = self._console.file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.replace("–", "-").encode(encoding, "replace").decode(encoding) + "\n")
        stream.flush()

    def _add_message(self, event: Event) -> None:
        if isinstance(event, Note) and event.level != "info":
            worker = f" ({event.worker})" if event.worker else ""
            self._add_text(f"{event.level}{worker}: {event.text}", event.level)
        elif isinstance(event, Chosen) and self._live is None:
            self._add_text(f"{event.worker or 'driver'}: {event.what} {event.chosen}: {event.reason}")
        elif isinstance(event, WorkerState) and self._states.get(event.worker) != event.state:
            self._states[event.worker] = event.state
            if self._live is None or event.state in _STYLE:  # the screen shows the others
                detail = event.detail.strip() if event.state == "failed" else event.detail.strip().split("\n")[-1]
                self._add_text(f"worker {event.worker}: {event.state}{f': {detail}' if detail else ''}", event.state)
        elif isinstance(event, StepTrained) and not self._fold.figures().total_steps:
            self._add_text(f"step {event.step}: {', '.join(f'{k} {v:.4g}' for k, v in event.metrics.items())}")
        elif isinstance(event, StepTrained):
            self._add_progress()

    def _add_progress(self, last: bool = False) -> None:
        """Queue a line about the newest step if it is due; if ``last``, also if it is not due."""
        if self._live is not None:
            return
        run = self._fold.figures()
        steps, seconds = run.done - self._line_step, run.now_s - self._line_s
        last = last or seconds >= _SILENCE_S or 0 < run.total_steps <= run.done
        if not steps or not (last or (steps >= LINE_STEPS and seconds >= LINE_S)):
            return
        self._line_step, self._line_s = run.done, run.now_s
        flight = run.metric("staleness_in_flight_mean")
        parts = [
            f"step {run.done}{f'/{run.total_steps}' if run.total_steps else ''}",
            f"reward {number(run.metric('reward'), 3)} (mean of 20: {number(run.reward_mean, 3)})",
            f"staleness {number(run.metric('staleness_mean'))} (max {number(run.metric('staleness_max'), 0)}"
            + (f", {number(flight)} in flight)" if math.isfinite(flight) else ")"),
            f"lag {'-' if run.lag is None else run.lag}",
            f"{run.tokens_per_s:.0f} tokens/s",
            *([f"left {duration(run.seconds_left)}"] if run.done < run.total_steps else []),
        ]
        self._add_text("  ".join(parts))

    def _add_text(self, text: str, kind: str = "") -> None:
        lines = [printable(line) for line in text.splitlines()]
        if self._live is None:
            run = self._fold.figures()
            lines = [f"[{duration(run.now_s - run.start_s):>7}] " + "\n          ".join(lines)]
        self._messages.append(("\n".join(lines), _STYLE.get(kind, "")))
        if self._live is None:
            self._wake.set()


def run_screen(
    run: Figures, *, title: str, now_s: float, width: int, height: int, ascii_only: bool = False
) -> list[Text]:
    """Return at most ``height`` lines of fewer than ``width`` cells."""
    width = max(width, 20)
    count = f"  step {run.done:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")
    progress = bar(run.done, run.total_steps, max(width - 2 - len(count), 4)).append(count)
    header = [_title(run, title, now_s), progress, Text(), *_numbers(run, width - 2), Text()]
    foot = [Text(), Text(printable(run.note), "dim")] if run.note and height >= _TALL else []
    free = max(height - len(header) - len(foot), 4)

    def _draw(lines: int) -> list[RenderableType]:
        rows = [*task_table(run.rows, width - 2, max(free // 2, 3)), ended_rows(run.ended, 9)]
        if run.returned:
            returned = table("", "", first=9)
            returned.add_row(Text("returned", "dim"), f"{run.returned:,}")
            rows.append(returned)
        left = max(free - len(render(rows, width)) - 1, 2)
        return [*header, *rows, Text(), *_workers(run, now_s, width - 2, left, lines), *foot]

    return fit(_draw, width, height, most=2, ascii_only=ascii_only)


def _title(run: Figures, title: str, now_s: float) -> RenderableType:
    clock = f"{duration(now_s - run.start_s)} elapsed"
    if math.isfinite(run.seconds_left) and run.done < run.total_steps:
        clock += f" · about {duration(run.seconds_left)} left"
    line = Table.grid(expand=True)
    line.add_column(style="bold", no_wrap=True, ratio=1)
    line.add_column(style="dim", no_wrap=True)
    line.add_row(Text(printable(title)), clock)
    return line


def _numbers(run: Figures, width: int) -> list[Text]:
    parts, flight = "versions, in the last step", run.metric("staleness_in_flight_mean")
    if math.isfinite(flight):
        parts = f"{number(flight)} in flight + {number(run.metric('staleness_in_queue_mean'))} in the queue"
    version = "–" if run.published is None else f"v{run.published}"
    lag = "–" if run.lag is None else str(run.lag)
    stale = number(run.metric("staleness_mean")), "at most", number(run.metric("staleness_max"), 0), parts
    lines = [
        ("reward", number(run.metric("reward"), 3), "mean of 20", number(run.reward_mean, 3), ""),
        ("staleness", *stale),
        ("published", version, "lag", lag, "versions, of the slowest replica"),
    ]
    if run.evaluated is not None:
        best = (number(run.best.score, 3), f"of version {run.best.version}") if run.best is not None else ("", "")
        lines.append(("evaluation", number(run.evaluated.score, 3), "best", *best))
    made = [
        Text.assemble((f"{what:<11}", "dim"), (f"{value:<9}", "bold"), f"{second:<12}{more:<9}", (remark, "dim"))
        for what, value, second, more, remark in lines
    ]
    points = sampled(run.rewards, min(width - 52, 60))
    if len(points) > 1:
        low, high = min(points), max(points)
        made[0].append(sparkline(points, low, high), "cyan").append(f" {low:.2f}–{high:.2f}", "dim")
    truncated = run.metric("truncated_fraction")
    more = f", {truncated:.0%} of the responses truncated" if math.isfinite(truncated) else ""
    speed = Text.assemble((f"{'generated':<11}", "dim"), (f"{run.tokens_per_s:,.0f} ", "bold"), f"tokens/s{more}")
    return [*made, speed]


def _workers(run: Figures, now_s: float, width: int, most: int, lines: int) -> list[RenderableType]:
    """Every worker; failed and starting ones first, so that they are not cut off."""
    workers = {each: WorkerFigures() for each in run.waiting} | dict(run.workers)
    names = sorted(workers, key=lambda each: (_URGENT.get(workers[each].state, 3), by_name(each)))
    shown, rest = cut(names, most - 1, "worker")
    first = first_width(shown, 11, max(width // 3, 13))
    made = table("WORKERS", f"{'state':<10}", "weights", "doing", first=first)
    for each in shown:
        worker = workers[each]
        style = _STATE_STYLE.get(worker.state, "yellow" if worker.state else "dim")
        text, tone = _doing(worker, run.waiting.get(each, ""), now_s, width - first - 21)
        made.add_row(
            name(each, style, "○" if worker.state in ("stopped", "") else "●"),
            Text(worker.state or "–", style),
            "" if worker.version is None else f"v{worker.version}",
            Clipped(text, tone, lines),
        )
    return [made, *rest]


def shares(worker: WorkerFigures) -> str:
    """Return the three most frequent kinds of work of a worker's recent time."""
    whole = math.fsum(worker.seconds.values())
    kinds = sorted(worker.seconds.items(), key=lambda item: -item[1])[:3]
    return " · ".join(f"{kind} {100 * seconds / whole:.0f}%" for kind, seconds in kinds if seconds > 0.005 * whole)


def _doing(worker: WorkerFigures, waiting: str, now_s: float, width: int) -> tuple[str, str]:
    """Return how the worker spends its time, or the cause of its state, with a style."""
    if worker.state not in ("ready", ""):
        why = worker.detail.strip().splitlines()[-1:]
        since = f"for {duration(now_s - worker.since_s)}"
        return f"{since}: {why[0]}" if why else since, "dim" if worker.state == "stopped" else ""
    spent = shares(worker)
    if waiting and (not spent or _waited_s(waiting) >= PATIENCE_S):
        return _why(waiting, width), "yellow"
    return " · ".join(part for part in (spent, worker.part) if part) or "–", ""


def _waited_s(waiting: str) -> float:
    """Parse the ledger's "after 1.5 s: "; other text counts as a long wait."""
    found = re.match(r"after ([\d.]+) s: ", waiting)
    return float(found[1]) if found else math.inf


def _why(text: str, width: int) -> str:
    """The reason of a wait; where it does not fit, drop the task's name."""
    text = text if text.startswith("wait") else f"waiting {text.removeprefix('after ')}"
    since, colon, rest = text.partition(": ")
    if colon and cell_len(text) > width and "; " in rest:
        text = f"{since}: {rest.partition('; ')[2]}"
    return text
