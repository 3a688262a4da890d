"""``asyncflow run`` and ``asyncflow resume``: run a workflow live, then print its summary and write
its report page."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ConfigError, Interrupted, PluginError
from ..workflow import Workflow, load_workflow
from ..workflow.address import advertised
from ..workflow.plan.plan import Plan
from ..workflow.run_directory import RunDirectory
from .report.page import write_report
from .report.summary import summary_table
from .screens.live_view import LiveView

_SKIPPED = "skipped after Ctrl-C; `asyncflow report {}` writes it"


def run_file(file: Path, out: Path | None, changes: list[str], shown: str, console: Console) -> None:
    """Run the workflow of ``file`` into ``out``. ``changes``: "train.learning_rate=1e-5". ``shown``: "text" or
    "mermaid" prints it and starts nothing. Raises the errors of ``load_workflow`` and
    ``Workflow.run``."""
    pairs = [change.partition("=") for change in changes]
    for name, equals, _ in pairs:
        if not equals or not name.strip():
            raise ConfigError(f"--set takes KEY=VALUE, for example train.learning_rate=1e-5, not {name!r}")
    workflow = load_workflow(file, {name.strip(): value.strip() for name, _, value in pairs})
    if shown:
        console.print(workflow.mermaid() if shown == "mermaid" else str(workflow), markup=False, soft_wrap=True)
        return
    out = out or Path("runs") / time.strftime(f"{file.stem}-%Y%m%d-%H%M%S")
    console.print(str(workflow), markup=False, soft_wrap=True)
    if workflow.plan.address is not None:
        console.print(_invitation(workflow.plan, out, file.name), markup=False, soft_wrap=True, highlight=False)
    with (
        outcome_of(out, console),
        LiveView(workflow.plan.steps, f"asyncflow run {file.name}", console=console) as view,
    ):
        workflow.run(out, on_event=view)


def resume_run(out: Path, changes: Mapping[str, Any], console: Console) -> None:
    """Resume the run in a directory, live; a completed run without changes is only reported. Raises the errors of
    ``Workflow.resume``."""
    workflow, directory = Workflow.load(out, changes), RunDirectory(out)
    if changes or directory.read_summary().get("status") != "completed":
        with (
            outcome_of(out, console),
            LiveView(workflow.plan.steps, f"asyncflow resume {out}", console=console) as view,
        ):
            workflow.resume_in(out, view)
    summary = directory.read_summary()
    text = f"{out}: {summary['status']}, {summary['steps']} of {summary['steps_wanted']} steps trained"
    console.print(text, markup=False, soft_wrap=True, highlight=False)


def _invitation(plan: Plan, out: Path, file: str) -> str:
    """Return the command by which workers of other hosts join."""
    where = advertised(plan.address or "", plan.advertise)
    return (
        f"\nother hosts join, with {file} and a copy of {out / 'run.key'} readable only by its user, by\n"
        f"  asyncflow worker {where} --key run.key --from {file} {plan.rollout.task}\n"
    )


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
            show_outcome(out, console, page=not hurried)


def _summary_id(out: Path) -> tuple[int, int] | None:
    """Identify the current summary, or None."""
    try:
        found = (out / "summary.json").stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def show_outcome(out: Path, console: Console, page: bool = True) -> None:
    """Write the report page of an ended run, unless ``page`` is False, and print the table of its
    summary. Ctrl-C skips the page and is raised again."""
    file = out / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text())
    try:
        if page:
            summary["report"] = _report(out, summary)
        else:
            _print_no_page(console, _SKIPPED.format(out))
    except (ConfigError, PluginError, OSError) as error:  # a full disk, for example
        _print_no_page(console, str(error))
    except KeyboardInterrupt:
        _print_no_page(console, _SKIPPED.format(out))
        raise
    console.print(summary_table({**summary, "error": None}))  # the command ends with it
    if summary["report"]:
        console.print(f"report: {summary['report']}", soft_wrap=True, markup=False, highlight=False)


def _report(out: Path, summary: dict[str, Any]) -> str:
    page = str(write_report(out))
    RunDirectory(out).write_summary({**summary, "report": page})
    return page


def _print_no_page(console: Console, why: str) -> None:
    console.print(f"no report page: {why}", style="yellow", markup=False, soft_wrap=True, highlight=False)
