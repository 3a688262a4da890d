"""The demo's asynchronous run, timed from its own events.

``python -m benchmarks.async_run MODEL STEPS SEED MAX_STALENESS`` prints one JSON object. ``--weight``: the off-policy correction, as
``af.OffPolicy`` takes it; without it there is none. ``--train``, ``--rollout``: the engines, as JSON of what `DemoTrainer` and
`DemoGenerator` take.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import asyncflow_sdk as af
from asyncflow_sdk.types import events as ev
from asyncflow_torch.demo.run import DemoGenerator, DemoTrainer, demo_workflow

FROM_STEP = 10  # what comes before is start-up
BEFORE_END = 5  # rollouts end some steps before training does
SAID = ("reward", "staleness_mean", "clip_fraction", "importance_ess", "off_policy_cut")


class Meter:
    """CPU time of all processes of the run between two steps, and how much of it generate and train calls took.

    Also a live view's work: the demo draws while it trains, so its cost belongs to the run.
    """

    def __init__(self, steps: int) -> None:
        self.pids = {"driver": os.getpid()}
        self.record: list[dict[str, float]] = []
        self.generate_s: list[float] = []
        self.train_s: list[float] = []
        """Of each step: of one in parts, the sum of its spans."""
        self.engine_cpu: dict[str, float] = {}
        self.total_cpu: dict[str, float] = {}
        self._train_s = 0.0
        self._began: float | None = None
        self._measured_from_s = math.inf
        """Calls begun before are not counted: a part of their time is in the processors' time before."""
        self._start_cpu: dict[str, float] | None = None
        self._last = steps - BEFORE_END
        self._view = af.LiveView(
            steps, "bench", console=Console(file=io.StringIO(), force_terminal=True, width=120, height=40)
        )

    def __enter__(self) -> Meter:
        self._view.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._view.__exit__(*exc)

    def __call__(self, event: ev.Event) -> None:
        self._view(event)
        if isinstance(event, ev.WorkerState) and event.pid:
            self.pids[event.worker] = event.pid
        if isinstance(event, ev.Span) and event.kind in ("generate", "train"):
            self._began = event.time_s if self._began is None else self._began
            if event.time_s >= self._measured_from_s and not self.total_cpu:
                self.engine_cpu[event.worker] = self.engine_cpu.get(event.worker, 0.0) + event.cpu_s
                if event.kind == "generate":
                    self.generate_s.append(event.seconds)
                else:
                    self._train_s += event.seconds
        if isinstance(event, ev.StepTrained):
            assert self._began is not None
            if self._train_s:
                self.train_s.append(self._train_s)
                self._train_s = 0.0
            said = {name: event.metrics[name] for name in SAID if name in event.metrics}
            self.record.append(said | {"at_s": event.time_s - self._began})
            if event.step == FROM_STEP:
                self._start_cpu, self._measured_from_s = self._cpu(), event.time_s
            elif event.step == self._last and self._start_cpu is not None:
                self.total_cpu = {name: cpu_s - self._start_cpu.get(name, 0.0) for name, cpu_s in self._cpu().items()}

    def _cpu(self) -> dict[str, float]:
        seconds = {}
        for name, pid in self.pids.items():
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            except FileNotFoundError:
                continue
            seconds[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    for name in ("steps", "seed", "max_staleness"):
        parser.add_argument(name, type=int)
    parser.add_argument("--weight")
    parser.add_argument("--train", type=json.loads, default={})
    parser.add_argument("--rollout", type=json.loads, default={})
    given = parser.parse_args()
    algorithm = af.GRPO(off_policy=af.OffPolicy(weight=given.weight)) if given.weight else None
    trainer = DemoTrainer(algorithm=algorithm, **given.train)
    workflow = demo_workflow(
        given.model,
        given.steps,
        given.seed,
        given.max_staleness,
        generator=DemoGenerator(**given.rollout),
        trainer=trainer,
    )
    with tempfile.TemporaryDirectory() as out, Meter(given.steps) as meter:
        summary = workflow.run(Path(out) / "run", on_event=meter).summary
    print(
        json.dumps(
            {
                "steps": meter.record, "generate_s": meter.generate_s, "train_s": meter.train_s,
                "total_cpu_s": meter.total_cpu, "engine_cpu_s": meter.engine_cpu,
                "balanced": summary["balanced"], "staleness_max": summary["staleness_max"],
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
