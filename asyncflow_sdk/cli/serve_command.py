"""``asyncflow serve``: serve a run for workers started by hand, and print their commands."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ledger import StatusReport
from ..types.config import LOCAL
from ..types.defaults import LEAVE_S
from ..types.events import Begun, Chosen, Event, Note, Status, StepTrained, WorkerState
from ..wire import is_loopback
from ..workflow import Run, serve
from ..workflow.address import advertised
from ..workflow.events.event_file import EVENTS
from ..workflow.events.recorder import Recorder
from ..workflow.run_directory import RunDirectory
from .formats import printable
from .screens.live_view import LiveView
from .signals import stop_as_interrupt

SHOW_S = 5.0
MOST_QUEUED = 10_000
"""Events waiting to be shown; further ones are dropped."""


class EventRelay:
    """Pass the server's events to ``show`` in a separate thread, and wake ``wait_for``. A blocked
    terminal or pipe must not block the server."""

    def __init__(self, show: Callable[[Event], None]) -> None:
        self._show = show
        self._status = threading.Event()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="asyncflow-shown", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Status):
            self._status.set()
        if self._events.qsize() < MOST_QUEUED:
            self._events.put(event)

    def close(self) -> None:
        """Show the queued events for at most 5 s, then stop."""
        self._events.put(None)
        self._thread.join(SHOW_S)

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            self._show(event)

    def wait_for(self, run: Run, done: Callable[[StatusReport], bool], timeout_s: float = math.inf) -> None:
        """Wait until ``done`` is true for the queue's status, or the timeout."""
        until = time.monotonic() + timeout_s
        while not done(run.queue.status()) and time.monotonic() < until:
            self._status.wait()
            self._status.clear()


def serve_run(
    directory: Path,
    address: str,
    console: Console,
    feed: dict[str, Any] | None,
    *,
    insecure: bool = False,
    **limits: Any,
) -> None:
    """Serve until the stream and all its rows have ended, or Ctrl-C. ``feed``: arguments of
    ``Run.feed``; None if another program puts the rows. Raises the errors of ``serve`` and
    ``load_prompts``."""
    steps = limits.get("steps")
    show = LiveView(steps, f"asyncflow serve {directory}", console) if steps else EventPrinter(console)
    relay = EventRelay(show)
    options = {"address": address, "insecure": insecure, "on_event": relay, **limits}
    with stop_as_interrupt(), _recorded(directory, console, options) as run:
        if feed is not None:
            run.feed(**feed)
        served = next((each for each in run.addresses if each.startswith("tcp:")), run.address)
        console.print(invitation(directory, served, insecure), markup=False, soft_wrap=True, highlight=False)
        with show, contextlib.closing(relay):
            relay.wait_for(run, lambda status: status.over and not status.live)
            relay.wait_for(run, lambda status: status.session_count <= 1, LEAVE_S)
        console.print(f"the stream has ended: {run.audit()}", markup=False, soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _recorded(directory: Path, console: Console, options: dict[str, Any]) -> Iterator[Run]:
    """Serve a run with ``options``, and record it in its directory, as a workflow does; rows of steps
    only from the store "local". Raises the errors of ``serve``, and leaves no record then."""
    place = RunDirectory(directory)
    place.check_record(continues=True)
    with place.lock():
        again = (directory / EVENTS).exists()
        recorder = Recorder(directory, again=again)
        recorder.records_steps = options["store"].kind == LOCAL
        recorder.event(Begun(time_s=time.monotonic(), again=again))
        served = False
        try:
            with serve(directory, sinks=[recorder], **options) as run:
                served = True
                yield run
        finally:
            recorder.close()
            if not (served or again):
                (directory / EVENTS).unlink(missing_ok=True)
            for error in recorder.errors:
                console.print(f"warning: {error}", markup=False, soft_wrap=True, highlight=False)


def invitation(directory: Path, address: str, insecure: bool) -> str:
    """Return the commands that start workers on other hosts."""
    keyed = address.startswith("tcp:") and not insecure and not is_loopback(address)
    option = " --key run.key" if keyed else " --insecure" if insecure else ""
    where = advertised(address) if address.startswith("tcp:") else address
    join = f"asyncflow worker {where}{option}"
    key = f"copy {directory / 'run.key'} to every host, readable only by its user; then run there:\n" if keyed else ""
    return (
        f"{directory} is served at {address}\n{key}"
        f"  {join} rollout --engine transformers --model PATH\n"
        f"  {join} stage MODULE:FUNCTION --task reward --needs response --gives reward\n"
        f"  {join} train --engine torch --model PATH --batch-size 256\n"
        f"  asyncflow top {where}{option}"
    )


class EventPrinter:
    """Print each event as a line; for runs without a known last step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerState):
            self._print(f"worker {event.worker}: {event.state} {event.detail}".rstrip())
        elif isinstance(event, Chosen):
            self._print(f"{event.worker or 'driver'}: {event.what} {event.chosen}: {event.reason}")
        elif isinstance(event, Note) and event.level != "info":
            self._print(
                f"{event.level} ({event.worker}): {event.text}" if event.worker else f"{event.level}: {event.text}"
            )
        elif isinstance(event, StepTrained):
            self._print(
                f"step {event.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
            )

    def _print(self, text: str) -> None:
        lines = "\n".join(printable(line) for line in text.splitlines())
        with contextlib.suppress(OSError, ValueError):  # the terminal was closed; the run goes on
            self._console.print(lines, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> EventPrinter:
        return self

    def __exit__(self, *exc: object) -> None: ...
