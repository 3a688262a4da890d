"""``make bench-scale``: replicas in numbers on one server, beside a straight line and beside the simulation.

python -m benchmarks.scale [--quick] [--sizes 32,64,...] [--simulate 32,64,...] [--markdown] [--json PATH]

Runs are timed engines in real processes, one number of replicas after another. The simulation has the same plan and an SDK
that costs nothing; it goes on where the processors of this machine end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from rich.console import Console

from ..children import result_of
from ..overlap.outcome import print_table
from ..overlap.simulation import simulate_steps
from .outcome import COLUMNS, Scale, conclusion
from .plan import SIZES, ScalePlan, plan_of

LIMIT_S = 1500


def drive(plan: ScalePlan, simulated_s: list[float], console: Console) -> Scale:
    command = [sys.executable, "-m", "benchmarks.scale.drive", msgspec.json.encode(plan).decode()]
    scale = Scale.of(plan, simulated_s, result_of(command, LIMIT_S, console))
    console.print(f"{plan.replicas} replicas: {scale.rate:.1f} rows/s", highlight=False)
    return scale


def numbers(text: str) -> list[int]:
    return sorted(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 and 16 replicas for two short steps")
    parser.add_argument("--sizes", type=numbers, help="numbers of replicas that are run")
    parser.add_argument("--simulate", type=numbers, default=[], help="further numbers, only simulated")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    load = os.getloadavg()[0]
    sizes = arguments.sizes or ([8, 16] if arguments.quick else list(SIZES))
    plans = {size: plan_of(size, quick=arguments.quick) for size in sorted({*sizes, *arguments.simulate})}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as cores:
        simulations = dict(zip(plans, cores.map(simulate_steps, plans.values()), strict=True))
    found = [
        drive(plan, simulations[size], console) if size in sizes else Scale.simulated_only(plan, simulations[size])
        for size, plan in plans.items()
    ]
    title = f"Replicas on one server; load before the first: {load:.1f}"
    print_table(title, COLUMNS, [each.cells(found) for each in found], arguments.markdown)
    print(conclusion(found))
    if arguments.json is not None:
        plain = [each.plain(found) | {"load_before": load} for each in found]
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(plain), indent=2))


if __name__ == "__main__":
    main()
