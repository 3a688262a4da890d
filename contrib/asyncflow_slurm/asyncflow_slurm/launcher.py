"""SlurmLauncher: a worker is a job, submitted by srun; its ranks are the job's tasks.

If the driver runs in a job itself, a worker is a step of this job. srun stays with the driver: it
carries the spec, the log and the worker's end, and ends the job if the driver ends.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import FATAL_STATUS, Placement, WorkerExit, WorkerHandle, WorkerSpec
from asyncflow_sdk.workflow import CommandLauncher

CHECK_S = 120.0
"""Longest wait for an answer of SLURM's commands, which try for a while if slurmctld is away."""
RETRY_S = 1.0
_AWAY = "Unable to contact slurm controller"


class SlurmLauncher(CommandLauncher):
    """Starts jobs, or steps of the driver's job. ``options``: of srun, as ``partition="gpu"``,
    ``time="8:00:00"``, ``mem_per_cpu="4G"``; True: one without a value. ``wait_s``: longest wait for
    a place (seconds)."""

    answer_s = math.inf  # srun waits for a place, as long as wait_s
    kill_signal = signal.SIGTERM  # srun then ends the job, too

    def __init__(self, *, wait_s: int = 3600, **options: str | int | bool) -> None:
        self._wait_s = wait_s
        self._options = [_option(name, value) for name, value in options.items()]
        self._accepted: set[tuple[str, ...]] = set()
        self._mark = f"asyncflow-{secrets.token_hex(4)}"
        self._names: set[str] = set()

    def check(self, placement: Placement) -> None:
        self.check_ranks(placement, 1)

    def check_ranks(self, placement: Placement, world_size: int) -> None:
        if placement.hosts:
            raise af.ConfigError(
                "SLURM chooses the hosts: instead of hosts= say launcher_options={'nodelist': 'n1,n2'}"
            )
        if shutil.which("srun") is None:
            raise af.ConfigError("this host has no srun: start the run on a login node of the SLURM cluster")
        self._try(self._needs(len(placement.cpus) // world_size, len(placement.gpus) // world_size, world_size))

    def command(self, spec: WorkerSpec) -> Sequence[str]:
        return self._command([spec])

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        return self.start_ranks([spec])[0]

    def start_ranks(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerHandle]:
        self._try(self._needs_of(specs))
        name = self._name(specs[0])
        if name in self._names:
            self._cancel(name)
        self._names.add(name)
        own = replace(specs[0].placement, cpus=(), gpus=())  # SLURM chooses which
        return self.start_together([replace(spec, placement=own) for spec in specs], self._command(specs))

    def _command(self, specs: Sequence[WorkerSpec]) -> list[str]:
        first, tasks = specs[0], len(specs)
        command = ["srun", f"--job-name={self._name(first)}", f"--immediate={self._wait_s}"]
        command += ["--kill-on-bad-exit=1", *self._needs_of(specs)]
        if tasks == 1:
            return [*command, *self.far_command(first)]
        log = str(first.log.with_stem(first.log.stem.removesuffix("0"))).replace("%", "%%")
        stem, dot, suffix = log.rpartition(".")
        logs = [f"--error={stem}%t{dot}{suffix}", "--open-mode=append"]
        return [*command, *logs, *self.far_command(first), "SLURM_PROCID"]

    def explain(self, spec: WorkerSpec, status: int, lines: str) -> WorkerExit | None:
        if not re.search("Unable to (allocate resources|create step)", lines) or _AWAY in lines:
            return None
        return WorkerExit(
            FATAL_STATUS, f"SLURM gave worker {spec.name!r} no place within {self._wait_s} s: {lines}\n{_nodes()}"
        )

    def close(self) -> None:
        if self._names and not self._cancel(",".join(self._names)):
            text = f"SLURM gives no answer: end jobs that may be left by: scancel --name {self._mark}-..."
            warnings.warn(text, stacklevel=2)

    def _name(self, spec: WorkerSpec) -> str:
        return f"{self._mark}-{spec.name.replace(' ', '-')}"

    def _cancel(self, names: str) -> bool:
        """Cancel jobs that outlived their srun: it cannot end its job while slurmctld is away. Return False
        without an answer."""
        found = subprocess.run(
            ["squeue", "--noheader", "--format=%i", f"--name={names}"], capture_output=True, text=True, check=False
        )
        if found.stdout.split():
            subprocess.run(["scancel", *found.stdout.split()], capture_output=True, check=False)
        return not found.returncode

    def _needs_of(self, specs: Sequence[WorkerSpec]) -> tuple[str, ...]:
        place = specs[0].placement  # a rank has its CPUs, and sees all GPUs
        return self._needs(len(place.cpus), len(place.gpus) // len(specs), len(specs))

    def _needs(self, cpus: int, gpus: int, tasks: int) -> tuple[str, ...]:
        """Return the options of srun that say what tasks need. ``cpus``, ``gpus``: of each."""
        needs = [f"--ntasks={tasks}", "--mpi=none", *self._options]
        if cpus:
            needs.append(f"--cpus-per-task={cpus}")
        if gpus:
            needs.append(f"--gpus-per-task={gpus}")
        if "SLURM_JOB_ID" in os.environ:  # a step; it shares the driver's job
            needs.append("--exact" if cpus or gpus else "--overlap")
        return tuple(needs)

    def _try(self, needs: tuple[str, ...]) -> None:
        """Raise ConfigError if SLURM could never run these tasks. What it accepted once is only waited
        for: slurmctld may be away, and refuses all until its nodes have registered again."""
        if "SLURM_JOB_ID" in os.environ:  # srun cannot try a step
            return
        until = time.monotonic() + self._wait_s
        while True:
            command = ["srun", "--test-only", *needs, "true"]
            tried = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
            if not tried.returncode:
                self._accepted.add(needs)
                return
            if needs not in self._accepted or time.monotonic() > until:
                raise af.ConfigError(f"SLURM refuses {' '.join(needs)}: {tried.stderr.strip()}\n{_nodes()}")
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
