"""Workers as jobs of a real SLURM of two nodes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_contract import ADDRESS, DRIVER, ClusterContract
from processes import alive
from rank_runs import restarted
from slurm_cluster import SlurmCluster
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import WorkerFailed
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types.events import Event

kit = Conformance("launcher", "slurm")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm: SlurmCluster) -> SlurmCluster:
    slurm.undrain()
    return slurm


@kit.parametrize
def test_contract(cluster: SlurmCluster, check: Any) -> None:
    check()


class TestSlurm(ClusterContract):
    launcher = "slurm"

    @pytest.mark.starts("launcher slurm")
    def test_a_controller_that_is_away_costs_no_worker(self, cluster: SlurmCluster, tmp_path: Path) -> None:
        events: list[Event] = []
        with af.serve(tmp_path / "run", address=ADDRESS, on_event=events.append) as run:
            run.start(self.stage())
            first, jobs = self.answers(run), cluster.jobs()
            cluster.save_state()

            cluster.kill("slurmctld")
            assert self.answers(run) == first
            cluster.start_controller()

            assert self.answers(run) == first
            assert cluster.jobs() == jobs
            assert not restarted(events)
            # a worker that dies meanwhile is started once it is back; srun could not end the job
            cluster.kill("slurmctld")
            os.kill(*first, signal.SIGKILL)
            until(lambda: restarted(events), "the death of the worker")
            cluster.start_controller()
            assert self.answers(run) != first
            assert len(restarted(events)) == 1
        until(cluster.idle, "the end of all jobs")

    def test_a_job_is_submitted_again_if_it_is_preempted_and_not_if_it_gets_no_place(
        self, cluster: SlurmCluster, tmp_path: Path
    ) -> None:
        events: list[Event] = []
        with af.serve(tmp_path / "run", address=ADDRESS, on_event=events.append) as run:
            (worker,) = run.start(self.stage(cpus=[0, 1]))
            first = self.answers(run)
            cluster.call("srun", "--partition=urgent", "--nodes=2", "--ntasks=4", "true")
            until(lambda: restarted(events), "its restart")
            assert self.answers(run) != first
            run.start(self.stage(cpus=[0, 1]))
            (late,) = run.start(self.stage(cpus=[0], launcher_options={"wait_s": 1}))
            with pytest.raises(WorkerFailed, match=r"(?s)no place within 1 s.*PARTITION"):
                run.wait(late)
            assert not worker.lost

    @pytest.mark.starts("launcher slurm")
    def test_a_run_within_a_job_uses_its_nodes_and_ends_with_it(self, cluster: SlurmCluster, tmp_path: Path) -> None:
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), self.launcher]
        (tmp_path / "job.sh").write_text(f"#!/bin/sh\nexec {shlex.join(command)}\n")
        out = tmp_path / "out"
        cluster.call("sbatch", "--ntasks=2", "--nodes=2", f"--output={out}", str(tmp_path / "job.sh"))

        until(lambda: out.exists() and out.read_text().strip().isdigit(), "the answer of its worker")
        (job,) = cluster.jobs()
        pid = int(out.read_text())
        assert alive(pid)
        cluster.call("scancel", job.split()[0])

        until(lambda: not alive(pid), "the worker's end")

    def test_no_process_shows_the_key(self, cluster: SlurmCluster, tmp_path: Path) -> None:
        with af.serve(tmp_path / "run", address=ADDRESS) as run:
            run.start(self.stage())
            (pid,) = self.answers(run)
            secret = json.loads((tmp_path / "run" / "run.key").read_text())["secret"].encode()
            shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
            shown.append(Path(f"/proc/{pid}/environ").read_bytes())
            shown.append(cluster.call("scontrol", "show", "job", "-dd").encode())
            assert not [each for each in shown if secret in each]
