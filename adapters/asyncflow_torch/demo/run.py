"""The demo: warm up a tiny model, train it by asynchronous GRPO, show it live, leave a report.

What ``asyncflow demo`` runs. The workflow below is the one a user writes, with a user's model and data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import asyncflow_sdk as af
from asyncflow_sdk.cli.table import summary_table
from asyncflow_sdk.errors import PluginError

from .task import DIGITS, exact_match, prompts

PROMPTS_A_STEP, GROUP_SIZE = 32, 8
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # two engines share the cores; more threads would only wait for each other


def demo_workflow(model: Path, steps: int, seed: int, max_staleness: int, policy: str = "wait") -> af.Workflow:
    """Reverse five digits: 32 prompts a step, 8 responses each, rewarded when exactly right."""
    return af.Workflow(
        prompts=prompts(PROMPTS_A_STEP * steps, seed),
        rollout=af.Rollout(
            "transformers",
            model=model,
            group_size=GROUP_SIZE,
            sampling=af.Sampling(max_tokens=DIGITS + 2, seed=seed),
            env=ONE_THREAD,
        ),
        reward=exact_match,
        train=af.Train("torch", model=model, algorithm=af.GRPO(), lr=2e-4, seed=seed, env=ONE_THREAD),
        batch_size=PROMPTS_A_STEP * GROUP_SIZE,
        steps=steps,
        staleness=af.Staleness(max_staleness=max_staleness, policy=policy),
        seed=seed,
    )


def run_demo(
    out: Path, steps: int, seed: int, max_staleness: int, model: Path | None, console: Console, policy: str = "wait"
) -> int:
    """Run the demo into ``out`` and print what came of it. Returns the exit status.

    Raises Interrupted after Ctrl-C; ``out`` then holds what was done, with its report.
    """
    if model is None:
        model = out / "start"
        _warm_up(model, seed, console)
    workflow = demo_workflow(model, steps, seed, max_staleness, policy)
    try:
        with af.LiveView(steps, "asyncflow demo: reverse five digits", console=console) as view:
            workflow.run(out, on_event=view)
    finally:
        _show(out, console)
    return 0


def _warm_up(folder: Path, seed: int, console: Console) -> None:
    from .model import warm_up

    columns = (
        TextColumn("warm-up by supervised steps"),
        BarColumn(),
        TextColumn("step {task.fields[step]}, accuracy {task.fields[accuracy]:.2f} of {task.total:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("", total=0.15, step=0, accuracy=0.0)

        def show(step: int, accuracy: float, target: float) -> None:
            progress.update(bar, completed=min(accuracy, target), total=target, step=step, accuracy=accuracy)

        warm_up(folder, seed=seed, on_progress=show)
    console.print(f"saved the start as a Hugging Face folder: {folder}")


def _show(out: Path, console: Console) -> None:
    """The table of the summary, and the report page."""
    file = out / "summary.json"
    if not file.is_file():
        return
    summary: dict[str, Any] = json.loads(file.read_text())
    try:
        summary["report"] = str(af.write_report(out))
        file.write_text(json.dumps(summary, indent=2))
    except PluginError as error:
        console.print(f"no report page: {error}", style="yellow")
    console.print(summary_table(summary))
    if summary["report"]:
        console.print(f"report: {summary['report']}", soft_wrap=True)
