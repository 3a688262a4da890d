"""One plan, run for real: ``python -m benchmarks.overlap.drive PLAN`` prints one JSON object.

The queue's server and the stages are in this process, the trainer in another, the replicas in ``PROCESSES`` more, several
in each: every replica is a session with a connection of its own, and engines that are timed cost no CPU.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import asyncflow_sdk as af
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow.run import Run
from asyncflow_sdk.workflow.specs import declare_task

from .plan import GROUP, PROMPT_TOKENS, Plan, StagePlan

PROCESSES = 2
LIMIT_S = 500.0


class Watch:
    """Hears what the run says: when steps were trained, and how many replicas have version 0."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._replicas = 0
        self.trained: list[ev.StepTrained] = []
        self.ready, self.through = threading.Event(), threading.Event()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Loaded) and event.version == 0:
            self._replicas += 1
            if self._replicas == self._plan.replicas:
                self.ready.set()
        elif isinstance(event, ev.StepTrained):
            self.trained.append(event)
            if len(self.trained) == self._plan.steps:
                self.through.set()


def drive(plan: Plan) -> dict[str, Any]:
    watch = Watch(plan)
    with tempfile.TemporaryDirectory() as out:
        run = af.serve(
            Path(out) / "run", on_event=watch, max_staleness=plan.max_staleness, staleness_policy=plan.policy,
            capacity_rows=plan.prompts * GROUP, max_swapping=plan.max_swapping,
        )  # fmt: skip
        with run:
            _declare(run, plan)
            for stage in plan.stages:
                _start_stage(run, plan, stage)
            (trainer,) = run.start(_trainer(plan))
            replicas = _start_replicas(run.address, plan)
            try:
                _wait(run, watch.ready)
                numbers = np.zeros((plan.prompts, PROMPT_TOKENS), np.int32)
                numbers[:, 0] = np.arange(plan.prompts)
                lengths = np.full(plan.prompts, PROMPT_TOKENS)
                prompts = af.Ragged.from_lengths(numbers.reshape(-1), lengths)
                began, cpu_s = time.monotonic(), _cpu_s()
                run.queue.put({"prompt_ids": prompts}, group_size=GROUP)
                _wait(run, watch.through)
                took_s, cpu_s = time.monotonic() - began, _cpu_s() - cpu_s
                run.queue.end(cancel=True)
                trainer.ended.wait(30.0)
                for process in replicas:
                    if process.wait(30.0):
                        raise SystemExit(f"a process of replicas ended with {process.returncode}")
            finally:
                for process in replicas:
                    process.kill()
                    process.wait()
            audit = run.audit()
    trained = watch.trained[: plan.steps]
    return {
        "trained_s": [(step.time_s - began) * plan.time_scale for step in trained],
        "staleness": [step.metrics["staleness_mean"] for step in trained],
        "staleness_max": max(step.metrics["staleness_max"] for step in trained),
        "consumed": audit.terminal["consumed"], "cancelled": audit.terminal["cancelled"], "balanced": audit.balanced,
        "wall_s": took_s, "driver_cpu": cpu_s / took_s,
    }  # fmt: skip


def _declare(run: Run, plan: Plan) -> None:
    rollout = af.Rollout("timed", prompt="prompt_ids", group_size=GROUP)
    declare_task(run.queue, rollout.declare())
    declare_task(run.queue, _trainer(plan).declare(plan.rows))


def _trainer(plan: Plan) -> af.Train:
    work = plan.train
    return af.Train(
        "timed", needs=plan.train_needs, token_s=work.token_s, step_s=work.call_s, copy_s=plan.copy_s,
        time_scale=plan.time_scale, stream=plan.part_rows > 0, part_rows=plan.part_rows or None,
    )  # fmt: skip


def _start_stage(run: Run, plan: Plan, stage: StagePlan) -> None:
    def work(**columns: Any) -> Any:
        rows = len(columns["response_ids"])
        tokens = sum(len(columns[name].values) for name in ("prompt_ids", "response_ids") if name in columns)
        time.sleep(stage.work.seconds(rows, tokens) / plan.time_scale)
        return np.zeros(rows, np.float32)

    if stage.whole:
        run.queue.declare(stage.task, needs=stage.needs, gives=(stage.gives,))
        threading.Thread(target=_barrier, args=(run, stage, work), daemon=True).start()
    else:
        run.start(af.Stage(work, task=stage.task, needs=stage.needs, gives=(stage.gives,), batch=stage.rows))


def _barrier(run: Run, stage: StagePlan, work: Callable[..., Any]) -> None:
    """A stage that begins when the whole step is there."""
    with af.connect(run.address, name=stage.task) as own:
        for batch in own.queue.stream(stage.task, stage.rows, at_least=stage.rows, timeout_s=LIMIT_S):
            batch.finish({stage.gives: work(**batch)})


def _start_replicas(address: str, plan: Plan) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.overlap.replicas", address, msgspec.json.encode(plan).decode()]
    return [
        subprocess.Popen([*command, *map(str, part.tolist())])
        for part in np.array_split(np.arange(plan.replicas), PROCESSES)
        if len(part)
    ]


def _wait(run: Run, event: threading.Event) -> None:
    until = time.monotonic() + LIMIT_S
    while not event.wait(0.5):
        run.check()
        if time.monotonic() > until:
            raise SystemExit(f"nothing for {LIMIT_S:g} s: {run.queue.status()}")


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    print(json.dumps(drive(msgspec.json.decode(sys.argv[1], type=Plan))))
