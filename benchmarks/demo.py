"""``make bench-demo``: the demo task asynchronously, by the plain synchronous loop, and by TRL, interleaved.

All start from the same warmed-up weights and take the same prompts. Times are medians over rounds; a machine's
absolute times mean little, the ratios are the result. With ``--seeds 0,1,3``: asynchronous against synchronous, both by the
SDK, and the plain loop, on each seed (``demo_seeds``).
"""

from __future__ import annotations

import argparse
import json
import statistics as st
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from .streamed import streamed_commands, streamed_rows
from .table import Row, show

TRL = Path(".venv-trl/bin/python")
SKIP = 11  # steps of start-up left out of times per step
GOAL = 0.8
LIMIT_S = 900


def run(command: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"{' '.join(command)} did not end in {LIMIT_S} s; is the machine busy with something else?"
        ) from None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def step_s(result: dict[str, Any]) -> float:
    """Seconds a step, start-up left out."""
    at = [step["at_s"] for step in result["steps"]]
    return (at[-1] - at[SKIP - 1]) / (len(at) - SKIP)


def to_goal(result: dict[str, Any]) -> tuple[float, float]:
    """Seconds and steps until the mean reward of 20 steps reaches the goal; infinity if it never does."""
    rewards = [step["reward"] for step in result["steps"]]
    for end in range(20, len(rewards) + 1):
        if np.mean(rewards[end - 20 : end]) >= GOAL:
            return result["steps"][end - 1]["at_s"], end
    return float("inf"), float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", help="several, as 0,1,3: asynchronous against synchronous on each")
    parser.add_argument("--picture", type=Path, help="with --seeds: draw the curves into this file")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-trl", action="store_true")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if arguments.seeds:
        from .demo_seeds import compare

        compare([int(seed) for seed in arguments.seeds.split(",")], arguments, console)
        return
    steps, seed = str(arguments.steps), str(arguments.seed)
    from asyncflow_torch.demo.model import warm_up
    from asyncflow_torch.demo.task import prompts

    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "start")
        console.print("warming up the start", style="dim")
        warm_up(Path(model), seed=arguments.seed)
        data = Path(folder) / "data.json"
        data.write_text(json.dumps(prompts(32 * arguments.steps, arguments.seed)))
        commands = {
            "plain": [sys.executable, "-m", "benchmarks.plain_loop", model, steps, seed, "1"],
            "async": [sys.executable, "-m", "benchmarks.async_run", model, steps, seed, "1"],
            "plain, 2 threads": [sys.executable, "-m", "benchmarks.plain_loop", model, steps, seed, "2"],
            "trl": [str(TRL), "benchmarks/trl_loop.py", model, steps, seed, str(data)],
            **streamed_commands([sys.executable, "-m", "benchmarks.async_run", model, steps, seed]),
        }
        if arguments.no_trl or not TRL.exists():
            del commands["trl"]
            console.print("without TRL: its environment is not there (make .venv-trl/.ready)", style="yellow")
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
        for round_ in range(arguments.rounds):
            for name, command in commands.items():
                console.print(f"round {round_ + 1} of {arguments.rounds}: {name}", style="dim")
                results[name].append(run(command))
    rows = summarise(results)
    show(f"demo task, {steps} steps, {arguments.rounds} interleaved rounds, seed {seed}", rows, arguments.json)


def summarise(results: dict[str, list[dict[str, Any]]]) -> list[Row]:
    def median(name: str, of: Any) -> float:
        return st.median(of(result) for result in results[name])

    def mean_of(name: str, key: str) -> float:
        return median(name, lambda r: float(np.mean([step[key] for step in r["steps"][SKIP:]])))

    ours = median("async", step_s)
    generate, train, plain = mean_of("plain", "generate_s"), mean_of("plain", "train_s"), median("plain", step_s)
    own_generate, own_train = (
        median("async", lambda r, k=k: float(np.mean(r[k]))) for k in ("generate_s", "train_s")
    )
    bound = max(generate, train)
    goal = {name: median(name, lambda r: to_goal(r)[0]) for name in results}
    rows = [
        Row(
            "time a step, against the plain loop and its pipeline bound",
            "s",
            ours,
            plain,
            plain / ours,
            bound,
            bound / ours,
        ),
        Row(
            "the same, bound from its own generate and train spans",
            "s",
            ours,
            None,
            None,
            max(own_generate, own_train),
            max(own_generate, own_train) / ours,
        ),
        Row("generate a step (ours: span of a lease)", "s", own_generate, generate, generate / own_generate),
        Row("train a step", "s", own_train, train, train / own_train),
        Row(
            "time a step, against the plain loop on 2 threads",
            "s",
            ours,
            two := median("plain, 2 threads", step_s),
            two / ours,
        ),
        Row(
            f"time to reward {GOAL}, against the plain loop",
            "s",
            goal["async"],
            goal["plain"],
            goal["plain"] / goal["async"],
        ),
        Row(
            f"time to reward {GOAL}, against 2 threads",
            "s",
            goal["async"],
            g2 := goal["plain, 2 threads"],
            g2 / goal["async"],
        ),
        Row(
            f"steps to reward {GOAL}, against the plain loop",
            "steps",
            a := median("async", lambda r: to_goal(r)[1]),
            p := median("plain", lambda r: to_goal(r)[1]),
            p / a,
        ),
    ]
    if "trl" in results:
        trl = median("trl", step_s)
        rows.append(Row("time a step, against TRL's GRPOTrainer", "s", ours, trl, trl / ours))
        rows.append(
            Row(f"time to reward {GOAL}, against TRL", "s", goal["async"], goal["trl"], goal["trl"] / goal["async"])
        )
    seconds = {name: median(name, step_s) for name in results}
    return rows + streamed_rows(seconds, plain) + share_rows(results["async"])


def share_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Of the CPU time of all processes in the steady state, what generate and train calls did not take; and of whom."""

    def part(name: str) -> float:
        return st.median(
            (r["total_cpu_s"][name] - r["engine_cpu_s"].get(name, 0.0)) / sum(r["total_cpu_s"].values())
            for r in results
        )

    share = st.median(1 - sum(r["engine_cpu_s"].values()) / sum(r["total_cpu_s"].values()) for r in results)
    rows = [Row("CPU time outside generate and train calls", "share", share)]
    return rows + [Row(f"  of it {name}", "share", part(name)) for name in results[0]["total_cpu_s"]]


if __name__ == "__main__":
    main()
