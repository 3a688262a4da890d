"""``make bench-demo ARGS="--seeds 0,1,3"``: the demo asynchronously and synchronously, by the same SDK, on several seeds.

What is compared: the time a step takes, and whether the reward rises alike over steps. Curves are means of ``WINDOW`` steps; the
measure of alike is how far the synchronous curves of the seeds lie apart.
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from .demo import run, share_rows, step_s
from .table import Row, show

WINDOW = 20
Results = dict[str, list[dict[str, Any]]]
"""By mode, one for each seed."""
COLOURS = {"synchronous": "#3b75af", "asynchronous": "#c9582a", "plain": "#8b949e"}


def compare(seeds: list[int], arguments: argparse.Namespace, console: Console) -> None:
    """Run every mode on every seed, one after another; print the table, and draw the curves."""
    from asyncflow_torch.demo.model import warm_up

    results: Results = {name: [] for name in COLOURS}
    steps = str(arguments.steps)
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            console.print(f"seed {seed}: warming up the start", style="dim")
            model = str(Path(folder) / f"start-{seed}")
            warm_up(Path(model), seed=seed)
            ours = [sys.executable, "-m", "benchmarks.async_run", model, steps, str(seed)]
            commands = {
                "synchronous": [*ours, "0"],
                "asynchronous": [*ours, "1"],
                "plain": [sys.executable, "-m", "benchmarks.plain_loop", model, steps, str(seed), "1"],
            }
            for name, command in commands.items():
                console.print(f"seed {seed}: {name}", style="dim")
                results[name].append(run(command))
    title = f"demo task, {steps} steps, seeds {', '.join(map(str, seeds))}"
    show(title, rows_of(results), arguments.json)
    if arguments.json is not None:
        kept = {name: [[step["reward"] for step in r["steps"]] for r in found] for name, found in results.items()}
        arguments.json.with_suffix(".curves.json").write_text(json.dumps({"seeds": seeds, "rewards": kept}))
    if arguments.picture is not None:
        draw(results, seeds, arguments.picture)


def curve(result: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Mean reward of the last ``WINDOW`` steps, from the first step on that has so many; float64 (steps - WINDOW + 1,)."""
    rewards = np.array([step["reward"] for step in result["steps"]])
    window = min(WINDOW, len(rewards))
    smooth: npt.NDArray[np.float64] = np.convolve(rewards, np.full(window, 1 / window), "valid")
    return smooth


def rows_of(results: Results) -> list[Row]:
    seconds = {name: st.median(map(step_s, found)) for name, found in results.items()}
    curves = {name: np.stack([curve(result) for result in found]) for name, found in results.items()}
    one, other = curves["asynchronous"], curves["synchronous"]
    apart = np.abs(one.mean(0) - other.mean(0))
    low, high = other.min(0), other.max(0)
    within = float(((low <= one.mean(0)) & (one.mean(0) <= high)).mean())
    ours = seconds["asynchronous"]
    return [
        *(
            Row(f"time a step, asynchronous against {name}", "s", ours, seconds[name], seconds[name] / ours)
            for name in ("synchronous", "plain")
        ),
        *(Row(f"mean reward of the last {WINDOW} steps, {name}", "reward", curves[name][:, -1].mean()) for name in curves),
        Row("asynchronous from synchronous, mean curves (limit: how far seeds are apart)", "reward", apart.mean(),
            limit=(high - low).mean()),
        Row("the same where they are farthest apart", "reward", apart.max(), limit=(high - low).max()),
        Row("steps with the asynchronous mean within the synchronous seeds", "share", within),
        *share_rows(results["asynchronous"]),
    ]  # fmt: skip


def draw(results: Results, seeds: list[int], path: Path) -> None:
    """The curves over steps and over seconds, thin for each seed and thick for their mean over steps."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for name, found in results.items():
        curves = np.stack([curve(result) for result in found])
        steps = np.arange(len(found[0]["steps"]) - curves.shape[1] + 1, len(found[0]["steps"]) + 1)
        for result, line in zip(found, curves, strict=True):
            left.plot(steps, line, color=COLOURS[name], linewidth=0.7, alpha=0.6)
            right.plot(
                [step["at_s"] for step in result["steps"]][-len(line) :], line, color=COLOURS[name], linewidth=0.9
            )
        left.plot(steps, curves.mean(0), color=COLOURS[name], linewidth=2.2, label=name)
    left.set_title(f"Mean reward of {WINDOW} steps, seeds {', '.join(map(str, seeds))}, and their mean", fontsize=10)
    left.set_xlabel("steps")
    right.set_title("The same over time", fontsize=10)
    right.set_xlabel("seconds")
    left.legend(frameon=False, fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
