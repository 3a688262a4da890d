"""``make bench-overlap``: timed engines in real processes, beside the slowest resource and beside a simulation.

python -m benchmarks.overlap [--quick] [--jobs N] [--rate ROWS_S] [--only TEXT] [--picture PATH] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console

from ..children import result_of
from .outcome import Measured, ablation_table, show
from .plan import Plan
from .plans import all_plans, quick_plans
from .simulation import simulate_steps

LIMIT_S = 600
RATE, QUICK_RATE = 40.0, 150.0


def drive(plan: Plan, simulated_s: list[float], rate: float, console: Console) -> Measured:
    """Run it for real, so fast that ``rate`` rows are trained in a second."""
    scaled = msgspec.structs.replace(plan, time_scale=rate * Measured.step_s(plan, simulated_s) / plan.rows)
    command = [sys.executable, "-m", "benchmarks.overlap.drive", msgspec.json.encode(scaled).decode()]
    measured = Measured.of(plan, simulated_s, result_of(command, LIMIT_S, console, os.environ))
    console.print(f"{measured.name}: {measured.of_simulation:.3f} of the simulation", highlight=False)
    return measured


def measure(plans: list[Plan], jobs: int, rate: float, console: Console) -> list[Measured]:
    """All simulations, each on a core, then all runs, ``jobs`` at a time: those that take longest first, so that none is left
    alone at the end."""
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as cores:
        simulations = dict(zip(plans, cores.map(simulate_steps, plans), strict=True))
    with ThreadPoolExecutor(jobs) as pool:
        longest_first = sorted(plans, key=lambda plan: plan.steps * plan.rows, reverse=True)
        runs = {plan: pool.submit(drive, plan, simulations[plan], rate, console) for plan in longest_first}
        return [runs[plan].result() for plan in plans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eight runs of few steps, faster")
    parser.add_argument("--jobs", type=int, default=6, help="runs at a time")
    parser.add_argument("--rate", type=float, help="rows a second that each run trains")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--picture", type=Path, help="draw the ablation, staleness and replicas into this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    plans = [plan for plan in (quick_plans() if arguments.quick else all_plans()) if arguments.only in plan.name]
    if not plans:
        raise SystemExit(f"no run has {arguments.only!r} in its name")
    found = measure(plans, arguments.jobs, arguments.rate or (QUICK_RATE if arguments.quick else RATE), console)
    show(found, arguments.markdown)
    ablation_table(found, arguments.markdown)
    if arguments.json is not None:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode([each.plain() for each in found]), indent=2)
        )
    if arguments.picture is not None:
        from .picture import draw

        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
