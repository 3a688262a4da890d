"""RayLauncher: an actor for each worker, or for each of its ranks, runs it as its child process.

The actor holds the reservation and ends with its driver. The child has its own interpreter and log.
The SDK restarts a worker: by a new actor, on any node with room.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from asyncflow_sdk.plugins import registry

WAIT_S = float(os.environ.get("ASYNCFLOW_RAY_WAIT_S", "60"))
KILL_S = 1.0
"""Ray kills an actor that has not killed its child after this (seconds)."""


class _Agent:
    """The actor."""

    def start(self, config: bytes) -> tuple[int, str]:
        spec = WorkerSpec.decoded(config)
        own = replace(spec.placement, launcher="process", cpus=(), gpus=())  # Ray has chosen which
        launcher: Launcher = registry().get("launcher", "process").load()()
        self._child = launcher.start(replace(spec, placement=own))
        return self._child.pid, self._child.host

    def wait(self) -> tuple[int, str]:
        ending = self._child.wait()
        return ending.status, ending.text

    def stop(self) -> None:
        self._child.stop()

    def kill(self) -> None:
        self._child.kill()


class RayLauncher(Launcher):
    """Starts actors in the running Ray, or in one that starts with the first worker and ends with
    the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = False

    def check(self, placement: Placement) -> None:
        self.check_ranks(placement, 1)

    def check_ranks(self, placement: Placement, world_size: int) -> None:
        if placement.hosts:
            raise af.ConfigError("Ray chooses the nodes: leave hosts= out")
        needs = _needs(len(placement.cpus) // world_size, len(placement.gpus) // world_size)
        if needs:
            self._begin()
            if sum(_room(needs, node) for node in _nodes()) < world_size:
                raise af.ConfigError(
                    f"this Ray cluster has no place for {world_size} x {_text(needs)}: {_nodes_text()}"
                )

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        return self.start_ranks([spec])[0]

    def start_ranks(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerHandle]:
        self._begin()
        name, place = specs[0].name, specs[0].placement
        needs = _needs(len(place.cpus), len(place.gpus) // len(specs))  # a rank has its CPUs, and sees all GPUs
        reserved = _Reservation(name, needs, len(specs))
        agents: list[Any] = []
        try:
            for bundle in range(len(specs)):
                agent: Any = ray.remote(_Agent).options(
                    num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), max_concurrency=4,
                    scheduling_strategy=reserved.strategy(bundle),
                )  # fmt: skip
                agents.append(agent.remote())
            began = [agent.start.remote(spec.config) for agent, spec in zip(agents, specs, strict=True)]
            places = ray.get(began, timeout=WAIT_S)
        except (RayError, GetTimeoutError) as error:
            for agent in agents:
                _end(agent)
            for _ in specs:
                reserved.give_back()
            if isinstance(error, RayTaskError) and isinstance(error.cause, af.AsyncFlowError):
                raise error.cause from None
            raise af.ConfigError(f"Ray started no worker {name!r} within {WAIT_S:g} s: {error}") from None
        return [_Actor(agent, reserved, *place) for agent, place in zip(agents, places, strict=True)]

    def close(self) -> None:
        with self._lock:
            own, self._own = self._own, False
            if own:
                ray.shutdown()

    def _begin(self) -> None:
        with self._lock:
            if not ray.is_initialized():
                ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
                self._own = True


class _Actor(WorkerHandle):
    def __init__(self, agent: Any, reserved: _Reservation, pid: int, host: str) -> None:
        self._agent, self._reserved, self.pid, self.host = agent, reserved, pid, host
        self._ending = agent.wait.remote()
        self._killed = False

    def wait(self) -> WorkerExit:
        try:
            status, text = ray.get(self._ending)
        except RayError as error:
            status, text = (0, "") if self._killed else (1, f"its Ray actor is lost: {error}")
        _end(self._agent)
        self._reserved.give_back()
        return WorkerExit(status, text)

    def stop(self) -> None:
        if ray.is_initialized():  # else Ray would start another cluster to ask
            self._agent.stop.remote()

    def kill(self) -> None:
        self._killed = True
        if ray.is_initialized():
            ray.wait([self._agent.kill.remote()], timeout=KILL_S)
            _end(self._agent)


class _Reservation:
    """A placement group with one bundle for each rank, if they need CPUs or GPUs. Waits for it."""

    def __init__(self, name: str, needs: Mapping[str, int], ranks: int) -> None:
        self._held = ranks
        self._lock = threading.Lock()
        self._group: PlacementGroup | None = None
        if not needs:
            return
        self._group = placement_group([dict(needs)] * ranks, strategy="PACK")
        if not self._group.wait(WAIT_S):
            remove_placement_group(self._group)
            free = {kind: int(ray.available_resources().get(kind, 0)) for kind in needs}
            raise af.ConfigError(
                f"worker {name!r} got no place in Ray within {WAIT_S:g} s: it needs {_text(needs)} on one node"
                + f" for each of {ranks} ranks" * (ranks > 1)
                + f"; {_nodes_text()}; free are {_text(free)} in all. ASYNCFLOW_RAY_WAIT_S sets another limit"
            )

    def strategy(self, bundle: int) -> Any:
        return "SPREAD" if self._group is None else PlacementGroupSchedulingStrategy(self._group, bundle)

    def give_back(self) -> None:
        """Called once for each rank."""
        with self._lock:
            self._held -= 1
        if not self._held and self._group is not None and ray.is_initialized():
            with contextlib.suppress(RayError, ValueError):
                remove_placement_group(self._group)


def _end(agent: Any) -> None:
    if ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):  # Ray is gone, or the actor
            ray.kill(agent)


def _needs(cpus: int, gpus: int) -> dict[str, int]:
    """Return the numbers to reserve for a rank; Ray chooses which."""
    return {kind: count for kind, count in (("CPU", cpus), ("GPU", gpus)) if count}


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _room(needs: Mapping[str, int], node: Mapping[str, Any]) -> int:
    """Return the number of ranks that an empty node can hold."""
    return min(int(node["Resources"].get(kind, 0) // count) for kind, count in needs.items())


def _text(counts: Mapping[str, float]) -> str:
    return " and ".join(f"{count:g} {kind}s" for kind, count in counts.items())


def _nodes_text() -> str:
    """Describe the cluster's nodes."""
    had = [{kind: node["Resources"].get(kind, 0) for kind in ("CPU", "GPU")} for node in _nodes()]
    return "its nodes have " + ", ".join(map(_text, had))
