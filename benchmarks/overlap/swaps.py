"""Why swaps cost what they cost: ``python -m benchmarks.overlap.swaps [--seeds N] [--steps N] [--markdown] [--json PATH]``.

Simulates each swap policy with each number of replicas that may load at once, and says what all slots of all replicas do:
generate, load, or have no row, because their replica drains, waits for its turn to load, gets no prompts by its version, or
has room for less than a group.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from asyncflow_sdk.types.config import SwapPolicy

from .outcome import print_table
from .plan import Plan
from .simulation import simulate

USES = ("generating", "loading", "draining", "waiting", "no prompts", "part of a group")
CASES: tuple[tuple[SwapPolicy, int], ...] = (
    ("boundary", 0),
    ("drain", 0),
    ("drain", 2),
    ("drain", 1),
    ("in_flight", 0),
)


class SwapPlan(Plan, frozen=True, kw_only=True):
    """``policy_of_swaps``: when a version is loaded. ``at_once``: replicas that may load at once; 0: all."""

    policy_of_swaps: SwapPolicy = "drain"
    at_once: int = 0

    @property
    def swap(self) -> SwapPolicy:
        return self.policy_of_swaps

    @property
    def max_swapping(self) -> int:
        return self.at_once


@dataclass(frozen=True)
class Cost:
    """Of one policy: means over the seeds. ``error``: standard error of ``rate``. ``slots``: shares of their time by use."""

    max_staleness: int
    swap: str
    at_once: int
    rate: float
    error: float
    staleness: float
    slots: dict[str, float]

    def cells(self) -> list[str]:
        shares = [f"{self.slots.get(use, 0.0):.1%}" for use in USES]
        numbers = [f"{self.rate:.2f} ± {self.error:.2f}", f"{self.staleness:.2f}", *shares]
        return [str(self.max_staleness), self.swap, str(self.at_once or "all"), *numbers]


def plan_of(max_staleness: int, swap: SwapPolicy, at_once: int, seed: int, steps: int) -> SwapPlan:
    warm = max_staleness + 1
    return SwapPlan(
        mode="staggered", policy_of_swaps=swap, at_once=at_once, max_staleness=max_staleness, warm=warm, steps=warm + steps,
        seed=seed,
    )  # fmt: skip


def measure(plan: SwapPlan) -> tuple[float, float, dict[str, float]]:
    """Rows a second, mean staleness, and use of the slots."""
    outcome = simulate(plan)
    seconds = outcome.trained_s[-1] - outcome.trained_s[plan.warm - 1]
    return (
        plan.rows * (plan.steps - plan.warm) / seconds,
        statistics.mean(outcome.staleness[plan.warm :]),
        outcome.slots,
    )


def costs(staleness: list[int], seeds: int, steps: int) -> list[Cost]:
    cases = [(late, *case) for late in staleness for case in CASES]
    plans = [plan_of(*case, seed, steps) for case in cases for seed in range(seeds)]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as cores:
        found = list(cores.map(measure, plans))
    return [_cost(case, found[at * seeds : (at + 1) * seeds]) for at, case in enumerate(cases)]


def _cost(case: tuple[int, SwapPolicy, int], found: list[tuple[float, float, dict[str, float]]]) -> Cost:
    rates, staleness, slots = zip(*found, strict=True)
    error = statistics.stdev(rates) / len(rates) ** 0.5 if len(rates) > 1 else 0.0
    shares = {use: statistics.mean(each.get(use, 0.0) for each in slots) for use in USES}
    return Cost(*case, statistics.mean(rates), error, statistics.mean(staleness), shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6, help="simulations of each row, with other lengths")
    parser.add_argument("--steps", type=int, default=12, help="that are measured in each")
    parser.add_argument("--staleness", default="1,2,4", help="max_staleness of the rows")
    parser.add_argument("--markdown", action="store_true", help="print the table as markdown, too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = costs([int(each) for each in arguments.staleness.split(",")], arguments.seeds, arguments.steps)
    columns = ("max staleness", "swap", "at once", "rows/s", "staleness", *USES)
    print_table("Swaps: what slots do", columns, [each.cells() for each in found], arguments.markdown)
    if arguments.json is not None:
        arguments.json.write_bytes(
            msgspec.json.format(msgspec.json.encode([asdict(each) for each in found]), indent=2)
        )


if __name__ == "__main__":
    main()
