"""Run: a connection to a run, in its driver or in any other process.

with af.serve("runs/mine") as run:                    # the driver
    run.queue.put({"prompt": prompts}, group_size=8, key="epoch-0")
    run.start(af.Rollout("transformers", model="m"))
    for step in run.consumer("train", batch_size=256): ...

with af.connect(address) as run: ...                  # another process
with af.connect("tcp://10.0.0.1:7000", key="run.key") as run: ...    # another host, of a run served at tcp://0.0.0.0:7000
"""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, overload

from ..errors import AsyncFlowError, ConfigError, DeadlineExceeded
from ..interfaces import (
    TRAIN_COLUMNS,
    Consumer,
    LeasedStep,
    OnFailure,
    RollbackResult,
    StepConsumer,
    WeightSync,
    WorkerSettings,
)
from ..interfaces.store import StorageHome
from ..ledger import Audit
from ..ledger import commands as cmd
from ..queue import Connection, QueueClient, QueueServer, Recovered, open_queue
from ..queue.client import CHECK_S
from ..types import events as ev
from ..types.defaults import FEED_GROUPS, FETCH_S, KEEP_CHECKPOINTS, LEAVE_S, NEXT_S, STEP_LEASE_S, WAIT_S
from ..weights import Restoration, TransportPublisher, TransportSubscriber, get_restoration
from ..weights.publisher import version_number
from .checkpoint import Checkpoints, ResumePoint
from .data import Feeder, Prompts, Selection, prompt_source
from .loops.event_sinks import EventSink, WorkerLog
from .loops.waits import LOOK_S, FailureLimit, StallTimer, is_complete, waits_text
from .processes.ranks import RankId
from .processes.worker_pool import Endpoint, Worker, WorkerPool
from .run_directory import remove_addresses
from .specs import Rollout, Stage, Train, declare_task

if TYPE_CHECKING:
    from typing_extensions import Unpack

PING_S = 5.0
"""Limit of the wait for the answer of a storage unit (seconds)."""


class ConsumerOptions(TypedDict, total=False):
    """Keywords of ``Run.consumer``. ``batch_size``: declare the task, with ``needs`` (default: TRAIN_COLUMNS),
    ``lease_s`` (a day) and ``sampler``: each batch is one whole step of that many rows and starts from the version
    that the staleness rule counts from. ``timeout_s``: limit of the wait for a batch or a part, an hour by default.
    ``count``: rows of a batch of a task without steps. ``rank`` of ``world_size``, ``group``, ``shards``: lease this
    rank's shard of each batch; see ``get`` of the queue."""

    batch_size: int | None
    needs: tuple[str, ...]
    lease_s: float
    sampler: str | tuple[str, Mapping[str, Any]] | None
    timeout_s: float
    count: int
    group: str
    rank: int
    world_size: int
    shards: int


