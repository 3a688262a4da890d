"""``asyncflow run`` and ``asyncflow resume``: run a workflow live, then print its summary and write
its report page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ConfigError, Interrupted, PluginError
from ..workflow import Workflow, load_workflow
from ..workflow.run_directory import RunDirectory, advertised
from .live_view import LiveView
from .options import say
from .report.page import write_report
from .report.summary import summary_table


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
    """Identify the current summary, or None."""
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
