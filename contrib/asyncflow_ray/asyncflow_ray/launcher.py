"""RayLauncher: a worker is a Ray actor, in a placement group if it needs CPUs or GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import FATAL_STATUS

WAIT_S = float(os.environ.get("ASYNCFLOW_RAY_WAIT_S", "60"))


class _Worker:
    """The actor. After its process dies, Ray runs ``run`` again in the process that replaces it."""

    def where(self) -> tuple[int, str]:
        return os.getpid(), socket.gethostname()

    def run(self, config: bytes) -> tuple[int, str]:
        ending = af.run_worker(config)
        return ending.status, ending.text


class RayLauncher(af.Launcher):
    """Starts actors in the running Ray, or in one that starts with the first worker and ends with
    the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = False

    def check(self, place: af.Placement) -> None:
        if place.python is not None:
            raise af.ConfigError(
                "python= is not for workers of Ray: they run in the environment that Ray was started in"
            )
        if not _needs(place):
            return
        self._begin()
        there = ray.cluster_resources()
        for kind, count in _needs(place).items():
            if there.get(kind, 0) < count:
                raise af.ConfigError(
                    f"{kind.lower()}s= asks for {count} {kind}s for one worker, and this Ray cluster has"
                    f" {there.get(kind, 0):g} in all"
                )

    def start(self, order: af.WorkerSpec) -> af.WorkerHandle:
        self._begin()
        needs, place = _needs(order.placement), order.placement
        group = _reserved(order.name, needs) if needs else None
        try:
            actor = (
                ray.remote(_Worker)
                .options(
                    num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0),
                    max_restarts=place.max_restarts, max_task_retries=place.max_restarts,
                    runtime_env={"env_vars": dict(place.env)} if place.env else None,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group) if group is not None else "DEFAULT",
                )
                .remote()
            )  # fmt: skip
            pid, host = ray.get(actor.where.remote(), timeout=WAIT_S)
        except (RayError, GetTimeoutError) as error:
            _free(group)
            raise af.ConfigError(f"Ray started no worker {order.name!r}: {error}") from None
        return _Actor(actor, group, actor.run.remote(order.config), pid, host)

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


class _Actor(af.WorkerHandle):
    def __init__(self, actor: Any, group: PlacementGroup | None, result: Any, pid: int, host: str) -> None:
        self.pid, self.host = pid, host
        self._actor, self._group, self._result = actor, group, result
        self._stopped = False

    def wait(self) -> af.WorkerExit:
        try:
            status, text = ray.get(self._result)
        except RayActorError as error:  # after all restarts by Ray
            status, text = (0, "") if self._stopped else (FATAL_STATUS, str(error))
        self.kill()
        _free(self._group)
        return af.WorkerExit(status, text)

    def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._stopped = True
        if not ray.is_initialized():  # else Ray would start another cluster to ask
            return
        with contextlib.suppress(RayError, ValueError):  # Ray is gone, or the actor
            ray.kill(self._actor, no_restart=True)


def _needs(place: af.Placement) -> dict[str, int]:
    """Return the numbers of CPUs and GPUs to reserve; Ray chooses which."""
    needs = {"CPU": len(place.cpus), "GPU": len(place.gpus)}
    return {kind: count for kind, count in needs.items() if count}


def _reserved(name: str, needs: dict[str, int]) -> PlacementGroup:
    group = placement_group([{kind: float(count) for kind, count in needs.items()}], strategy="STRICT_PACK")
    try:
        ray.get(group.ready(), timeout=WAIT_S)
    except GetTimeoutError:
        remove_placement_group(group)
        free = {kind: ray.available_resources().get(kind, 0) for kind in needs}
        raise af.ConfigError(
            f"worker {name!r} needs {needs} on one node, and no node had them free in {WAIT_S:g} s; free are {free} in all"
        ) from None
    return group


def _free(group: PlacementGroup | None) -> None:
    if group is not None and ray.is_initialized():
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(group)
