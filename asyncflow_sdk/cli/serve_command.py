"""``asyncflow serve``: serve a run for workers started by hand, and print their commands."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..ledger import StatusReport
from ..types.config import LOCAL
from ..types.defaults import LEAVE_S
from ..types.events import Begun, Event, Status
from ..wire import is_loopback
from ..workflow import Run, serve
from ..workflow.loops.record_files import EVENTS
from ..workflow.loops.recorder import Recorder
from ..workflow.run_directory import RunDirectory, advertised
from .live_view import LiveView
from .options import say
from .signals import stop_as_interrupt


def serve_run(directory: Path, console: Console, feed: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Serve until the stream and all its rows have ended, or Ctrl-C. ``feed``: arguments of
    ``Run.feed``; None if another program puts the rows. ``options``: arguments of ``serve``. Raises the errors of
    ``serve`` and ``load_prompts``."""
    view, changed = LiveView(options["steps"] or 0, f"asyncflow serve {directory}", console), threading.Event()

    def _on_event(event: Event) -> None:
        view(event)
        if isinstance(event, Status):
            changed.set()

    def _wait(run: Run, done: Callable[[StatusReport], bool], timeout_s: float = math.inf) -> None:
        until = time.monotonic() + timeout_s
        while not done(run.queue.status()) and time.monotonic() < until:
            changed.wait()
            changed.clear()

    with stop_as_interrupt(), _recorded(directory, console, {**options, "on_event": _on_event}) as run:
        if feed is not None:
            run.feed(**feed)
        served = next((each for each in run.addresses if each.startswith("tcp:")), run.address)
        say(console, invitation(directory, served, options["insecure"]))
        with view:
            _wait(run, lambda status: status.over and not status.live)
            _wait(run, lambda status: status.session_count <= 1, LEAVE_S)
        say(console, f"the stream has ended: {run.audit()}")


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
                say(console, f"warning: {error}")


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
