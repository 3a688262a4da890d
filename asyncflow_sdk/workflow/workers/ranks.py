"""Ranks: one worker in several processes, a trainer or a stage, started and ended together.

    handle = RankLauncher(launcher, 2).start(spec)    # two processes: if one fails, both end

Each process finds RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun. Under torchrun itself ``own_rank`` reads them.
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
from functools import partial
from typing import NamedTuple

from ...errors import ConfigError
from ...interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec

AFTER_S = 2.0
"""After one rank's error the others may take this long to end and to log what they saw (seconds)."""


class RankId(NamedTuple):
    """The number of one process of a worker."""

    rank: int
    world_size: int


def rank_name(worker: str, rank: int) -> str:
    """Return the name of a worker's rank, as in the queue, events and errors."""
    return f"{worker} rank {rank}"


def own_rank(environment: Mapping[str, str] = os.environ) -> RankId | None:
    """Return this process's rank as set by a launcher of several; None without one. Raises ConfigError."""
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
    return RankId(rank, size) if size > 1 else None


def check_ranks(launcher: Launcher, placement: Placement, world_size: int) -> None:
    """Raise ConfigError if a launcher cannot start this number of ranks in a placement."""
    launcher.check(placement)
    if world_size == 1:
        return
    if not launcher.ranks:
        raise ConfigError(
            f"launcher={placement.launcher!r} starts no ranks: world_size={world_size} needs processes of one"
            " host, which"
            ' launcher="process" starts; over several hosts start `asyncflow worker` under torchrun or the like'
        )
    taken = sorted({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(placement.env))
    if taken:
        raise ConfigError(f"env= sets {taken[0]}, which is another for each rank: leave it out")
    if placement.gpus and len(placement.gpus) != world_size:
        raise ConfigError(f"gpus={list(placement.gpus)} for world_size={world_size}: give each rank one GPU")
    if len(placement.cpus) % world_size:
        raise ConfigError(f"cpus={list(placement.cpus)} for world_size={world_size}: give each rank as many")


@dataclass(frozen=True)
class RankExit(WorkerExit):
    """``rank``: the first one that ended with an error."""

    rank: int = 0


class RankLauncher(Launcher):
    """Starts each worker as ``world_size`` ranks, by another launcher."""

    ranks = True

    def __init__(self, launcher: Launcher, world_size: int) -> None:
        self._launcher, self.world_size = launcher, world_size

    def check(self, placement: Placement) -> None:
        """Raise ConfigError if the launcher cannot start the ranks."""
        check_ranks(self._launcher, placement, self.world_size)

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start all ranks, or none after an error."""
        handles: dict[str, WorkerHandle] = {}
        try:
            for each in rank_specs(spec, self.world_size):
                handles[each.name] = self._launcher.start(each)
        except BaseException:
            for handle in handles.values():
                handle.kill()
                handle.wait()
            raise
        return RankHandles(handles)


class RankHandles(WorkerHandle):
    """The ranks of one start. One rank's error ends the others, which would wait for it in a
    collective. ``pids``: by name of the rank."""

    def __init__(self, handles: Mapping[str, WorkerHandle]) -> None:
        self._handles = list(handles.values())
        self.pids = {name: handle.pid for name, handle in handles.items()}
        self.pid, self.host = self._handles[0].pid, self._handles[0].host

    def wait(self) -> WorkerExit:
        """Wait for all ranks. ``AFTER_S`` after the first error the others are killed."""
        exits: queue.SimpleQueue[tuple[int, WorkerExit]] = queue.SimpleQueue()

        for rank, handle in enumerate(self._handles):
            wait = partial(_put_exit, exits, rank, handle)
            threading.Thread(target=wait, name=f"rank-{rank}", daemon=True).start()
        left, first, until = set(range(len(self._handles))), None, math.inf
        while left:
            try:
                rank, ending = exits.get(timeout=max(until - time.monotonic(), 0.0) if until < math.inf else None)
            except queue.Empty:
                for rank in left:
                    self._handles[rank].kill()
                until = math.inf
                continue
            left.discard(rank)
            if ending.status and first is None:
                first, until = RankExit(ending.status, ending.text, rank), time.monotonic() + AFTER_S
        return first or WorkerExit(0)

    def stop(self) -> None:
        """Stop all ranks."""
        for handle in self._handles:
            handle.stop()

    def kill(self) -> None:
        """Kill all ranks."""
        for handle in self._handles:
            handle.kill()


def exit_of(handle: WorkerHandle) -> WorkerExit:
    """Wait for a worker. An exception of its launcher becomes an exit with an error."""
    try:
        return handle.wait()
    except Exception as error:
        return WorkerExit(1, f"its launcher lost it: {type(error).__name__}: {error}")


def _put_exit(exits: queue.SimpleQueue[tuple[int, WorkerExit]], rank: int, handle: WorkerHandle) -> None:
    exits.put((rank, exit_of(handle)))


def rank_specs(spec: WorkerSpec, world_size: int) -> list[WorkerSpec]:
    """Return the spec of each rank: its share of the CPUs, all GPUs (its local rank selects one), the
    address of the ranks' rendezvous, and no restarts of its own."""
    placement, port = spec.placement, free_port()
    share = len(placement.cpus) // world_size
    specs = []
    for rank in range(world_size):
        environment = {
            "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_WORLD_SIZE": f"{world_size}",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
        }  # fmt: skip
        own = replace(
            placement,
            cpus=placement.cpus[rank * share :][:share],
            env={**environment, **placement.env},
            max_restarts=0,
        )
        log = spec.log.with_stem(f"{spec.log.stem}-rank-{rank}")
        name = rank_name(spec.name, rank)
        specs.append(replace(spec, name=name, rank=rank, world_size=world_size, placement=own, log=log))
    return specs


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
