"""``make bench-overlap``: timed engines in real processes, beside the slowest resource and beside a simulation.

python -m benchmarks.overlap [--quick] [--jobs N] [--rate ROWS_S] [--only TEXT] [--picture PATH] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ..children import result_of
from .outcome import Measured, ablation_table, show
from .plan import Plan
from .plans import all_plans, quick_plans

LIMIT_S = 600


def child(module: str, plan: Plan, console: Console) -> Any:
    command = [sys.executable, "-m", f"benchmarks.overlap.{module}", msgspec.json.encode(plan).decode()]
    return result_of(command, LIMIT_S, console, os.environ)


def measure(plans: list[Plan], jobs: int, rate: float, console: Console) -> list[Measured]:
    """All simulations, then all runs, ``jobs`` at a time: each so fast that it trains ``rate`` rows in a second."""

    def simulated(plan: Plan) -> list[float]:
        return list(child("simulation", plan, console)["trained_s"])

    def driven(plan: Plan, trained_s: list[float]) -> Measured:
        step_s = Measured.step_s(plan, trained_s)
        real = child("drive", msgspec.structs.replace(plan, time_scale=rate * step_s / plan.rows), console)
        measured = Measured.of(plan, trained_s, real)
        console.print(f"{measured.name}: {measured.of_simulation:.3f} of the simulation", highlight=False)
        return measured

    with ThreadPoolExecutor(jobs) as pool:
        simulations = list(pool.map(simulated, plans))
        return list(pool.map(driven, plans, simulations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seven runs of few steps, faster")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time")
    parser.add_argument("--rate", type=float, help="rows a second that each run trains")
    parser.add_argument("--only", default="", help="runs whose name contains this")
    parser.add_argument("--picture", type=Path, help="draw the ablation and the staleness into this file")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    plans = [plan for plan in (quick_plans() if arguments.quick else all_plans()) if arguments.only in plan.name]
    if not plans:
        raise SystemExit(f"no run has {arguments.only!r} in its name")
    found = measure(plans, arguments.jobs, arguments.rate or (150.0 if arguments.quick else 70.0), console)
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
