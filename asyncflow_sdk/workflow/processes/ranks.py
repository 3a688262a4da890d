"""Ranks: one worker in several processes, a trainer or a stage, started and ended together.

    handle = RankLauncher(launcher, 2).start(spec)    # two processes: if one fails, both end

``join_ranks`` sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each
process, as torchrun does. Under torchrun itself ``own_rank`` reads them. A step, a checkpoint or a resume
counts for all ranks or for none:

    ranks = RankCommunicator(queue, rank=0, world_size=2)
    queue.stream("train", **ranks.shares)                     # this rank's shard of each lease
    payloads = ranks.all_gather("step 7", b"mine")            # of all ranks, once all have called
    with ranks.all_or_none("the checkpoint of step 7"):       # an exception in one rank is raised in all
        engine.save(path)
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from ...errors import ConfigError, DeadlineExceeded, LeaseLost, ServerLost, error_from_name
from ...interfaces import Launcher, Placement, WorkerExit, WorkerHandle, WorkerSpec
from ...ledger import commands as cmd
from ...queue import Connection, QueueClient
from ...queue.stores.homes import this_host
from ...wire import is_loopback, own_address

AFTER_S = 2.0  # after one rank's error the others may take this long to end and to log what they saw (seconds)
GATHER_S = 3600.0  # a rank may arrive this much later than others (seconds). A dead rank ends its group before
RANK_ERRORS = (DeadlineExceeded, LeaseLost, ServerLost)
"""Errors of the barrier itself: the ranks cannot continue together."""


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
    if world_size == 1:
        launcher.check(placement)
        return
    launcher.check_ranks(placement, world_size)
    if placement.launcher == "thread":
        text = f"launcher='thread' starts no ranks: world_size={world_size} needs processes"
        raise ConfigError(f'{text}, which launcher="process" starts, or torchrun')
    taken = sorted({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(placement.env))
    if taken:
        raise ConfigError(f"env= sets {taken[0]}, which is another for each rank: leave it out")
    count, odd = divmod(world_size, len(placement.hosts) or 1)
    if odd:
        raise ConfigError(f"hosts={list(placement.hosts)} for world_size={world_size}: give each host as many ranks")
    ranks = f"{count} ranks of each host" if placement.hosts else f"world_size={world_size}"
    if placement.gpus and len(placement.gpus) != count:
        raise ConfigError(f"gpus={list(placement.gpus)} for {ranks}: give each rank one GPU")
    if len(placement.cpus) % count:
        raise ConfigError(f"cpus={list(placement.cpus)} for {ranks}: give each rank as many")


@dataclass(frozen=True)
class RankExit(WorkerExit):
    """``rank``: the first one that ended with an error."""

    rank: int = 0


class RankLauncher(Launcher):
    """Starts each worker as ``world_size`` ranks, by another launcher."""

    def __init__(self, launcher: Launcher, world_size: int) -> None:
        self._launcher, self.world_size = launcher, world_size

    def check(self, placement: Placement) -> None:
        """Raise ConfigError if the launcher cannot start the ranks."""
        check_ranks(self._launcher, placement, self.world_size)

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start all ranks, or none after an error."""
        specs = rank_specs(spec, self.world_size)
        return RankHandles(dict(zip((each.name for each in specs), self._launcher.start_ranks(specs), strict=True)))


