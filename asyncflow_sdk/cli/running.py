"""``asyncflow run``: a workflow of a file, live; then the table of its summary, and the report page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ConfigError, PluginError
from ..workflow import load_workflow
from .live import LiveView
from .report import write_report
from .table import summary_table


def run_file(file: Path, out: Path | None, changes: list[str], shown: str, console: Console) -> None:
    """Run the workflow of ``file`` into ``out``. ``changes``: "train.lr=1e-5". ``shown``: "text" or "mermaid" prints it, and
    starts nothing. Raises what ``load_workflow`` and ``Workflow.run`` raise."""
    pairs = [change.partition("=") for change in changes]
    for name, equals, _ in pairs:
        if not equals or not name.strip():
            raise ConfigError(f"--set takes KEY=VALUE, such as train.lr=1e-5, not {name!r}")
    workflow = load_workflow(file, {name.strip(): value.strip() for name, _, value in pairs})
    if shown:
        console.print(workflow.mermaid() if shown == "mermaid" else str(workflow), markup=False, soft_wrap=True)
        return
    out = out or Path("runs") / time.strftime(f"{file.stem}-%Y%m%d-%H%M%S")
    console.print(str(workflow), markup=False, soft_wrap=True)
    try:
        with LiveView(workflow.steps, f"asyncflow run {file.name}", console=console) as view:
            workflow.run(out, on_event=view)
    finally:
        if (out / "summary.json").is_file():
            show_outcome(out, console)


def show_outcome(out: Path, console: Console) -> None:
    """Write the report page of a run that has ended, and print the table of its summary."""
    file = out / "summary.json"
    summary: dict[str, Any] = json.loads(file.read_text())
    try:
        summary["report"] = str(write_report(out))
        file.write_text(json.dumps(summary, indent=2))
    except PluginError as error:
        console.print(f"no report page: {error}", style="yellow", markup=False)
    console.print(summary_table(summary))
    if summary["report"]:
        console.print(f"report: {summary['report']}", soft_wrap=True, markup=False)
