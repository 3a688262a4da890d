"""``make bench-weights``: interleaved rounds over all contenders, medians, and the table.

python -m benchmarks.weights [--gb 1.0] [--rounds N] [--quick] [--ray PYTHON] [--only TEXT] [--markdown] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as st
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ..children import result_of
from ..table import Row, finish, ratio, show_options
from .parts import PARTS, Part

RAY = Path(".venv-ray/bin/python")
LIMIT_S = 900
VERSIONS = 7
QUICK_GB = 0.016
DELTA = {"millions": 40, "steps": 16}
QUICK_DELTA = {"millions": 0.1, "steps": 2}


@dataclass
class Results:
    """What every round said: of each contender, and of the codec of deltas."""

    contenders: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    delta: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    gb: float
    rounds: int
    quick: bool
    ray: Path | None
    parts: list[Part]
    delta: bool
    console: Console

    def run(self) -> Results:
        results = Results()
        names = dict.fromkeys(name for part in self.parts for name in part.contenders)
        options = json.dumps({"gb": self.gb, "versions": 2 if self.quick else VERSIONS})
        for number in range(self.rounds):
            self.console.print(f"round {number + 1} of {self.rounds}", style="dim")
            for name in names:
                if name == "ray" and self.ray is None:
                    continue
                python = str(self.ray) if name == "ray" else sys.executable
                found = self._once([python, "-m", "benchmarks.weights.drive", name, options])
                results.contenders.setdefault(name, []).append(found)
            if self.delta:
                wanted = json.dumps(QUICK_DELTA if self.quick else DELTA)
                results.delta.append(self._once([sys.executable, "-m", "benchmarks.weights.delta", wanted]))
        return results

    def _once(self, command: list[str]) -> Any:
        environment = dict(os.environ)
        if command[0] == str(self.ray):
            environment.pop("PYTHONPATH", None)
        return result_of(command, LIMIT_S, self.console, environment)

    def table(self, results: Results) -> list[Row]:
        rows = [self._row(part, results) for part in self.parts]
        return [*rows, *_delta(results.delta), *_machine(results)]

    def _row(self, part: Part, results: Results) -> Row:
        def value(name: str | None) -> float | None:
            found = results.contenders.get(name) if name is not None else None
            return part.measured(found) if found else None

        ours, peer, limit = value(part.ours), value(part.peer), value(part.limit)
        assert ours is not None
        pairs = [(other, ours) if part.less else (ours, other) for other in (peer, limit)]
        return Row(part.work, part.unit, ours, peer, ratio(*pairs[0]), limit, ratio(*pairs[1]))


def _delta(results: list[dict[str, float]]) -> list[Row]:
    if not results:
        return []
    found = {key: st.median(each[key] for each in results) for key in results[0]}
    what = f"delta of one Adam step at learning_rate 1e-6, {found['parameters'] / 1e6:.0f} M parameters in bf16"
    return [
        Row(f"{what}: size (limit: elements that changed)", "% of full", found["percent"], limit=found["changed"]),
        Row("the same, moved by transport tcp", "% of full", found["moved"]),
        Row("the same, of the first step", "% of full", found["first_percent"]),
        Row("the same, encoding on one core", "GB/s", found["encode_gb_s"]),
        Row("the same, decoding on one core", "GB/s", found["decode_gb_s"]),
    ]


def _machine(results: Results) -> list[Row]:
    versions = [
        (result["nbytes"], version["copy_s"])
        for found in results.contenders.values()
        for result in found
        for version in result["versions"]
    ]
    if not versions:
        return []
    return [Row("the machine: memcpy", "GB/s", st.median(nbytes / copy_s / 1e9 for nbytes, copy_s in versions))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of weights")
    parser.add_argument("--quick", action="store_true", help="a few MB, one round: whether it runs, not how fast")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--ray", type=Path, default=RAY, help="python of an environment with ray and torch")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    show_options(parser)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    ray: Path | None = arguments.ray
    if arguments.no_ray or not arguments.ray.exists():
        console.print("without Ray: its environment is not there (make .venv-ray/.ready)", style="yellow")
        ray = None
    rounds = arguments.rounds or (1 if arguments.quick else 2)
    gb = QUICK_GB if arguments.quick else arguments.gb
    parts = [part for part in PARTS if arguments.only in part.work]
    plan = Plan(gb, rounds, arguments.quick, ray, parts, arguments.only in "delta", console)
    rows = plan.table(plan.run())
    finish(f"WeightSync, {gb:g} GB in 200 tensors, {rounds} interleaved rounds", rows, arguments)


if __name__ == "__main__":
    main()
