"""``asyncflow serve``: a run that others feed, work for and train on; it says how they come in."""

from __future__ import annotations

import contextlib
import math
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ledger import StatusReport
from ..types.events import Chosen, Event, Note, Status, StepTrained, WorkerState
from ..wire import is_loopback
from ..workflow import Run, serve
from .lines import printable
from .live import LiveView

LEAVE_S = 60.0
"""For so long clients may take to leave once the stream has ended (seconds)."""
SHOWN_S = 5.0
MOST_UNSHOWN = 10_000
"""So many events may wait to be shown; the rest of them is not."""


class Watch:
    """Hears what the server says, in its thread, and wakes whoever waits: it looks at the queue now and then by itself. ``show`` is
    called in a thread of its own: a terminal that is held, or a pipe that nobody reads, must not hold the server."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self._show = show
        self._looked = threading.Event()
        self._heard: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._showing, name="asyncflow-shown", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Status):
            self._looked.set()
        if self._heard.qsize() < MOST_UNSHOWN:
            self._heard.put(event)

    def close(self) -> None:
        """Show what was heard, and nothing more. What cannot be shown in seconds is left out."""
        self._heard.put(None)
        self._thread.join(SHOWN_S)

    def _showing(self) -> None:
        while (event := self._heard.get()) is not None:
            self._show(event)

    def wait_for(self, run: Run, there: Callable[[StatusReport], bool], timeout_s: float = math.inf) -> None:
        """Until the queue's status is so, or the time is up."""
        until = time.monotonic() + timeout_s
        while not there(run.queue.status()) and time.monotonic() < until:
            self._looked.wait()
            self._looked.clear()


def serve_run(
    directory: Path,
    address: str,
    console: Console,
    feed: dict[str, Any] | None,
    *,
    insecure: bool = False,
    **limits: Any,
) -> None:
    """Serve until the stream has ended and every row with it, or Ctrl-C. ``feed``: what ``Run.feed`` takes; None for
    others to do. Raises what ``serve`` and ``load_prompts`` raise."""
    steps = limits.get("steps")
    show = LiveView(steps, f"asyncflow serve {directory}", console) if steps else Lines(console)
    watch = Watch(show)
    with stopped_by_signals(), serve(directory, address=address, insecure=insecure, on_event=watch, **limits) as run:
        if feed is not None:
            run.feed(**feed)
        served = next((each for each in run.addresses if each.startswith("tcp:")), run.address)
        console.print(invitation(directory, served, insecure), markup=False, soft_wrap=True, highlight=False)
        with show, contextlib.closing(watch):
            watch.wait_for(run, lambda status: status.over and not status.live)
            watch.wait_for(run, lambda status: status.session_count <= 1, LEAVE_S)
        console.print(f"the stream has ended: {run.audit()}", markup=False, soft_wrap=True, highlight=False)


def invitation(directory: Path, address: str, insecure: bool) -> str:
    """How others come in: commands to be run on their hosts."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    keyed = address.startswith("tcp:") and not insecure and not is_loopback(address)
    option = " --key run.key" if keyed else " --insecure" if insecure else ""
    if host in ("0.0.0.0", "[::]", "*"):
        host = socket.gethostname()
    where = f"tcp://{host}:{port}" if address.startswith("tcp:") else address
    come = f"asyncflow worker {where}{option}"
    key = f"copy {directory / 'run.key'} to every host, readable by its user alone; then, there:\n" if keyed else ""
    return (
        f"{directory} is served at {address}\n{key}"
        f"  {come} rollout --engine transformers --model PATH\n"
        f"  {come} stage MODULE:FUNCTION --task reward --needs response --gives reward\n"
        f"  {come} train --engine torch --model PATH --batch-size 256\n"
        f"  asyncflow top {where}{option}"
    )


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM is as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Lines:
    """What happens, a line each; for runs that have no last step to draw."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerState):
            self._say(f"worker {event.worker}: {event.state} {event.detail}".rstrip())
        elif isinstance(event, Chosen):
            self._say(f"{event.worker or 'driver'}: {event.what} {event.chosen}: {event.reason}")
        elif isinstance(event, Note) and event.level != "info":
            self._say(
                f"{event.level} ({event.worker}): {event.text}" if event.worker else f"{event.level}: {event.text}"
            )
        elif isinstance(event, StepTrained):
            self._say(
                f"step {event.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            )

    def _say(self, text: str) -> None:
        lines = "\n".join(printable(line) for line in text.splitlines())
        with contextlib.suppress(OSError, ValueError):  # the terminal went away; the run goes on
            self._console.print(lines, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None: ...
