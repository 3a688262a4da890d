"""WorkerPool: the workers started by this process for a run, each supervised alike for every launcher: restarts with
back-off and a limit, and a named failure."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...errors import AsyncFlowError, ConfigError, ServerLost, WorkerFailed
from ...interfaces import Launcher, OnFailure, WorkerExit, WorkerHandle, WorkerSettings, WorkerSpec
from ...ledger import commands as cmd
from ...plugins import plugin_variables
from ...queue import QueueClient
from ...queue.protocol import plain_text
from ...types import Event
from ...types import events as ev
from ...types.validation import check_least
from ..loops.waits import Changes
from ..run_directory import own_path
from ..serialization import to_json
from ..specs import Rollout, Stage, Train
from .launchers import Launchers, reaches_hosts
from .ranks import RankExit, RankHandles, RankId, RankLauncher, exit_of, rank_name
from .worker import ThreadLauncher

BACKOFF_S = 0.5
BACKOFF_MOST_S = 30.0
FORGIVEN = 10  # the back-off resets once a worker has run this many times its last restart delay
FORGIVEN_S = FORGIVEN * BACKOFF_MOST_S  # the count of restarts resets once a worker has run this long (seconds)
GRACE_S = 2.0  # a stopped worker is killed after this, and abandoned after this once more (seconds)

Role = Rollout | Stage | Train


class Endpoint(NamedTuple):
    """How a worker connects to the run: the first fields of a WorkerSpec with these names."""

    address: str
    insecure: bool = False


@dataclass
class _Replicas:
    role: Role
    settings: WorkerSettings
    launcher: Launcher
    rank: RankId | None = None
    workers: list[Worker] = field(default_factory=list)

    @property
    def staying(self) -> list[Worker]:
        """Running workers, without dismissed ones."""
        return [worker for worker in self.workers if worker.stays]


class WorkerPool:
    """Starts, scales and stops workers. Its workers call it, each in a thread of its own.

    ``near``: the endpoint for workers on this host; ``far``: the one for workers on others. ``mark``: a part of
    their names, unique to this process. ``logs``: the folder of their logs; None: a temporary one, readable by this
    user only. ``fail``: a function to end the run with an error. Thread-safe.
    """

    def __init__(
        self,
        queue: QueueClient,
        near: Endpoint,
        far: Endpoint,
        mark: str,
        logs: Path | None,
        fail: Callable[[BaseException], None],
        on_failure: OnFailure = "stop",
    ) -> None:
        self._queue, self._near, self._far, self._mark, self._logs, self._fail = queue, near, far, mark, logs, fail
        self._connection, self._on_failure = queue.connection, on_failure
        self._temporary: Path | None = None
        self._started: list[_Replicas] = []
        self._counts: dict[str, int] = {}
        self._launchers = Launchers()
        self._lock = threading.RLock()
        self._closed = False
        self.changed = Changes()  # notified when a worker ends or the run fails

    @property
    def workers(self) -> list[Worker]:
        """All workers started so far, by role."""
        with self._lock:
            return [worker for replicas in self._started for worker in replicas.workers]

    def start(self, role: Role, settings: WorkerSettings, rank: RankId | None = None) -> list[Worker]:
        """Start the workers of a role: all ranks of each, or only ``rank`` if another launcher starts
        the others. Raises ConfigError; then none runs."""
        launcher = ThreadLauncher(role) if isinstance(role, Stage) and role.here else self._launchers.of(role.place)
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
            keep = any(worker.lost for worker in workers)  # the log of a failed one
            if self._closed and self._temporary is not None and not keep:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def kill(self) -> None:
        """End all workers by force. Does not wait."""
        for worker in self.workers:
            worker.kill()

    # ---- called by the workers, in their threads

    @property
    def over(self) -> bool:
        """True if the run was closed: workers are not restarted."""
        return self._connection.wire.server_closed

    def report(self, event: Event) -> None:
        """Send an event to the run, unless it is over."""
        with contextlib.suppress(AsyncFlowError):
            self._connection.report(event)
            self._queue.flush()

    def gone(self, worker: Worker, why: str) -> bool:
        """Return the leases of an ended process to the queue. Return True if its rows may be the cause, as
        only a stage's can be: each such end costs them an attempt, so it cannot happen for ever."""
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
        left = ", ".join(each.name for each in self.workers if each.role == worker.role and each.stays)
        if left:
            first = str(error).partition("\n")[0]
            text = f"{first}; the run goes on with {left}"
            self.report(ev.Note(time_s=time.monotonic(), worker=worker.name, text=text, level="warning"))
            return
        self._fail(WorkerFailed(f"it was the last of {worker.role!r}", worker.name, str(error)))

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
        if self._logs is None:
            self._logs = self._temporary = Path(tempfile.mkdtemp(prefix="asyncflow-logs-"))
        alone = isinstance(role, Train) or rank is not None  # several workers of a stage are several groups
        running = [worker.spec.host for worker in replicas.staying]
        spec = WorkerSpec(
            name=name if rank is None else rank_name(name, rank.rank),
            role={} if here else to_json(role, ""),
            settings=replicas.settings,
            key=self._key(*endpoint),
            import_path=own_path(),
            plugins=plugin_variables(),
            group=role.task if alone else name,
            host=min(role.place.hosts, key=running.count, default=""),  # the one with the fewest workers
            placement=role.place,
            log=self._logs / f"{name}.log",
            **endpoint._asdict(),
            **({} if rank is None else rank._asdict()),
        )
        replicas.workers.append(Worker(replicas.launcher, spec, role.task, self))

    def _key(self, address: str, insecure: bool) -> Mapping[str, str] | None:
        if insecure or not address.startswith("tcp:"):
            return None
        key: Mapping[str, str] | None = msgspec.to_builtins(self._connection.run_key())
        return key

    def renewed(self, spec: WorkerSpec) -> WorkerSpec:
        """Return the spec for another start of a worker, with the key that new clients need now; while the server
        is away, with the same key."""
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
            text = f"{len(found)} specs were started for {which!r}; name the one by the object that was started"
            raise ConfigError(text)
        raise ConfigError(f"nothing was started here for {which!r}; started were: {known}")

    def _dismiss(self, name: str, ended: str = "") -> cmd.Dismissed:
        """Have the queue lease nothing more to a worker. ``ended``: the reason why its process has ended; then
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


class Worker:
    """A supervised worker. ``role``: its task, shared with other workers. ``ended``: set at its end for good;
    ``lost``: True if with an error. Thread-safe. Raises the launcher's error at the first start."""

    def __init__(self, launcher: Launcher, spec: WorkerSpec, role: str, pool: WorkerPool) -> None:
        self.name, self.role, self.spec = spec.name, role, spec
        self._launcher, self._pool = launcher, pool
        self._stopping = threading.Event()
        self._last = threading.Event()  # no restart any more
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.lost = False
        self._handle: WorkerHandle = launcher.start(spec)
        threading.Thread(target=self._supervise, name=f"supervise-{self.name}", daemon=True).start()

    @property
    def stays(self) -> bool:
        """True if it runs, or will be restarted."""
        return not (self.ended.is_set() or self.lost or self._last.is_set())

    @property
    def pid(self) -> int:
        """Its current process, as numbered on its host; of several ranks the first one's."""
        return self._handle.pid

    @property
    def pids(self) -> dict[str, int]:
        """Its current processes by name: one, or one for each rank."""
        handle = self._handle
        return dict(handle.pids) if isinstance(handle, RankHandles) else {self.name: handle.pid}

    @property
    def host(self) -> str:
        """The host of its process; "" if unknown."""
        return self._handle.host

    def stop(self) -> None:
        """Ask the worker to end at once; its leases return to the queue. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.stop()

    def leave(self, grace_s: float) -> None:
        """Stop the worker after ``grace_s``, and restart it no more. The caller dismissed it from
        the queue. Does not wait."""
        self.finish()

        def stop() -> None:
            if not self.ended.wait(grace_s):
                self.stop()
                if not self.ended.wait(GRACE_S):
                    self.kill()

        threading.Thread(target=stop, name=f"leave-{self.name}", daemon=True).start()

    def finish(self) -> None:
        """Restart the worker no more: its run is over."""
        self._last.set()

    def kill(self) -> None:
        """End the worker by force. Does not wait."""
        self._stopping.set()
        self._last.set()
        with self._lock:
            self._handle.kill()

    def _supervise(self) -> None:
        try:
            self._keep_running()
        except Exception as error:
            self._fail(f"cannot be started again: {type(error).__name__}: {error}", "")
        finally:
            self.ended.set()
            self._pool.changed.notify()

    def _keep_running(self) -> None:
        most, restarts, wait_s = self.spec.placement.max_restarts, 0, 0.0
        while True:
            began, ending = time.monotonic(), exit_of(self._handle)
            lived_s = time.monotonic() - began
            if ending.status or self._stopping.is_set():
                how = f"{_described(ending)}: {ending.text.strip()}" if ending.status else "was stopped"
                if self._pool.gone(self, plain_text(f"its worker {how}".removesuffix(": "))):
                    restarts, wait_s = 0, 0.0
            if not ending.status or self._last.is_set():
                self._report("stopped")
                return
            if lived_s > FORGIVEN_S:
                restarts = 0
            if ending.fatal or restarts >= most or self._pool.over:
                again = f" after {restarts} restarts" if restarts else ""
                self._fail(_described(ending) + again, ending.text)
                return
            soon = wait_s > 0 and lived_s <= FORGIVEN * wait_s
            wait_s = min(BACKOFF_MOST_S, 2 * wait_s) if soon else BACKOFF_S
            restarts += 1
            self._report("restarting", f"{_described(ending)}; restart {restarts} of {most} in {wait_s:g} s")
            if self._last.wait(wait_s):
                self._report("stopped")
                return
            self.spec = self._pool.renewed(self.spec)
            handle = self._launcher.start(self.spec)
            with self._lock:
                self._handle = handle
                if self._stopping.is_set():  # stopped while it was being started
                    handle.stop()

    def _fail(self, how: str, text: str) -> None:
        self.lost = True
        error = WorkerFailed(f"worker {self.name!r} {how}", self.name, text)
        self._report("failed", str(error))
        self._pool.failed(self, error)

    def _report(self, state: str, detail: str = "") -> None:
        for name, pid in self.pids.items():
            self._pool.report(
                ev.WorkerState(time_s=time.monotonic(), worker=name, state=state, pid=pid, detail=detail)
            )


def _described(ending: WorkerExit) -> str:
    status, who = ending.status, f"rank {ending.rank} " if isinstance(ending, RankExit) else ""
    if status < 0:
        try:
            return f"{who}was killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"{who}was killed by signal {-status}"
    return f"{who}ended with status {status}"
