"""Commands about a whole run: ``asyncflow run`` and ``resume`` run a workflow live, then print its summary and write its
report page; ``serve`` serves a run for workers started by hand; ``export`` writes a model folder of a run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..algorithms import make_algorithm
from ..errors import ConfigError, Interrupted, PluginError
from ..interfaces import TrainEngine
from ..ledger import StatusReport
from ..types.config import LOCAL
from ..types.defaults import LEAVE_S
from ..types.events import Begun, Event, Status
from ..wire import is_loopback
from ..workflow import Run, Workflow, load_workflow, serve
from ..workflow.checkpoint import Damaged, check
from ..workflow.loops.engines import make_engine
from ..workflow.loops.record_files import EVENTS
from ..workflow.loops.recorder import Recorder
from ..workflow.model_folder import steps_in, whole_folder
from ..workflow.plan.problems import for_role
from ..workflow.run_directory import RunDirectory, advertised
from .live_view import LiveView
from .options import say
from .report.page import write_report
from .report.summary import summary_table
from .signals import stop_as_interrupt


def run_file(file: Path, out: Path | None, changes: dict[str, str], shown: str, console: Console) -> None:
    """Run the workflow of ``file`` into ``out``. ``changes``: {"train.learning_rate": "1e-5"}. ``shown``: "text" or
    "mermaid" prints it and starts nothing. Raises the errors of ``load_workflow`` and
    ``Workflow.run``."""
    workflow = load_workflow(file, changes)
    say(console, workflow.mermaid() if shown == "mermaid" else str(workflow))
    if shown:
        return
    out, options = out or Path("runs") / time.strftime(f"{file.stem}-%Y%m%d-%H%M%S"), workflow.plan.options
    if options.address is not None:
        where, task = advertised(options.address, options.advertise), workflow.plan.rollout.task
        join = f"asyncflow worker {where} --key run.key --from {file.name} {task}"
        key = f"a copy of {out / 'run.key'} readable only by its user"
        say(console, f"\nother hosts join, with {file.name} and {key}, by\n  {join}\n")
    with outcome_of(out, console), LiveView(options.steps, f"asyncflow run {file.name}", console=console) as view:
        workflow.run(out, on_event=view)


def resume_run(out: Path, changes: Mapping[str, Any], console: Console) -> None:
    """Resume the run in a directory, live; a completed run without changes is only reported. Raises the errors of
    ``Workflow.resume``."""
    workflow, directory = Workflow.load(out, changes), RunDirectory(out)
    if changes or directory.read_summary().get("status") != "completed":
        title = f"asyncflow resume {out}"
        with outcome_of(out, console), LiveView(workflow.plan.options.steps, title, console=console) as view:
            workflow.resume_in(out, view)
    summary = directory.read_summary()
    say(console, f"{out}: {summary['status']}, {summary['steps']} of {summary['steps_wanted']} steps trained")


@contextlib.contextmanager
def outcome_of(out: Path, console: Console) -> Iterator[None]:
    """Show the outcome of the run in the block, also after an error. An earlier run in the
    directory is not shown. After repeated interrupts no report page is written."""
    before, hurried = _summary_id(out), False
    try:
        yield
    except Interrupted as stop:
        hurried = stop.repeated
        raise
    finally:
        if _summary_id(out) != before:
            _show_outcome(out, console, page=not hurried)


def _summary_id(out: Path) -> tuple[int, int] | None:
    try:
        found = (out / "summary.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _show_outcome(out: Path, console: Console, page: bool) -> None:
    """Write the report page of an ended run, unless ``page`` is False, and print the table of its
    summary. Ctrl-C skips the page and is raised again."""
    summary, skipped = RunDirectory(out).read_summary(), f"skipped after Ctrl-C; `asyncflow report {out}` writes it"
    try:
        if page:
            summary["report"] = str(write_report(out))
            RunDirectory(out).write_summary(summary)
        else:
            say(console, f"no report page: {skipped}", "yellow")
    except (ConfigError, PluginError, OSError) as error:  # a full disk, for example
        say(console, f"no report page: {error}", "yellow")
    except KeyboardInterrupt:
        say(console, f"no report page: {skipped}", "yellow")
        raise
    console.print(summary_table({**summary, "error": None}))  # the command ends with it
    if summary.get("report"):
        say(console, f"report: {summary['report']}")


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


def export_model(directory: Path, out: Path, step: int | None, best: bool) -> str:
    """Write a model folder of the run in ``directory``. Return its origin. A step without a folder is
    exported from its checkpoint by the run's train engine. Raises ConfigError, and the errors of the
    engine."""
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder")
    if best and step is not None:
        raise ConfigError("--best is a version of its own: leave --step out")
    name = "best" if best else "model" if step is None else f"models/step-{step:06d}"
    with whole_folder(out) as part:
        if (directory / name).is_dir():
            shutil.copytree(directory / name, part, dirs_exist_ok=True)
            return str(directory / name)
        checkpoint = directory / "checkpoints" / f"step-{step or 0:06d}"
        if step is None or not checkpoint.is_dir():
            what = "no best version: no evaluation was finished" if best else f"no {name}"
            raise ConfigError(f"{directory} has {what}; it has: {', '.join(_folders(directory)) or 'none'}")
        _export_checkpoint(directory, checkpoint, part)
        return str(checkpoint)


def _folders(directory: Path) -> list[str]:
    found = [name for name in ("model", "best") if (directory / name).is_dir()]
    for parent in ("models", "checkpoints"):
        found += [f"{parent}/step-{step:06d}" for step in steps_in(directory / parent)]
    return found


def _export_checkpoint(directory: Path, checkpoint: Path, part: Path) -> None:
    with for_role("train"):
        train = Workflow.load(directory).plan.train
    python = train.place.python
    if python is not None and os.path.abspath(python) != sys.executable:
        raise ConfigError(
            f"engine {train.engine!r} is in another environment: {python} -m asyncflow_sdk.cli export ..."
        )
    try:
        check(checkpoint)
    except Damaged as error:
        raise ConfigError(f"{checkpoint} cannot be exported: {error}") from None
    algorithm = make_algorithm(train.algorithm_spec)
    engine: TrainEngine = make_engine("train", train.engine, model=train.model, algorithm=algorithm, **train.options)
    with contextlib.closing(engine):
        if train.world_size > 1 and not engine.reshards:
            raise ConfigError(
                f"{checkpoint} is of {train.world_size} ranks, and engine {train.engine!r} loads it in as many only,"
                " not in this process. Let the run write folders, with save_steps="
            )
        engine.load(checkpoint / "engine")
        engine.export(part)
