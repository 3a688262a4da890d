"""What every launcher of a cluster promises, as tests on a cluster of two nodes with two CPUs each. Subclass it:

class TestMine(ClusterContract):
    launcher = "mine"
    @pytest.fixture
    def cluster(self): ...                # a Nodes
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest
from processes import alive
from rank_runs import restarted, run_with_a_rank_killed_in_a_collective
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing.kit.functions import where
from asyncflow_sdk.types.events import Event
from asyncflow_torch.reference import tiny_model

ADDRESS = "tcp://127.0.0.1:0"
LIMIT_S = 240.0
DRIVER = """
import sys, time, asyncflow_sdk as af
from asyncflow_sdk.testing.kit.functions import where
run = af.serve(sys.argv[1], address="tcp://127.0.0.1:0")
run.start(af.Stage(where, task="w", needs=["x"], gives=["pid"], launcher=sys.argv[2], cpus=[0]))
run.queue.declare("end", needs=["pid"])
run.queue.put({"x": [1.0]})
print(int(run.queue.get("end", 1, timeout_s=200)["pid"][0]), flush=True)
time.sleep(600)
"""


class Nodes(Protocol):
    """``variables``: of the environment of a driver."""

    variables: dict[str, str]

    def idle(self) -> bool:
        """True if the cluster holds nothing for any run."""

    def lose_node(self, worker: af.Worker) -> None:
        """End the node of a worker at once."""


class ClusterContract:
    launcher = ""

    def stage(self, **place: Any) -> af.Stage:
        place = {"launcher": self.launcher, "cpus": [0]} | place
        return af.Stage(where, task="w", needs=["x"], gives=["pid"], batch=1, **place)

    def answers(self, run: af.Run) -> set[int]:
        """The processes that work on three rows."""
        run.queue.declare("end", needs=["pid"])
        run.queue.put({"x": [0.0, 1.0, 2.0]})
        with run.queue.get("end", 3, at_least=3, timeout_s=LIMIT_S) as batch:
            batch.ack()
            return set(batch["pid"].tolist())

    def test_a_whole_run_with_real_engines_goes_on_after_a_killed_rank(self, cluster: Nodes, tmp_path: Path) -> None:
        model = tiny_model(tmp_path / "tiny", ends=True, max_position_embeddings=128)

        run_with_a_rank_killed_in_a_collective(
            "fsdp", model, tmp_path, rollouts={"launcher": self.launcher, "replicas": 2, "cpus": [0]}, address=ADDRESS,
            launcher=self.launcher, cpus=[0, 1],
        )  # fmt: skip

        until(cluster.idle, "the return of all CPUs", LIMIT_S)

    def test_a_worker_whose_process_or_node_dies_is_started_again(self, cluster: Nodes, tmp_path: Path) -> None:
        events: list[Event] = []
        with af.serve(tmp_path / "run", address=ADDRESS, on_event=events.append) as run:
            (worker,) = run.start(self.stage())
            (first,) = self.answers(run)

            os.kill(first, signal.SIGKILL)
            until(lambda: len(restarted(events)) == 1, "the restart of a process", LIMIT_S)
            (second,) = self.answers(run)
            cluster.lose_node(worker)
            until(lambda: len(restarted(events)) == 2, "the restart on another node", LIMIT_S)
            (third,) = self.answers(run)

            assert len({first, second, third}) == 3
            assert "was killed by SIGKILL" in restarted(events)[0].detail
            assert not worker.lost
        until(cluster.idle, "the end of all jobs", LIMIT_S)

    def test_two_runs_share_the_cluster_and_what_it_cannot_hold_is_refused(
        self, cluster: Nodes, tmp_path: Path
    ) -> None:
        with af.serve(tmp_path / "a", address=ADDRESS) as one, af.serve(tmp_path / "b", address=ADDRESS) as other:
            with pytest.raises(af.ConfigError, match=r"(?s)3.*ha(s|ve)"):
                one.start(self.stage(cpus=[0, 1, 2]))
            with pytest.raises(af.ConfigError, match=r"(?s)5.*ha(s|ve)"):
                one.start(af.Train("echo-ranks", world_size=5, launcher=self.launcher, cpus=[*range(5)]))
            (four,) = one.start(af.Train("echo-ranks", world_size=4, launcher=self.launcher, cpus=[*range(4)]))
            until(lambda: all(four.pids.values()), "a place for one rank on each CPU", LIMIT_S)
            four.kill()
            until(four.ended.is_set, "the end of all ranks", LIMIT_S)
            for run in (one, other):
                run.start(self.stage(cpus=[0, 1]))

            assert len(self.answers(one) | self.answers(other)) == 2
        until(cluster.idle, "the end of both", LIMIT_S)

    def test_workers_end_with_a_driver_that_is_killed(self, cluster: Nodes, tmp_path: Path) -> None:
        command = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), self.launcher]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **cluster.variables}
        ) as driver:
            assert driver.stdout is not None
            pid = int(driver.stdout.readline())
            assert alive(pid)

            driver.kill()

            until(lambda: not alive(pid), "the worker's end", LIMIT_S)
        until(cluster.idle, "the end of its job", LIMIT_S)