class Run(WeightSync):
    """A connection to a run: its queue, its weights, and the workers started from here. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        server: QueueServer | None = None,
        directory: Path | None = None,
        on_failure: OnFailure = "stop",
        logs: Path | None = None,
        trackers: EventSink | None = None,
        far: Endpoint | None = None,
    ) -> None:
        self.queue: QueueClient = open_queue(connection)
        self.directory = directory
        self._connection = connection
        self._server = server
        self._trackers = trackers
        self._feeds: set[str] = set()
        self._updates: list[TransportSubscriber] = []
        self._consumers: weakref.WeakSet[Consumer | StepConsumer] = weakref.WeakSet()
        self.failure: BaseException | None = None
        mark = "" if server is not None else f"{connection.session}."  # others start workers of the same roles
        folder, near = directory / "logs" if logs is None and directory is not None else logs, self._near()
        self._pool = WorkerPool(self.queue, near, far or near, mark, folder, self.fail, on_failure)
        self._changes = self._pool.changed

    @property
    def address(self) -> str:
        """The argument of ``connect``."""
        return self._connection.wire.address if self._server is None else self._server.addresses[-1]

    @property
    def addresses(self) -> list[str]:
        """All addresses known to this process."""
        return [self.address] if self._server is None else list(self._server.addresses)

    @property
    def session(self) -> int:
        """The number of this connection's session, as ``queue.status()`` lists it."""
        return self._connection.session

    @property
    def recovered(self) -> Recovered | None:
        """The state found of an earlier server; None for a new run, and in other processes."""
        return self._server.recovered if self._server is not None else None

    def _near(self) -> Endpoint:
        """Return the endpoint for workers on this host: in the serving process a socket file, without a key."""
        if self._server is not None:
            return Endpoint(self._server.addresses[1])
        wire = self._connection.wire
        return Endpoint(wire.address, wire.insecure)

    def start(self, spec: Rollout | Stage | Train, *, rank: RankId | None = None, **settings: Any) -> list[Worker]:
        """Declare the task of ``spec`` (except a trainer's) and start its workers. ``settings``: the fields of
        ``WorkerSettings``. ``rank``: start only this rank of a trainer or stage. Raises ConfigError for an invalid
        task, before any worker starts.

        A worker failing for good sets ``failure``, and consumers of this run raise it."""
        spec.find_model()
        if not isinstance(spec, Train):
            self.declare(spec)
        return self._pool.start(spec, WorkerSettings(**settings), rank)

    def declare(self, spec: Rollout | Stage | Train, batch_size: int = 0) -> None:
        """Declare the task of a spec. ``batch_size``: rows of a step, for a trainer's."""
        spec.find_model()
        declared = spec.declare(batch_size) if isinstance(spec, Train) else spec.declare()
        declare_task(self.queue, declared)

    @property
    def workers(self) -> list[Worker]:
        """All workers started from here, also ended ones."""
        return self._pool.workers

    def scale(self, which: Rollout | Stage | str, replicas: int, *, grace_s: float = LEAVE_S) -> list[Worker]:
        """Change the number of workers of a spec started here, given it or its task's name. Returns the workers.

        New ones start like the first. Of surplus ones the newest leave: each leases nothing more, finishes its rows
        and ends; after ``grace_s`` seconds it is stopped, and its rows go to others. Does not wait for their end. 0:
        none, until scaled up again. Raises ConfigError."""
        return self._pool.scale(which, replicas, grace_s)

    def homes(self) -> Sequence[StorageHome]:
        """Return the homes of payload beside the server's memory. Raises ServerLost."""
        return self._connection.homes().homes()

    def ping_home(self, home: StorageHome, timeout_s: float = PING_S) -> float:
        """Reach the storage unit of a home from this host. Return the seconds it took. Raises StoreUnavailable,
        AccessDenied."""
        return self._connection.ping_home(home, timeout_s)

    def evict_home(self, home: StorageHome, reason: str = "its host is gone") -> None:
        """Give up a host at once, with its payload: rows that need it fail, and feeders put them again. The next
        storage unit there begins anew. Raises ConfigError if it is lost already."""
        self.queue.send(cmd.EvictHome(home=home.home, epoch=home.epoch, reason=reason))

    def evict(self, *sessions: int, reason: str = "its host is gone") -> None:
        """End sessions, as of clients on a lost host, whose death the server cannot see. Their leases return at once,
        and their roles as publisher or replica become free. ``sessions``: their numbers in ``queue.status()`` and
        `asyncflow top --json`; name all of a client, which could get a new key by another. If the client lives after
        all, its next request is refused. With keys, its own key is revoked at the run's server, and within seconds at
        storage units and weight services; the key for new clients is replaced as by ``rotate_key``. Raises
        ConfigError for an unknown session and this connection's own, with no effect; and if the new key could not be
        saved."""
        if self.session in sessions:
            raise ConfigError(f"session {self.session} is this connection's own: close it instead")
        self._connection.rotate_key(sessions, reason or "evicted")

    def rotate_key(self) -> None:
        """Replace the key in ``run.key``. Connected clients go on; new ones on other hosts need a copy of the new
        file. Raises ConfigError for a run without keys, and if the new key could not be saved."""
        self._connection.rotate_key()

    @overload
    def consumer(
        self, task: str = "train", *, part_rows: None = None, **options: Unpack[ConsumerOptions]
    ) -> Consumer: ...

    @overload
    def consumer(
        self, task: str = "train", *, part_rows: int, **options: Unpack[ConsumerOptions]
    ) -> StepConsumer: ...

    def consumer(
        self, task: str = "train", *, part_rows: int | None = None, **options: Unpack[ConsumerOptions]
    ) -> Consumer | StepConsumer:
        """Iterate over the batches of a task. ``part_rows``: iterate over its steps instead, each in parts of at
        least so many rows while the rest of it is still being generated; see ``steps`` of the queue. ``options``:
        those of ``ConsumerOptions``. A failure of a worker started here is raised while it waits; without a journal,
        the full steps come first."""
        if unknown := options.keys() - ConsumerOptions.__annotations__.keys():
            raise TypeError(f"consumer() has no parameter {min(unknown)!r}")
        leased: dict[str, Any] = {"timeout_s": NEXT_S, **options, "group": options.get("group") or task}
        leased["check"] = self.check, math.inf if part_rows is None and self._ends_by_failure else CHECK_S
        usual: dict[str, Any] = {"lease_s": STEP_LEASE_S, "needs": TRAIN_COLUMNS, "sampler": None}
        declared = {name: leased.pop(name, default) for name, default in usual.items()}
        if (batch_size := leased.pop("batch_size", None)) is not None:
            self.queue.declare(task, batch_rows=batch_size, **declared)
        consumer: Consumer | StepConsumer
        if part_rows is not None:
            consumer = self.queue.steps(task, part_rows=part_rows, **leased)
        else:
            consumer = self.queue.stream(task, **leased)
        self._consumers.add(consumer)
        return consumer

    def feed(
        self,
        prompts: Prompts,
        *,
        group_size: int,
        column: str = "prompt",
        epochs: int | None = None,
        chunk: int = FEED_GROUPS,
        seed: int = 0,
        key: str = "prompts",
    ) -> Feeder:
        """Put prompts in the background while the steps of training lack rows: epoch after epoch, shuffled by
        ``seed``, at most ``chunk`` groups at a time. Filtered, failed and cancelled groups are replaced by the next
        prompts, lost ones put again. After ``epochs`` (None: never) the stream ends. ``key``: prefix of the keys of
        its puts, unique in the run. Raises ConfigError for data without ``column``, and for a key used twice."""
        if key in self._feeds:
            raise ConfigError(f"a feeder with key {key!r} was started already; give this one a key of its own")
        source, on_failure = prompt_source(prompts, Selection(prompt=column)), self.fail
        options: dict[str, Any] = {
            "group_size": group_size,
            "chunk": chunk,
            "seed": seed,
            "epochs": epochs,
            "key": key,
        }
        feeder = Feeder(self.queue, source, on_failure=on_failure, **options)
        self._feeds.add(key)
        feeder.start()
        return feeder

    def weight_publisher(self, transport: str = "auto", **options: Any) -> TransportPublisher:
        """Return the publisher of the run's weights; see ``WeightSync``."""
        return TransportPublisher(self.queue, transport, **options)

    def weight_updates(
        self,
        *,
        loaded: int | None = None,
        timeout_s: float = NEXT_S,
        fetch_timeout_s: float = FETCH_S,
        rename: Callable[[str], str] | None = None,
    ) -> TransportSubscriber:
        """Return a subscriber of the run's weights, closed with this run; see ``WeightSync``."""
        updates = TransportSubscriber(
            self.queue, loaded=loaded, timeout_s=timeout_s, fetch_timeout_s=fetch_timeout_s, rename=rename
        )
        self._updates.append(updates)
        return updates

    def rollback(self, version: int, reason: str = "") -> RollbackResult:
        """Make the weights of a kept version current again, under a new number. Rows generated by the discarded
        versions expire. ``reason``: for the log.

        A trainer of a ``Workflow`` or of ``start`` loads these weights before its next step; the result names the
        source of its optimizer's state. Your own loop must load them and call ``restored`` before it publishes.
        Raises ConfigError for a version that is not kept, with a list of the kept ones, and if the trainer's engine
        has no ``load_weights``."""
        reply = self.queue.send(cmd.Rollback(version=version_number(version), reason=reason))
        return RollbackResult(reply.version, reply.expired, reply.checkpoint)

    def restoration(self) -> Restoration | None:
        """Return the version that your own training loop must load after a rollback; None without one. Load it by
        ``with restoration.fetch() as update`` or from the checkpoint it names, then call ``restored``."""
        return get_restoration(self.queue)

    def restored(self, version: int, optimizer: str = "") -> None:
        """Confirm that your own training loop has loaded ``version`` after a rollback, so that it may publish again.
        One of several ranks calls it after all have loaded. ``optimizer``: source of its state, for the log. Raises
        ConfigError if another version is current, as after a second rollback."""
        self.queue.send(cmd.ReportRestored(version=version_number(version), optimizer=optimizer))

    def checkpoint(
        self, save: Callable[[Path], None], *, keep: int = KEEP_CHECKPOINTS, directory: str | Path | None = None
    ) -> Path:
        """Save the training engine's state by ``save(path)`` in a new folder, so that ``resume`` can continue after
        the last acknowledged step. Blocks until all of it is on the disk. The newest ``keep`` are kept; rows of steps
        before the oldest of them end now. ``directory``: of all checkpoints; default: "checkpoints" in the run's.
        Raises ConfigError, also if a consumer of this run has not acknowledged its step, MemoryFull if the disk is
        full, and the errors of ``save``; earlier checkpoints then stay valid."""
        for consumer in self._consumers:
            step = consumer.current
            held = step is not None and (step.held if isinstance(step, LeasedStep) else step.left > 0)
            if step is not None and step.index >= 0 and held:
                raise ConfigError(
                    f"step {step.index} is not acknowledged: ack() it before a checkpoint of the weights that it"
                    " trained"
                )
        return self._checkpoints(directory, keep).save(save)

    def resume(self, *, directory: str | Path | None = None) -> ResumePoint:
        """Resume from the newest checkpoint, before the first step: load ``point.path``, publish as
        ``point.version``, unless None. Every full step from ``point.step`` on is leased again. One of several ranks
        calls it before any leases. Raises ConfigError if rows to train again are gone."""
        return self._checkpoints(directory, 1).resume()

    def _checkpoints(self, directory: str | Path | None, keep: int) -> Checkpoints:
        if directory is None and self.directory is None:
            raise ConfigError("this run has no directory here; say where checkpoints are with directory=")
        where = Path(directory) if directory is not None else Path(self.directory or "") / "checkpoints"
        return Checkpoints(self.queue, where, keep)

    def audit(self) -> Audit:
        """Return the number of rows by terminal state; the sum always equals the rows put."""
        return self.queue.audit()

    def wait(
        self,
        worker: Worker,
        *,
        timeout_s: float = WAIT_S,
        stall: StallTimer | None = None,
        failures: FailureLimit | None = None,
    ) -> None:
        """Wait until a worker has ended. Raises the failure of any worker at once, and DeadlineExceeded with the
        worker and all waits of the run after ``timeout_s`` seconds (``math.inf``: never), or if ``stall`` expires
        while a step is left to train; ConfigError if ``failures`` are too many."""
        began = time.monotonic()
        while True:
            seen = self._changes.count
            if failures is not None:
                failures.check(self.queue)
            if worker.ended.is_set():
                break
            self.check()
            left_s = min(began + timeout_s - time.monotonic(), stall.left_s if stall is not None else math.inf)
            if left_s <= 0:
                late = stall is not None and stall.left_s <= 0
                if stall is not None and late and not stall.complete and is_complete(self.queue.status()):
                    stall.complete = True
                    continue
                why = str(stall) if late else f"after {timeout_s:g} s: {worker.name} has not ended"
                raise DeadlineExceeded(f"{why}; {waits_text(self.queue.status(), *worker.pids)}")
            self._changes.wait(seen, left_s if failures is None else min(left_s, LOOK_S))
        self.check()

    def check(self) -> None:
        """Raise the error of a failed worker, if any."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop the workers started from here, and disconnect. Idempotent. The serving process also ends the stream
        and cancels rows outside full steps, unless the run is durable: a later ``serve`` continues it."""
        self._close(end=not (self._server is not None and self._server.durability))

    def _close(self, *, end: bool) -> None:
        if self._connection.wire.closed:
            return
        self._pool.close()
        with contextlib.ExitStack() as ending:  # called from the last to the first, in spite of errors
            if self._server is not None:
                ending.callback(self._server.close)
                if self.directory is not None:
                    ending.callback(remove_addresses, self.directory, self._server.addresses)
            ending.callback(self._connection.close)
            if self._trackers is not None:
                ending.callback(self._trackers.close)
            ending.callback(self.finish if end else self.stop_workers)
            for updates in self._updates:
                ending.callback(updates.close)

    def report(self, event: ev.Event) -> None:
        """Send an event to the run's sinks. Raises nothing."""
        self._pool.report(event)

    def finish(self) -> None:
        """Stop the workers started from here. The serving process also ends the stream and cancels rows outside full
        steps; other processes call ``queue.end(cancel=True)`` for that."""
        try:
            if self._server is not None:
                self.queue.end(cancel=True)
        finally:
            self.stop_workers()

    def dismiss_workers(self, grace_s: float = LEAVE_S) -> None:
        """Let the workers started from here leave: each finishes its rows, and is stopped after ``grace_s`` seconds.
        Does not wait."""
        for worker in self.workers:
            self._pool.dismiss(worker, grace_s)

    def stop_workers(self) -> None:
        """Stop the workers started from here at once, in the middle of their work, and kill them after some
        seconds."""
        self._pool.stop()

    def kill_workers(self) -> None:
        """End the workers started from here by force. Does not wait; ``stop_workers`` does."""
        self._pool.kill()

    def join_workers(self, timeout_s: float) -> None:
        """Wait for workers to end by themselves, then stop the others, with a warning about all waits of the run. If
        no row is left, dead workers are not restarted."""
        until = time.monotonic() + timeout_s
        if not self.audit().live:
            for worker in self._pool.workers:
                worker.finish()
        for worker in self._pool.workers:
            worker.ended.wait(max(0.0, until - time.monotonic()))
        late = [worker.name for worker in self._pool.workers if not worker.ended.is_set()]
        if late:
            with contextlib.suppress(AsyncFlowError):
                waits = waits_text(self.queue.status())
                text = f"{', '.join(late)} did not end within {timeout_s:g} s and will be stopped; {waits}"
                WorkerLog(self._connection).note(text)
                self.queue.flush()
        self.stop_workers()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fail(self, error: BaseException) -> None:
        """Fail the run with its first error: waiting threads and consumers raise it."""
        if self.failure is None:
            self.failure = error
            self._changes.notify()
            if self._ends_by_failure:
                with contextlib.suppress(AsyncFlowError):
                    self.queue.end(cancel=True)  # ends waits for rows at once

    @property
    def _ends_by_failure(self) -> bool:
        """True if a failure here ends the stream: not that of a durable run, nor of another process."""
        return self._server is not None and not self._server.durability
