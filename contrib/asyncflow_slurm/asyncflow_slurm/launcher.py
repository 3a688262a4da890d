"""SlurmLauncher: a worker is a job, submitted by srun; its ranks are the job's tasks.

If the driver runs in a job itself, a worker is a step of this job. srun stays with the driver: it
carries the spec, the log and the worker's end, and ends the job if the driver ends.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import FATAL_STATUS

CHECK_S = 120.0
"""Longest wait for an answer of SLURM's commands, which try for a while if slurmctld is away."""
RETRY_S = 1.0
_AWAY = "Unable to contact slurm controller"


class SlurmLauncher(af.CommandLauncher):
    """Starts jobs, or steps of the driver's job. ``options``: of srun, as ``partition="gpu"``,
    ``time="8:00:00"``, ``mem_per_cpu="4G"``; True: one without a value. ``wait_s``: longest wait for
    a place (seconds)."""

    answer_s = math.inf  # srun waits for a place, as long as wait_s
    kill_signal = signal.SIGTERM  # srun then ends the job, too

    def __init__(self, *, wait_s: int = 3600, **options: str | int | bool) -> None:
        self._wait_s = wait_s
        self._options = [_option(name, value) for name, value in options.items()]

    def check(self, placement: af.Placement) -> None:
        if placement.hosts:
            raise af.ConfigError(
                "SLURM chooses the hosts: instead of hosts= say launcher_options={'nodelist': 'n1,n2'}"
            )
        if shutil.which("srun") is None:
            raise af.ConfigError("this host has no srun: start the run on a login node of the SLURM cluster")
        self._try(placement, 1, 0.0)

    def command(self, spec: af.WorkerSpec) -> Sequence[str]:
        return self._command([spec])

    def start(self, spec: af.WorkerSpec) -> af.WorkerHandle:
        return self.start_ranks([spec])[0]

    def start_ranks(self, specs: Sequence[af.WorkerSpec]) -> Sequence[af.WorkerHandle]:
        self._try(specs[0].placement, len(specs), self._wait_s)
        own = replace(specs[0].placement, cpus=(), gpus=())  # SLURM chooses which
        return self.start_together([replace(spec, placement=own) for spec in specs], self._command(specs))

    def _command(self, specs: Sequence[af.WorkerSpec]) -> list[str]:
        first, tasks = specs[0], len(specs)
        command = ["srun", f"--job-name=asyncflow-{first.name.replace(' ', '-')}", f"--immediate={self._wait_s}"]
        command += ["--kill-on-bad-exit=1", *self._needs(first.placement, tasks)]
        if tasks == 1:
            return [*command, *self.far_command(first)]
        log = str(first.log.with_stem(first.log.stem.removesuffix("0"))).replace("%", "%%")
        stem, dot, suffix = log.rpartition(".")
        logs = [f"--error={stem}%t{dot}{suffix}", "--open-mode=append"]
        return [*command, *logs, *self.far_command(first), "SLURM_PROCID"]

    def explain(self, spec: af.WorkerSpec, status: int, lines: str) -> af.WorkerExit | None:
        if not re.search("Unable to (allocate resources|create step)", lines) or _AWAY in lines:
            return None
        return af.WorkerExit(
            FATAL_STATUS, f"SLURM gave worker {spec.name!r} no place within {self._wait_s} s: {lines}\n{_nodes()}"
        )

    def _needs(self, placement: af.Placement, tasks: int) -> list[str]:
        """Return the options of srun that say what the tasks need."""
        needs = [f"--ntasks={tasks}", "--mpi=none", *self._options]
        if placement.cpus:
            needs.append(f"--cpus-per-task={len(placement.cpus)}")
        if placement.gpus:
            needs.append(f"--gpus-per-task={len(placement.gpus)}")
        if "SLURM_JOB_ID" in os.environ:  # a step; it shares the driver's job
            needs.append("--exact" if placement.cpus or placement.gpus else "--overlap")
        return needs

    def _try(self, placement: af.Placement, tasks: int, patience_s: float) -> None:
        """Raise ConfigError if SLURM could never run these tasks, or does not answer for ``patience_s``."""
        if "SLURM_JOB_ID" in os.environ:  # srun cannot try a step
            return
        command = ["srun", "--test-only", *self._needs(placement, tasks), "true"]
        until = time.monotonic() + patience_s
        while True:
            tried = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
            if not tried.returncode:
                return
            if _AWAY not in tried.stderr or time.monotonic() > until:
                raise af.ConfigError(f"SLURM refuses {' '.join(command[2:-1])}: {tried.stderr.strip()}\n{_nodes()}")
            time.sleep(RETRY_S)


def _option(name: str, value: str | int | bool) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def _nodes() -> str:
    """Describe what the cluster has."""
    listed = subprocess.run(
        ["sinfo", "--format=%P %D %t %c %m %G"], capture_output=True, text=True, timeout=CHECK_S, check=False
    )
    return f"the cluster has:\n{listed.stdout.strip()}"
