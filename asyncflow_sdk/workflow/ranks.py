"""Ranks: a trainer of several processes, started together and ended together, as one worker.

    handle = Group(launcher, 2).start(order)          # two processes; what happens to one of them happens to both

Each finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, as under torchrun; under
torchrun itself (or another launcher of the field) ``own_rank`` says which of them this process is.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from ..errors import ConfigError
from ..interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from .worker import Rank, WorkerConfig

AFTER_S = 2.0
"""So long the others may take to end by themselves, and to say in their logs what they saw, when one rank has ended with an error."""


def rank_name(worker: str, rank: int) -> str:
    """What a rank of a worker is called: in the queue, by `asyncflow top`, in events and in errors."""
    return f"{worker} rank {rank}"


def own_rank(environment: Mapping[str, str] = os.environ) -> Rank | None:
    """Which rank this process is by its environment, where a launcher of several has started it. Raises ConfigError."""
    given = environment.get("WORLD_SIZE", ""), environment.get("RANK", "")
    if not all(given):
        return None
    try:
        size, rank = map(int, given)
    except ValueError:
        raise ConfigError(f"WORLD_SIZE={given[0]!r} and RANK={given[1]!r} are no numbers") from None
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} is no rank of WORLD_SIZE={size}")
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if size > 1 and lacking:
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={size} needs {lacking[0]} too, where its ranks find each other")
    return Rank(rank, size) if size > 1 else None


def check_ranks(launcher: Launcher, place: Placement, world_size: int) -> None:
    """Raises ConfigError where a launcher cannot start that many ranks in a place."""
    launcher.check(place)
    if world_size == 1:
        return
    if not launcher.ranks:
        raise ConfigError(
            f"launcher={place.launcher!r} starts no ranks: world_size={world_size} needs processes of one host, which"
            ' launcher="process" starts; over several hosts start `asyncflow worker` under torchrun or the like'
        )
    taken = sorted({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(place.env))
    if taken:
        raise ConfigError(f"env= sets {taken[0]}, which is another for each rank: leave it out")
    if place.gpus and len(place.gpus) != world_size:
        raise ConfigError(f"gpus={list(place.gpus)} for world_size={world_size}: give each rank one GPU")
    if len(place.cpus) % world_size:
        raise ConfigError(f"cpus={list(place.cpus)} for world_size={world_size}: give each rank as many")


@dataclass(frozen=True)
class GroupEnding(WorkerExit):
    """``rank``: the one that ended first of those that did not end well."""

    rank: int = 0


class Group(Launcher):
    """Starts each worker as ``world_size`` ranks, by another launcher."""

    ranks = True

    def __init__(self, launcher: Launcher, world_size: int) -> None:
        self._launcher, self.world_size = launcher, world_size

    def check(self, place: Placement) -> None:
        check_ranks(self._launcher, place, self.world_size)

    def start(self, order: WorkerSpec) -> WorkerHandle:
        handles: dict[str, WorkerHandle] = {}
        try:
            for each in rank_orders(order, self.world_size):
                handles[each.name] = self._launcher.start(each)
        except BaseException:
            for handle in handles.values():
                handle.kill()
                handle.wait()
            raise
        return Together(handles)


class Together(WorkerHandle):
    """The ranks of one start. When one ends with an error the others are ended, whatever they do: they would wait for it in a
    collective. ``pids``: by the name of each rank."""

    def __init__(self, handles: Mapping[str, WorkerHandle]) -> None:
        self._handles = list(handles.values())
        self.pids = {name: handle.pid for name, handle in handles.items()}
        self.pid, self.host = self._handles[0].pid, self._handles[0].host

    def wait(self) -> WorkerExit:
        ended: queue.SimpleQueue[tuple[int, WorkerExit]] = queue.SimpleQueue()

        def see(rank: int, handle: WorkerHandle) -> None:
            try:
                ending = handle.wait()
            except Exception as error:
                ending = WorkerExit(1, f"its launcher lost it: {type(error).__name__}: {error}")
            ended.put((rank, ending))

        for rank, handle in enumerate(self._handles):
            threading.Thread(target=see, args=(rank, handle), name=f"rank-{rank}", daemon=True).start()
        left, first, until = set(range(len(self._handles))), None, math.inf
        while left:
            try:
                rank, ending = ended.get(timeout=max(until - time.monotonic(), 0.0) if until < math.inf else None)
            except queue.Empty:  # they have had their time
                for rank in left:
                    self._handles[rank].kill()
                until = math.inf
                continue
            left.discard(rank)
            if ending.status and first is None:
                first, until = GroupEnding(ending.status, ending.text, rank), time.monotonic() + AFTER_S
        return first or WorkerExit(0)

    def stop(self) -> None:
        for handle in self._handles:
            handle.stop()

    def kill(self) -> None:
        for handle in self._handles:
            handle.kill()


def rank_orders(order: WorkerSpec, world_size: int) -> list[WorkerSpec]:
    """What starts each rank: its part of the CPUs, all of the GPUs, of which its local rank says which is its own, and where the
    ranks find each other. None is started again by itself."""
    config, place = msgspec.json.decode(order.config, type=WorkerConfig), order.placement
    share = len(place.cpus) // world_size
    port, orders = _free_port(), []
    for rank in range(world_size):
        name = rank_name(order.name, rank)
        environment = {
            "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        }  # fmt: skip
        own = msgspec.structs.replace(config, name=name, rank=Rank(rank, world_size))
        orders.append(
            WorkerSpec(
                name=name, config=msgspec.json.encode(own), log=order.log.with_stem(f"{order.log.stem}-rank-{rank}"),
                placement=replace(
                    place, cpus=place.cpus[rank * share :][:share], env={**environment, **place.env}, max_restarts=0
                ),
            )
        )  # fmt: skip
    return orders


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
