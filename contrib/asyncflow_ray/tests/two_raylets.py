"""A Ray of a head and two nodes with two CPUs each, on this machine. The test is connected to it."""

from __future__ import annotations

import os
from pathlib import Path

# Of the processes that start below. Workers of Ray have the lowest priority else, and get nothing on a busy machine.
os.environ.update(
    RAY_worker_niceness="0", RAY_enable_worker_prestart="false", RAY_prestart_worker_first_driver="false",
    ASYNCFLOW_RAY_WAIT_S="200",
)  # fmt: skip

import ray
from ray.cluster_utils import Cluster

import asyncflow_sdk as af


class RayCluster:
    def __init__(self) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self.variables = {"RAY_ADDRESS": self._cluster.address}

    def __enter__(self) -> RayCluster:
        self.restore()
        ray.init(self._cluster.address, log_to_driver=False, configure_logging=False)
        return self

    def __exit__(self, *exc: object) -> None:
        ray.shutdown()
        self._cluster.shutdown()

    def restore(self) -> None:
        """Add the nodes that were lost."""
        while len(self._cluster.worker_nodes) < 2:
            self._cluster.add_node(num_cpus=2)

    def idle(self) -> bool:
        return ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU")

    def lose_node(self, worker: af.Worker) -> None:
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self._cluster.worker_nodes}
        pid = worker.pid
        while pid not in raylets:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        self._cluster.remove_node(raylets[pid], allow_graceful=False)
