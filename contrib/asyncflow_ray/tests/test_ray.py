"""Workers as actors of a real Ray of two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from two_raylets import RayCluster  # isort: skip - sets the environment of Ray
import asyncflow_ray.launcher
from cluster_contract import ADDRESS, ClusterContract

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance

kit = Conformance("launcher", "ray")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with RayCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(ray_cluster: RayCluster) -> RayCluster:
    ray_cluster.restore()
    return ray_cluster


@kit.parametrize
def test_contract(cluster: RayCluster, check: Any) -> None:
    check()


class TestRay(ClusterContract):
    launcher = "ray"

    @pytest.mark.starts("launcher ray")
    def test_a_worker_without_a_place_and_one_of_another_interpreter(
        self, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        python = tmp_path / "python"  # as of another environment
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" 3</dev/null\n')
        python.chmod(0o755)
        with af.serve(tmp_path / "run", address=ADDRESS) as run:
            run.start(self.stage(cpus=[0, 1], python=str(python)))
            (pid,) = self.answers(run)
            assert os.readlink(f"/proc/{pid}/fd/3") == "/dev/null"
            run.start(self.stage(cpus=[0, 1]))
            monkeypatch.setattr(asyncflow_ray.launcher, "WAIT_S", 0.1)
            with pytest.raises(
                af.ConfigError, match=r"needs 2 CPUs on one node; its nodes have .*2 CPUs.*; free are 0"
            ):
                run.start(self.stage(cpus=[0, 1]))
            monkeypatch.undo()
            with pytest.raises(af.ConfigError, match=r"^worker 'w-3': cannot start '/nowhere/python'"):
                run.start(self.stage(cpus=[], python="/nowhere/python"))


def test_a_ray_that_a_run_started_ends_with_it_for_good(tmp_path: Path) -> None:
    code = (
        "import sys, ray, asyncflow_sdk as af\n"
        "with af.serve(sys.argv[1]) as run:\n"
        "    run.start(af.Rollout('echo', prompt='prompt_ids', launcher='ray'))\n"
        "    print(ray.is_initialized())\n"
        "    run.finish()\n"  # as a workflow does, before it closes its run
        "print(ray.is_initialized())\n"
    )
    env = {**os.environ, "RAY_ADDRESS": "local"}  # no other that runs on this machine
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, env=env, check=False
    )

    said = [line for line in done.stdout.splitlines() if line in ("True", "False")]  # Ray prints there, too
    assert said == ["True", "False"], done.stdout + done.stderr
