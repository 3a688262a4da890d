"""One number of replicas, run for real: ``python -m benchmarks.scale.drive PLAN`` prints one JSON object.

The server has this process to itself. Trainer, reward stage, probe, and the replicas, up to ``PER_PROCESS`` of them in one
process, have others. Every replica is a session with sockets of its own; prompts, responses and log-probs are real arrays.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import asyncflow_sdk as af
from asyncflow_sdk.types import events as ev
from asyncflow_sdk.workflow.specs import declare_task

from ..overlap.plan import GROUP, PROMPT_TOKENS
from . import probe, processors
from .plan import ScalePlan
from .work import reward

PER_PROCESS = 256
LIMIT_S = 1200.0
PROBES = 20_000


class Watch:
    """Hears what the run says: which replicas have version 0, when steps were trained, and what had been used by then."""

    def __init__(self, plan: ScalePlan) -> None:
        self._plan, self._replicas = plan, 0
        self.used: list[dict[str, float]] = []
        self.pids: dict[str, set[int]] = {"server": {os.getpid()}, "replicas": set(), "others": set()}
        self.ready, self.through = threading.Event(), threading.Event()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerState) and event.pid:
            self.pids["others"].add(event.pid)
        elif isinstance(event, ev.Loaded) and event.version == 0:
            self._replicas += 1
            if self._replicas == self._plan.replicas:
                self.ready.set()
        elif isinstance(event, ev.StepTrained):
            times = {role: processors.of_processes(pids) for role, pids in self.pids.items()}
            self.used.append({"time": event.time_s, "machine": processors.of_machine(), **times})
            if len(self.used) == self._plan.steps:
                self.through.set()

    def between(self) -> dict[str, float]:
        """Seconds from the last step of the warm-up to the last one."""
        first, last = self.used[self._plan.warm - 1], self.used[self._plan.steps - 1]
        return {name: last[name] - first[name] for name in first}


def drive(plan: ScalePlan) -> dict[str, Any]:
    watch = Watch(plan)
    capacity = plan.prompts * GROUP + PROBES
    with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as children:
        run = af.serve(
            Path(out) / "run", on_event=watch, max_staleness=plan.max_staleness, staleness_policy=plan.policy,
            capacity_rows=capacity,
        )  # fmt: skip
        with run:
            trainer = _declare(run, plan)
            (training,) = run.start(trainer)
            replicas = _start_replicas(run.address, plan, children)
            watch.pids["replicas"] |= {each.pid for each in replicas}
            probing = _start([f"{__package__}.probe", run.address], children, stdout=subprocess.PIPE)
            watch.pids["others"].add(probing.pid)
            _wait(run, watch.ready, replicas)
            run.queue.put({"prompt_ids": _prompts(plan)}, group_size=GROUP)
            _wait(run, watch.through, replicas)
            run.queue.end(cancel=True)
            leases = json.loads(probing.communicate(timeout=60)[0])
            training.ended.wait(60.0)
            for process in replicas:
                if process.wait(60.0):
                    raise SystemExit(f"a process of replicas ended with {process.returncode}")
            audit = run.audit()
    used, began = watch.between(), watch.used[plan.warm - 1]["time"]
    return {
        "used": used, "leases": [took for asked, took in leases if began <= asked < began + used["time"]],
        "consumed": audit.terminal["consumed"], "balanced": audit.balanced,
    }  # fmt: skip


def _declare(run: af.Run, plan: ScalePlan) -> af.Train:
    """Declare all tasks, and start the reward stage."""
    work, (stage,) = plan.step_work, plan.stages
    trainer = af.Train(
        "timed", token_s=work.token_s, step_s=work.call_s, copy_s=plan.copy_s, time_scale=plan.time_scale
    )
    declare_task(run.queue, af.Rollout("timed", prompt="prompt_ids", group_size=GROUP, lease_s=LIMIT_S).declare())
    declare_task(run.queue, trainer.declare(plan.rows))
    probe.declare(run, PROBES)
    run.start(af.Stage(reward, task=stage.task, needs=stage.needs, gives=(stage.gives,), batch=stage.rows))
    return trainer


def _prompts(plan: ScalePlan) -> af.Ragged:
    numbers = np.zeros((plan.prompts, PROMPT_TOKENS), np.int32)
    numbers[:, 0] = np.arange(plan.prompts)
    return af.Ragged.from_lengths(numbers.reshape(-1), np.full(plan.prompts, PROMPT_TOKENS))


def _start_replicas(address: str, plan: ScalePlan, children: contextlib.ExitStack) -> list[subprocess.Popen[str]]:
    command = [f"{__package__}.replicas", address, msgspec.json.encode(plan).decode()]
    parts = np.array_split(np.arange(plan.replicas), max(2, math.ceil(plan.replicas / PER_PROCESS)))
    return [_start([*command, *map(str, part.tolist())], children) for part in parts]


def _start(module: list[str], children: contextlib.ExitStack, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-m", *module], text=True, **options)
    children.callback(process.wait)
    children.callback(process.kill)
    return process


def _wait(run: af.Run, event: threading.Event, replicas: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + LIMIT_S
    while not event.wait(0.5):
        run.check()
        if any(process.poll() is not None for process in replicas):
            raise SystemExit("a process of replicas has ended")
        if time.monotonic() > until:
            raise SystemExit(f"nothing for {LIMIT_S:g} s: {run.queue.status()}")


if __name__ == "__main__":
    print(json.dumps(drive(msgspec.json.decode(sys.argv[1], type=ScalePlan))))