class RankHandles(WorkerHandle):
    """The ranks of one start, by name. One rank's error ends the others, which would wait for it in a collective."""

    def __init__(self, handles: Mapping[str, WorkerHandle]) -> None:
        self._by_name, self._handles = handles, list(handles.values())

    @property
    def pids(self) -> dict[str, int]:
        """The ranks' processes, by name."""
        return {name: handle.pid for name, handle in self._by_name.items()}

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The process of the first rank."""
        return self._handles[0].pid

    @property
    def host(self) -> str:  # type: ignore[override]
        """The host of the first rank."""
        return self._handles[0].host

    def wait(self) -> WorkerExit:
        """Wait for all ranks. ``AFTER_S`` after the first error the others are killed."""
        exits: queue.SimpleQueue[tuple[int, WorkerExit]] = queue.SimpleQueue()

        def _wait(rank: int, handle: WorkerHandle) -> None:
            exits.put((rank, exit_of(handle)))

        for rank, handle in enumerate(self._handles):
            threading.Thread(target=_wait, args=(rank, handle), name=f"rank-{rank}", daemon=True).start()
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


def rank_specs(spec: WorkerSpec, world_size: int) -> list[WorkerSpec]:
    """Return the spec of each rank: its host, its share of the CPUs, all GPUs (its local rank selects
    one), and no restarts of its own."""
    placement, hosts, specs = spec.placement, spec.placement.hosts or ("",), list[WorkerSpec]()
    count = world_size // len(hosts)
    share = len(placement.cpus) // count
    for rank in range(world_size):
        own = replace(placement, cpus=placement.cpus[rank % count * share :][:share], max_restarts=0)
        log, host = spec.log.with_stem(f"{spec.log.stem}-rank-{rank}"), hosts[rank // count]
        ranked = replace(spec, rank=rank, world_size=world_size, host=host, placement=own, log=log)
        specs.append(replace(ranked, name=rank_name(spec.name, rank)))
    return specs


class _RankOutcome(msgspec.Struct, frozen=True):
    error: tuple[str, str] | None = None  # name and text
    payload: bytes = b""

    @classmethod
    def failed(cls, error: Exception) -> _RankOutcome:
        return cls((type(error).__name__, str(error)))


class RankCommunicator:
    """Rank ``rank`` of ``world_size``. ``group``: the name of the ranks in the queue; a single rank
    needs none. Not thread-safe."""

    def __init__(
        self, queue: QueueClient | None = None, group: str = "train", rank: int = 0, world_size: int = 1
    ) -> None:
        self._queue, self.group, self.rank, self.world_size = queue, group, rank, world_size

    @property
    def first(self) -> bool:
        """True for rank 0, which acts and reports for all."""
        return self.rank == 0

    @property
    def shares(self) -> dict[str, Any]:
        """Arguments of a lease that all ranks share."""
        return {"group": self.group, "rank": self.rank, "world_size": self.world_size}

    def all_gather(self, what: str, payload: bytes = b"") -> tuple[bytes, ...]:
        """Wait until every rank has called this for ``what``. Return the payloads by rank. Raises
        DeadlineExceeded with the missing ranks, LeaseLost if another process became this rank."""
        if self._queue is None or self.world_size == 1:
            return (payload,)
        reply: cmd.AllGathered = self._queue.send(
            cmd.AllGather(what=what, payload=payload, timeout_s=GATHER_S, **self.shares)
        )
        return reply.payloads

    @contextlib.contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """Leave this block once every rank has left it. One rank's error is raised in all."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RANK_ERRORS):
                raise
            self._exchange(what, _RankOutcome.failed(error))
            raise
        self._exchange(what, _RankOutcome())

    def by_first(self, what: str, do: Callable[[], bytes]) -> bytes:
        """Call ``do`` in rank 0. Its result is returned, or its error raised, in every rank."""
        outcome = _RankOutcome()
        if self.first:
            try:
                outcome = _RankOutcome(None, do())
            except Exception as error:
                self._exchange(what, _RankOutcome.failed(error))
                raise
        return self._exchange(what, outcome)

    def _exchange(self, what: str, own: _RankOutcome) -> bytes:
        """Return the payload of rank 0. Raises the first error of a rank, unless this one has failed itself."""
        packed = [msgspec.msgpack.encode(own)]
        if self.world_size > 1:
            packed = list(self.all_gather(what, packed[0]))
        found = [msgspec.msgpack.decode(each, type=_RankOutcome) for each in packed]
        for rank, outcome in enumerate(found):
            if outcome.error is not None and own.error is None:
                raise error_from_name(outcome.error[0], f"rank {rank}: {outcome.error[1]}")
        return found[0].payload


class _RankPlace(msgspec.Struct, frozen=True):
    host: str
    address: str
    port: int
    set_by_launcher: bool


def join_ranks(ranks: RankCommunicator, connection: Connection, environment: Mapping[str, str]) -> None:
    """Set the environment of torchrun in this process, one of a worker's ranks, unless torchrun has set it.
    ``environment``: the placement's, which has precedence. Waits for all ranks: the host of rank 0 is known only once
    it runs."""
    if ranks.world_size == 1:
        return
    address = own_address(connection.wire.address, connection.server_addresses)
    set_by_launcher = own_rank() == (ranks.rank, ranks.world_size)
    own = _RankPlace(this_host(), address, free_port(), set_by_launcher)
    found = ranks.all_gather("the addresses of all ranks", msgspec.json.encode(own))
    places = [msgspec.json.decode(each, type=_RankPlace) for each in found]
    if all(place.set_by_launcher for place in places):
        return
    hosts = [place.host for place in places]
    first, alone = places[0], len(set(hosts)) == 1
    if not alone and is_loopback(f"tcp://{first.address}:1"):
        text = f"the ranks of {ranks.group!r} run on {len(set(hosts))} hosts, and rank 0 knows no address of its host"
        hint = "serve the run at an address of the network, as tcp://0.0.0.0:7000"
        raise ConfigError(f"{text} for the others: {hint}")
    given = {"RANK": ranks.rank, "WORLD_SIZE": ranks.world_size, "LOCAL_RANK": hosts[: ranks.rank].count(own.host)}
    given |= {"LOCAL_WORLD_SIZE": hosts.count(own.host), "MASTER_PORT": first.port}
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1" if alone else first.address, **environment})


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
