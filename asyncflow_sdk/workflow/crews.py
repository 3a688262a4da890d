"""Crews: the workers that a run has started. Each spec that was started has a crew, which grows and shrinks while the run
goes on; what a worker's failure means is decided here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import AsyncFlowError, ConfigError, ServerLost, WorkerFailed
from ..interfaces import Launcher, OnFailure, Placement, WorkerSpec
from ..ledger import commands as cmd
from ..queue import QueueClient
from ..types import Checkpoint, Event, Weights
from ..types import events as ev
from ..types.validation import check_least
from ..weights import AUTO
from .logs import Logs
from .ranks import Group, rank_name
from .resuming import own_path
from .specs import Rollout, Stage, Train
from .supervise import GRACE_S, Worker, launcher_named
from .threads import ThreadLauncher
from .waiting import News
from .work import FunctionWork
from .worker import Rank, RolloutJob, StageJob, TrainJob, WorkerConfig, WorkerMain

Spec = Rollout | Stage | Train
Job = RolloutJob | StageJob | TrainJob
_DEFAULT = Weights()


@dataclass
class Crew:
    """The workers of one spec, the oldest first."""

    spec: Spec
    job: Job
    launcher: Launcher
    rank: Rank | None = None
    workers: list[Worker] = field(default_factory=list)

    @property
    def staying(self) -> list[Worker]:
        """Those that work, and were not told to leave."""
        return [worker for worker in self.workers if not (worker.ended.is_set() or worker.leaving)]


class Crews:
    """``near``: the address for workers that are started here, ``key`` what they need there, ``mark``: what tells their names
    from those that other processes start. ``fail`` is told what ends the run. Thread-safe."""

    def __init__(
        self, queue: QueueClient, near: str, mark: str, logs: Logs, fail: Callable[[BaseException], None],
        on_failure: OnFailure = "stop",
    ) -> None:  # fmt: skip
        self._queue, self._near, self._mark, self._logs, self._fail = queue, near, mark, logs, fail
        self._connection = queue.connection
        self._on_failure = on_failure
        self._crews: list[Crew] = []
        self._counts: dict[str, int] = {}
        self._launchers: dict[str, Launcher] = {}
        self._lock = threading.RLock()
        self._closed = False
        self.changed = News()
        """A worker ended, or something failed."""

    @property
    def workers(self) -> list[Worker]:
        """All that were ever started, by spec."""
        with self._lock:
            return [worker for crew in self._crews for worker in crew.workers]

    def start(self, spec: Spec, rank: Rank | None = None, **job: Any) -> list[Worker]:
        """Start the workers of a spec; of a trainer of several ranks all, or the one that is ``rank``, where others start the
        others. Raises ConfigError; then none of them runs."""
        launcher = self._launcher_of(spec)
        if isinstance(spec, Train) and rank is None and spec.world_size > 1:
            launcher = Group(launcher, spec.world_size)
        launcher.check(spec.place)
        crew = Crew(spec, _job(spec, **job), launcher, rank)
        with self._lock:
            try:
                for _ in range(getattr(spec, "replicas", 1)):
                    self._add(crew)
            except BaseException:
                _end(crew.workers)
                raise
            self._crews.append(crew)
        return list(crew.workers)

    def scale(self, which: Spec | str, replicas: int, grace_s: float) -> list[Worker]:
        """See ``Run.scale``."""
        with self._lock:
            crew = self._crew(which)
            if isinstance(crew.spec, Train):
                raise ConfigError("a trainer is one worker, of world_size= ranks. Scale rollouts and stages")
            check_least(0, replicas=replicas)
            for worker in crew.staying[replicas:]:
                self.dismiss(worker, grace_s)
            while len(crew.staying) < replicas:
                self._add(crew)
            return crew.staying

    def dismiss(self, worker: Worker, grace_s: float) -> None:
        """Have a worker leave: it finishes what it holds within ``grace_s``, and what it has not goes back."""
        worker.leave(grace_s)
        if not sum(self._tell(name) for name in worker.pids):
            worker.stop()  # nobody is there yet who could hold anything

    def close(self) -> None:
        """Start none any more. Those that are there go on."""
        with self._lock:
            self._closed = True

    def stop(self) -> None:
        """Stop the workers; those that do not end within seconds are killed."""
        workers = self.workers
        _end(workers)
        if all(worker.ended.is_set() for worker in workers):
            with self._lock:
                launchers, self._launchers = self._launchers, {}
            for launcher in launchers.values():
                launcher.close()
            if self._closed and not any(worker.lost for worker in workers):  # of one that failed the log is wanted
                self._logs.remove()

    def kill(self) -> None:
        """End the workers without asking. Does not wait."""
        for worker in self.workers:
            worker.kill()

    # ---- told by workers, each in a thread of its own

    @property
    def over(self) -> bool:
        return self._connection.wire.server_closed

    def report(self, event: Event) -> None:
        with contextlib.suppress(AsyncFlowError):  # the run may be over
            self._connection.report(event)
            self._queue.flush()

    def gone(self, worker: Worker, why: str) -> None:
        for name in worker.pids:
            self._tell(name, why)

    def failed(self, worker: Worker, error: WorkerFailed) -> None:
        if self.over:  # that is why, whatever it ended with
            where = self._connection.wire.address
            self._fail(ServerLost(f"the run at {where} was closed before worker {worker.name!r} was through"))
            return
        if (worker.order.placement.on_failure or self._on_failure) == "stop":
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
        last = f"worker {worker.name!r} failed for good, and it was the last of {worker.role!r}: {error}"
        self._fail(WorkerFailed(last, worker.name))

    def ended(self, worker: Worker) -> None:
        self.changed.set()

    # ---- starting

    def _add(self, crew: Crew) -> None:
        if self._closed:
            raise ConfigError(f"no worker of {crew.spec.task!r} can be started: the run is closed")
        role = crew.spec.task
        number = self._counts.get(role, 0)
        self._counts[role] = number + 1
        name = f"{role}-{self._mark}{number}"
        log = self._logs.of(name)
        if crew.rank is not None:
            name = rank_name(name, crew.rank.rank)
        wire = self._connection.wire
        config = WorkerConfig(
            name, self._near, crew.job, own_path(), wire.key, wire.insecure, rank=crew.rank or Rank()
        )
        order = WorkerSpec(name=name, config=msgspec.json.encode(config), placement=crew.spec.place, log=log)
        crew.workers.append(Worker(crew.launcher, order, role, self))

    def _crew(self, which: Spec | str) -> Crew:
        found = [crew for crew in self._crews if which is crew.spec or which == crew.spec.task]
        if len(found) == 1:
            return found[0]
        known = ", ".join(repr(crew.spec.task) for crew in self._crews) or "none"
        if found:
            raise ConfigError(
                f"{len(found)} specs were started for {which!r}; name the one by the object that was started"
            )
        raise ConfigError(f"nothing was started here for {which!r}; started were: {known}")

    def _launcher_of(self, spec: Spec) -> Launcher:
        if isinstance(spec, Stage) and spec.here:
            return _own_thread(spec)
        name = spec.place.launcher
        with self._lock:
            if name not in self._launchers:
                self._launchers[name] = launcher_named(name)
            return self._launchers[name]

    def _tell(self, name: str, ended: str = "") -> int:
        """The queue gives a worker nothing more; and, once its process has ended, takes back what it held. Returns whether
        there is one."""
        try:
            return int(self._queue.send(cmd.Dismiss(name=name, ended=ended)).count)
        except AsyncFlowError:  # the run is over
            return 0


def _end(workers: list[Worker]) -> None:
    """Stop all workers at the same time; kill those that have not ended after ``GRACE_S``, at the same time, too."""
    for worker in workers:
        worker.stop()
    for worker in _late(workers):
        worker.kill()
    _late(workers)


def _late(workers: list[Worker]) -> list[Worker]:
    """The workers that have not ended within ``GRACE_S`` from now."""
    until = time.monotonic() + GRACE_S
    return [worker for worker in workers if not worker.ended.wait(max(0.0, until - time.monotonic()))]


def _own_thread(spec: Stage) -> Launcher:
    """A thread of this process, for a function that no other process can import."""

    return _OwnThread(lambda config: WorkerMain(config, spec.run))


class _OwnThread(ThreadLauncher):
    def check(self, place: Placement) -> None:
        """It is where it is because it can be nowhere else; what was asked for is for others of its kind."""


def _job(
    spec: Spec, needs_first: bool = False, weights: Weights | None = None, export: str = "",
    checkpoint: Checkpoint | None = None, checkpoints: str = "", swap: str = "",
) -> Job:  # fmt: skip
    """``swap``: what was chosen for a rollout. ``checkpoints``: the folder that a trainer's are in, where there are any."""
    if isinstance(spec, Rollout):
        how = weights or _DEFAULT
        return RolloutJob(
            spec.engine, spec.model, spec.options, spec.sampling, spec.prompt, spec.tokenizer, needs_first,
            swap or spec.swap or how.swap, tuple(how.verify if spec.verify is None else spec.verify), spec.task,
            spec.prefix, spec.agent.job() if spec.agent is not None else None,
            "" if how.transport == AUTO else how.transport,
        )  # fmt: skip
    if isinstance(spec, Train):
        often = checkpoint or Checkpoint()
        return TrainJob(
            spec.engine, spec.model, spec.algorithm_spec, spec.options, export, weights or spec.weights or _DEFAULT,
            checkpoints, often.every, often.keep, spec.needs,
        )  # fmt: skip
    work = spec.job() or FunctionWork("")  # what runs here is not looked up
    return StageJob(work, spec.task, spec.needs, spec.gives, spec.batch, spec.concurrency, spec.whole_groups)
