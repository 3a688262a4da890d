"""WorkerPool: the workers started by this process for a run."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from ...errors import AsyncFlowError, ConfigError, ServerLost, WorkerFailed
from ...interfaces import Launcher, OnFailure, WorkerSettings, WorkerSpec
from ...ledger import commands as cmd
from ...plugins import plugin_variables
from ...queue import QueueClient
from ...types import Event
from ...types import events as ev
from ...types.validation import check_least
from ..events.waits import Changes
from ..run_directory import own_path
from ..serialization import to_json
from ..specs import Rollout, Stage, Train
from .launchers import Launchers, reaches_hosts
from .logs import LogFolder
from .ranks import RankId, RankLauncher, rank_name
from .supervisor import GRACE_S, Worker, WorkerObserver
from .thread_launcher import ThreadLauncher

Role = Rollout | Stage | Train


class Endpoint(NamedTuple):
    """How a worker connects to the run: the first fields of a WorkerSpec with these names."""

    address: str
    insecure: bool = False


@dataclass
class _Replicas:
    """The workers of one role, the oldest first."""

    role: Role
    settings: WorkerSettings
    launcher: Launcher
    rank: RankId | None = None
    workers: list[Worker] = field(default_factory=list)

    @property
    def staying(self) -> list[Worker]:
        """Running workers, without dismissed ones."""
        return [worker for worker in self.workers if not (worker.ended.is_set() or worker.leaving)]

    @property
    def next_host(self) -> str:
        """The host with the fewest running workers; "" without hosts."""
        running = [worker.spec.host for worker in self.staying]
        return min(self.role.place.hosts, key=running.count, default="")


class WorkerPool(WorkerObserver):
    """Starts, scales and stops workers.

    ``near``: the run, for workers on this host; ``far``: for those that may be on others. ``mark``:
    part of their names, unique to this process. ``fail``: ends the run with an error. Thread-safe.
    """

    def __init__(
        self, queue: QueueClient, near: Endpoint, far: Endpoint, mark: str, logs: LogFolder,
        fail: Callable[[BaseException], None], on_failure: OnFailure = "stop",
    ) -> None:  # fmt: skip
        self._queue, self._near, self._far, self._mark, self._logs, self._fail = queue, near, far, mark, logs, fail
        self._connection = queue.connection
        self._on_failure = on_failure
        self._started: list[_Replicas] = []
        self._counts: dict[str, int] = {}
        self._launchers = Launchers()
        self._lock = threading.RLock()
        self._closed = False
        self.changed = Changes()
        """Notified when a worker ends or the run fails."""

    @property
    def workers(self) -> list[Worker]:
        """All workers started so far, by role."""
        with self._lock:
            return [worker for replicas in self._started for worker in replicas.workers]

    def start(self, role: Role, settings: WorkerSettings, rank: RankId | None = None) -> list[Worker]:
        """Start the workers of a role: all ranks of each, or only ``rank`` if another launcher starts
        the others. Raises ConfigError; then none runs."""
        launcher = self._launcher_of(role)
        if not isinstance(role, Rollout) and rank is None and role.world_size > 1:
            launcher = RankLauncher(launcher, role.world_size)
        launcher.check(role.place)
        replicas = _Replicas(role, settings, launcher, rank)
        if not self._mark:
            self._end_earlier(role.task)
        with self._lock:
            try:
                for _ in range(1 if isinstance(role, Train) else role.replicas):
                    self._add(replicas)
            except BaseException:
                _end(replicas.workers)
                raise
            self._started.append(replicas)
        return list(replicas.workers)

    def scale(self, which: Role | str, count: int, grace_s: float) -> list[Worker]:
        """Start or dismiss workers of a role until ``count`` stay; see ``Run.scale``."""
        with self._lock:
            replicas = self._replicas_of(which)
            if isinstance(replicas.role, Train):
                raise ConfigError("a trainer is one worker, of world_size= ranks. Scale rollouts and stages")
            check_least(0, replicas=count)
            for worker in replicas.staying[count:]:
                self.dismiss(worker, grace_s)
            while len(replicas.staying) < count:
                self._add(replicas)
            return replicas.staying

    def dismiss(self, worker: Worker, grace_s: float) -> None:
        """Let a worker finish the rows it holds within ``grace_s``; the others return to the queue."""
        worker.leave(grace_s)
        if not sum(self._dismiss(name).count for name in worker.pids):
            worker.stop()  # it has not connected yet, so it holds nothing

    def close(self) -> None:
        """Start no more workers. Running ones continue."""
        with self._lock:
            self._closed = True

    def stop(self) -> None:
        """Stop all workers, and kill them after ``GRACE_S``."""
        workers = self.workers
        _end(workers)
        if all(worker.ended.is_set() for worker in workers):
            self._launchers.close()
            if self._closed and not any(worker.lost for worker in workers):  # keep the log of a failed one
                self._logs.remove()

    def kill(self) -> None:
        """End all workers by force. Does not wait."""
        for worker in self.workers:
            worker.kill()

    # ---- as observer of the workers, in their threads

    @property
    def over(self) -> bool:
        """True if the run was closed."""
        return self._connection.wire.server_closed

    def report(self, event: Event) -> None:
        """Send an event to the run, unless it is over."""
        with contextlib.suppress(AsyncFlowError):
            self._connection.report(event)
            self._queue.flush()

    def gone(self, worker: Worker, why: str) -> bool:
        """Return the leases of an ended process to the queue. Only rows of a stage can be at fault for its end."""
        lost = sum(self._dismiss(name, why).lost for name in worker.pids)
        return lost > 0 and any(isinstance(each.role, Stage) and worker in each.workers for each in self._started)

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        """Fail the run, or report a warning if ``on_failure`` is "continue" and a worker of the role is left."""
        if self.over:  # the cause of the failure
            address = self._connection.wire.address
            self._fail(ServerLost(f"the run at {address} was closed before worker {worker.name!r} was through"))
            return
        if (worker.spec.placement.on_failure or self._on_failure) == "stop":
            self._fail(error)
            return
        with self._lock:
            left = [
                w for w in self.workers if w.role == worker.role and not (w.ended.is_set() or w.lost or w.leaving)
            ]
        if left:
            first = str(error).partition("\n")[0]
            text = f"{first}; the run goes on with {', '.join(w.name for w in left)}"
            self.report(ev.Note(time_s=time.monotonic(), worker=worker.name, text=text, level="warning"))
            return
        self._fail(WorkerFailed(f"it was the last of {worker.role!r}", worker.name, str(error)))

    def ended(self, worker: Worker) -> None:
        """Wake the threads waiting for a worker."""
        self.changed.notify()

    # ---- starting

    def _add(self, replicas: _Replicas) -> None:
        role, rank = replicas.role, replicas.rank
        if self._closed:
            raise ConfigError(f"no worker of {role.task!r} can be started: the run is closed")
        number = self._counts.get(role.task, 0)
        self._counts[role.task] = number + 1
        name = f"{role.task}-{self._mark}{number}"
        here = isinstance(role, Stage) and role.here
        endpoint = self._far if reaches_hosts(role.place) else self._near
        if role.place.hosts and not endpoint.address.startswith("tcp:"):
            raise ConfigError(f"{role.task!r} has hosts=, and the run has no address for them: serve(address=...)")
        alone = isinstance(role, Train) or rank is not None  # several workers of a stage are several groups
        spec = WorkerSpec(
            name=name if rank is None else rank_name(name, rank.rank), role={} if here else to_json(role, ""),
            settings=replicas.settings, **endpoint._asdict(), key=self._key(*endpoint), host=replicas.next_host,
            import_path=own_path(), plugins=plugin_variables(), rank=rank.rank if rank else 0,
            world_size=rank.world_size if rank else 1, group=role.task if alone else name, placement=role.place, log=self._logs.file(name),
        )  # fmt: skip
        replicas.workers.append(Worker(replicas.launcher, spec, role.task, self))

    def _key(self, address: str, insecure: bool) -> Mapping[str, str] | None:
        """Return the key for a new worker at an address: as it is now, and never this process's own."""
        if insecure or not address.startswith("tcp:"):
            return None
        key: Mapping[str, str] | None = msgspec.to_builtins(self._connection.run_key())
        return key

    def renewed(self, spec: WorkerSpec) -> WorkerSpec:
        """See ``WorkerObserver.renewed``. While the server is away, the key is as it was."""
        with contextlib.suppress(AsyncFlowError):
            return replace(spec, key=self._key(spec.address, spec.insecure))
        return spec

    def _end_earlier(self, task: str) -> None:
        """End the sessions of workers that an earlier process of this run started for a task. They ended
        with it, which the queue cannot see of those on other hosts."""
        if task in self._counts:
            return
        named = re.compile(rf"{re.escape(task)}-\d+( rank \d+)?")
        for name in {each.name for each in self._queue.status().sessions if named.fullmatch(each.name)}:
            self._queue.send(cmd.Dismiss(name=name, ended="the driver that started it has ended"))

    def _replicas_of(self, which: Role | str) -> _Replicas:
        found = [each for each in self._started if which is each.role or which == each.role.task]
        if len(found) == 1:
            return found[0]
        known = ", ".join(repr(each.role.task) for each in self._started) or "none"
        if found:
            raise ConfigError(
                f"{len(found)} specs were started for {which!r}; name the one by the object that was started"
            )
        raise ConfigError(f"nothing was started here for {which!r}; started were: {known}")

    def _launcher_of(self, role: Role) -> Launcher:
        if isinstance(role, Stage) and role.here:
            return ThreadLauncher(role)
        return self._launchers.of(role.place)

    def _dismiss(self, name: str, ended: str = "") -> cmd.Dismissed:
        """Have the queue lease nothing more to a worker. ``ended``: why its process has ended; then
        its leases return at once."""
        try:
            reply: cmd.Dismissed = self._queue.send(cmd.Dismiss(name=name, ended=ended))
            return reply
        except AsyncFlowError:  # the run is over
            return cmd.Dismissed(count=0)


def _end(workers: list[Worker]) -> None:
    """Stop all workers at the same time, and kill the running ones after ``GRACE_S``."""
    for worker in workers:
        worker.stop()
    for worker in _late(workers):
        worker.kill()
    _late(workers)


def _late(workers: list[Worker]) -> list[Worker]:
    """Return the workers that have not ended ``GRACE_S`` from now."""
    until = time.monotonic() + GRACE_S
    return [worker for worker in workers if not worker.ended.wait(max(0.0, until - time.monotonic()))]
