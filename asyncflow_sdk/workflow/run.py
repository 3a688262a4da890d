"""Run: the handle of a run, in the process that serves it, in any other on this host, or on another.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import AsyncFlowError, ConfigError, DeadlineExceeded
from ..interfaces import (
    TRAIN_COLUMNS,
    Consumer,
    OnFailure,
    RollbackResult,
    TrackedRun,
    WeightSync,
)
from ..ledger import Audit
from ..ledger import commands as cmd
from ..queue import Connection, QueueClient, QueueServer, Recovered, open_queue
from ..types import events as ev
from ..types.defaults import FETCH_S, NEXT_S, STEP_LEASE_S
from ..weights import Restoration, TransportPublisher, TransportSubscriber, get_restoration, report_restored
from ..weights.arguments import version_number
from .address import remove_addresses
from .checkpoint import Checkpoints, Point
from .consumer import CheckingConsumer
from .crews import Crews
from .data import Feeder, Prompts, load_prompts
from .logs import Logs
from .specs import Rollout, Stage, Train
from .supervise import Worker
from .tracking import Tracking
from .waiting import Stall, is_through, what_stands

WAIT_S = 86400.0
"""How long ``Run.wait`` waits by default (seconds)."""


class Run(WeightSync):
    """A connection to a run: its queue, its weights, and the workers started from here. Thread-safe."""

    def __init__(
        self, connection: Connection, server: QueueServer | None = None, directory: Path | None = None,
        on_failure: OnFailure = "stop", logs: Path | None = None,
    ) -> None:  # fmt: skip
        self.queue: QueueClient = open_queue(connection)
        self.directory = directory
        self._connection = connection
        self._server = server
        self._feeds: set[str] = set()
        self._updates: list[TransportSubscriber] = []
        self._consumers: weakref.WeakSet[Consumer] = weakref.WeakSet()
        self.failure: BaseException | None = None
        self._tracking: Tracking | None = None
        mark = "" if server is not None else f"{connection.session}."  # others start workers of the same roles
        if logs is None and directory is not None:
            logs = directory / "logs"
        self._crews = Crews(self.queue, self._near, mark, Logs(logs), self.fail, on_failure)
        self._changed = self._crews.changed

    @property
    def address(self) -> str:
        """What ``connect`` takes."""
        return self._connection.wire.address if self._server is None else self._server.addresses[-1]

    @property
    def addresses(self) -> list[str]:
        """Where it is served, as far as this process knows."""
        return [self.address] if self._server is None else list(self._server.addresses)

    @property
    def session(self) -> int:
        """The number of this connection's session, as ``queue.status()`` lists it."""
        return self._connection.session

    @property
    def recovered(self) -> Recovered | None:
        """What was found of a run that had died; None for one that is new, and in other processes than its own."""
        return self._server.recovered if self._server is not None else None

    @property
    def _near(self) -> str:
        """The address for workers started from here: they share this host, its memory, and need no key."""
        return self._connection.wire.address if self._server is None else self._server.addresses[1]

    def start(self, spec: Rollout | Stage | Train, **job: Any) -> list[Worker]:
        """Declare the task of ``spec`` and start its workers. Raises ConfigError for a task that cannot be
        declared, before any is started; what only a worker can know comes as its failure.

        A worker that ends for good sets ``failure``, and consumers of this run raise it.
        """
        if not isinstance(spec, Train):
            self.declare(spec)
        return self._crews.start(spec, **job)

    def declare(self, spec: Rollout | Stage | Train, batch_size: int = 0) -> None:
        """Declare the task of a spec; ``start`` does so for all but the trainer's, whose ``batch_size`` is the run's."""
        declared = spec.declare(batch_size) if isinstance(spec, Train) else spec.declare()
        self.queue.declare(**task_arguments(declared))

    @property
    def workers(self) -> list[Worker]:
        """Those that were started from here, also those that have ended since."""
        return self._crews.workers

    def scale(self, which: Rollout | Stage | str, replicas: int, *, grace_s: float = 60.0) -> list[Worker]:
        """Have so many workers of what was started here, the spec or the name of its task, from now on; returns them.

        More are started as the first ones were. Of fewer the newest leave: each is given nothing more, finishes what it
        holds, and ends; after ``grace_s`` seconds it is stopped, and what it still holds goes to others. Does not wait for that.
        0 is none at all, until it is scaled up again. Raises ConfigError.
        """
        return self._crews.scale(which, replicas, grace_s)

    def evict(self, session: int, reason: str = "its host is gone") -> None:
        """Say that a client's process has ended where the server cannot see it: on a host that is gone. What it held goes back at
        once, and somebody else may publish, or load a version, in its place. ``session``: its number, as ``queue.status()`` and
        `asyncflow top --json` list it. One that lives after all is refused from its next request on. Raises ConfigError for
        this connection's own, and for one that is not there."""
        if session == self.session:
            raise ConfigError(f"session {session} is this connection's own: close it instead")
        if not self.queue.send(cmd.Dismiss(session=session, ended=reason or "evicted")).count:
            known = ", ".join(f"{each.id} ({each.name})" for each in self.queue.status().sessions)
            raise ConfigError(f"there is no session {session}; there are: {known}")

    def consumer(
        self,
        task: str = "train",
        *,
        batch_size: int | None = None,
        count: int = 1,
        needs: tuple[str, ...] = TRAIN_COLUMNS,
        timeout_s: float = NEXT_S,
        lease_s: float = STEP_LEASE_S,
        sampler: str | tuple[str, Mapping[str, Any]] | None = None,
        group: str = "",
        rank: int = 0,
        world_size: int = 1,
        shards: int = 0,
    ) -> Consumer:
        """Iterate over the batches of a task. With ``batch_size`` the task is declared here, with ``sampler``: each
        batch is one whole step of that many rows, whose version the staleness rule counts from. ``timeout_s``: the
        longest it waits for a batch; ``lease_s``: the longest it may take over one. ``rank`` of ``world_size``: this
        is one of the ranks that train each batch together, and gets its shard; see ``get`` of the queue."""
        if batch_size is not None:
            self.queue.declare(task, needs=needs, batch_rows=batch_size, lease_s=lease_s, sampler=sampler)
        consumer = CheckingConsumer(
            self.queue, task, count, timeout_s, self.check, often=not self._ends_by_failure, group=group or task,
            rank=rank, world_size=world_size, shards=shards,
        )  # fmt: skip
        self._consumers.add(consumer)
        return consumer

    def feed(
        self, prompts: Prompts, *, group_size: int, column: str = "prompt", epochs: int | None = None,
        chunk: int = 64, seed: int = 0, key: str = "prompts",
    ) -> Feeder:  # fmt: skip
        """Put prompts in the background while the steps of training lack rows: epoch after epoch, shuffled by
        ``seed``, at most ``chunk`` groups at a time. What is filtered, fails or is cancelled is replaced by the next
        prompts. After ``epochs`` (None: never) the stream ends. ``key``: prefix of the keys of its puts,
        one for each feeder of a run. Raises ConfigError for data without ``column``, and for a key used twice."""
        if key in self._feeds:
            raise ConfigError(f"a feeder with key {key!r} was started already; give this one a key of its own")
        feeder = Feeder(
            self.queue, load_prompts(prompts, column), group_size=group_size, chunk=chunk, seed=seed,
            on_failure=self.fail, epochs=epochs, key=key,
        )  # fmt: skip
        self._feeds.add(key)
        feeder.start()
        return feeder

    def weight_publisher(self, transport: str = "auto", **options: Any) -> TransportPublisher:
        return TransportPublisher(self.queue, transport, **options)

    def weight_updates(
        self,
        *,
        loaded: int | None = None,
        timeout_s: float = NEXT_S,
        fetch_timeout_s: float = FETCH_S,
        rename: Callable[[str], str] | None = None,
    ) -> TransportSubscriber:
        updates = TransportSubscriber(
            self.queue, loaded=loaded, timeout_s=timeout_s, fetch_timeout_s=fetch_timeout_s, rename=rename
        )
        self._updates.append(updates)
        return updates

    def rollback(self, version: int, reason: str = "") -> RollbackResult:
        """Make the weights of a version that is kept current again, under a new number. Rows that were generated by the versions
        given up expire. ``reason``: for people.

        A trainer of a ``Workflow``, or one that ``start`` started, loads these weights before its next step; the answer says
        where its optimizer's state comes from. A loop of one's own cannot publish before it has loaded them and called
        ``restored``. Raises ConfigError for a version that is not kept, and names those that are; and for a trainer whose engine
        has no ``load_weights``."""
        reply = self.queue.send(cmd.Rollback(version=version_number(version), reason=reason))
        return RollbackResult(reply.version, reply.expired, reply.checkpoint)

    def restoration(self) -> Restoration | None:
        """The version that a training loop of one's own has to load after a rollback; None if there is none. Load it by
        ``with restoration.fetch() as update``, or from the checkpoint that it names, then call ``restored``."""
        return get_restoration(self.queue)

    def restored(self, version: int, optimizer: str = "") -> None:
        """This training loop has loaded ``version``, which a rollback made current: publishing may go on. Of several ranks one
        calls it, after all have loaded. ``optimizer``: where its state comes from, for people. Raises ConfigError if another
        version is current, as after a second rollback."""
        report_restored(self.queue, version_number(version), optimizer)

    def checkpoint(self, save: Callable[[Path], None], *, keep: int = 2, directory: str | Path | None = None) -> Path:
        """Have ``save(path)`` write the training engine's state into a new folder, so that ``resume`` can go on after the last
        step that was acknowledged. The newest ``keep`` are kept; rows of steps before the oldest of them end now. Blocks until it is
        on the disk, whole. ``directory``: of all checkpoints; by default "checkpoints" in the run's. Raises ConfigError, also when a
        consumer of this run has not acknowledged its step; MemoryFull when the disk is full, and what ``save`` raises: then
        those before count."""
        for consumer in self._consumers:
            step = consumer.current
            if step is not None and step.index >= 0 and step.left > 0:
                raise ConfigError(
                    f"step {step.index} is not acknowledged: ack() it before a checkpoint of the weights that it trained"
                )
        return self._checkpoints(directory, keep).save(save)

    def resume(self, *, directory: str | Path | None = None) -> Point:
        """Where this trainer goes on, asked before its first step: load ``point.path``, publish as ``point.version``, where they
        are not None. Every full step from ``point.step`` on will be leased (again). Of several ranks one asks,
        before any leases. Raises ConfigError where rows that would have to be trained again are gone."""
        return self._checkpoints(directory, 1).resume()

    def _checkpoints(self, directory: str | Path | None, keep: int) -> Checkpoints:
        if directory is None and self.directory is None:
            raise ConfigError("this run has no directory here; say where checkpoints are with directory=")
        where = Path(directory) if directory is not None else Path(self.directory or "") / "checkpoints"
        return Checkpoints(self.queue, where, keep)

    def audit(self) -> Audit:
        """Every row by where it ended; always adds up."""
        return self.queue.audit()

    def wait(self, worker: Worker, *, timeout_s: float = WAIT_S, stall: Stall | None = None) -> None:
        """Wait until a worker has ended. Raises the failure of any worker at once; and DeadlineExceeded, which names the worker and
        says who waits for what, after ``timeout_s`` seconds (a day; ``math.inf`` waits without end), or when ``stall`` has seen no
        step for too long and there is one to be trained."""
        began = time.monotonic()
        while True:
            seen = self._changed.count
            if worker.ended.is_set():
                break
            self.check()
            left_s = min(began + timeout_s - time.monotonic(), stall.left_s if stall is not None else math.inf)
            if left_s <= 0:
                late = stall is not None and stall.left_s <= 0
                if stall is not None and late and not stall.through and is_through(self.queue.status()):
                    stall.through = True
                    continue
                why = str(stall) if late else f"after {timeout_s:g} s: {worker.name} has not ended"
                raise DeadlineExceeded(f"{why}; {what_stands(self.queue.status(), *worker.pids)}")
            self._changed.wait(seen, left_s)
        self.check()

    def check(self) -> None:
        """Raise what made a worker fail for good, if one did."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop the workers started from here, and leave. Idempotent. The process that serves ends the stream, too, and
        cancels rows that no full step holds, unless the run is durable: then whoever serves it again goes on."""
        self._close(end=not (self._server is not None and self._server.durability))

    def _close(self, *, end: bool) -> None:
        if self._connection.wire.closed:
            return
        self._crews.close()
        with contextlib.ExitStack() as ending:  # from the last to the first, whatever fails on the way
            if self._server is not None:
                ending.callback(self._server.close)
                if self.directory is not None:
                    ending.callback(remove_addresses, self.directory, self._server.addresses)
            ending.callback(self._connection.close)
            if self._tracking is not None:
                ending.callback(self._tracking.close)
            ending.callback(self.finish if end else self.stop_workers)
            for updates in self._updates:
                ending.callback(updates.close)

    def _track(self, tracking: Tracking, about: TrackedRun) -> None:
        """Have trackers hear of this run, until it is closed. Of ``serve``."""
        self._tracking = tracking
        tracking.start(about, self._crews.report)

    def tell(self, event: ev.Event) -> None:
        """Have those who listen to the run hear of something. Raises nothing."""
        self._crews.report(event)

    def finish(self) -> None:
        """Stop the workers started from here. The process that serves ends the stream, too, and cancels rows that no
        full step holds; from elsewhere that is ``queue.end(cancel=True)``."""
        try:
            if self._server is not None:
                self.queue.end(cancel=True)
        finally:
            self.stop_workers()

    def dismiss_workers(self, grace_s: float = 60.0) -> None:
        """Have the workers started from here leave: each finishes what it holds, and after ``grace_s`` seconds is stopped.
        Does not wait."""
        for worker in self.workers:
            self._crews.dismiss(worker, grace_s)

    def stop_workers(self) -> None:
        """Stop the workers started from here, all at once and in the middle of what they do; those that do not end within seconds
        are killed."""
        self._crews.stop()

    def kill_workers(self) -> None:
        """End the workers started from here without asking. Does not wait: ``stop_workers`` does."""
        self._crews.kill()

    def join_workers(self, timeout_s: float) -> None:
        """Wait for workers to end by themselves, then stop those that have not; a warning says which, and what stands still.
        Where no row is left to work on, those that have died are not started again."""
        until = time.monotonic() + timeout_s
        if not self.audit().live:
            for worker in self._crews.workers:
                worker.finish()
        for worker in self._crews.workers:
            worker.ended.wait(max(0.0, until - time.monotonic()))
        late = [worker.name for worker in self._crews.workers if not worker.ended.is_set()]
        if late:
            with contextlib.suppress(AsyncFlowError):
                stands = what_stands(self.queue.status())
                text = f"{', '.join(late)} did not end within {timeout_s:g} s and will be stopped; {stands}"
                note = ev.Note(time_s=time.monotonic(), worker=self._connection.name, text=text, level="warning")
                self._connection.report(note)
                self.queue.flush()
        self.stop_workers()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fail(self, error: BaseException) -> None:
        """Something without which the run cannot go on has failed: whoever waits is told."""
        if self.failure is None:
            self.failure = error
            self._changed.set()
            if self._ends_by_failure:
                with contextlib.suppress(AsyncFlowError):
                    self.queue.end(cancel=True)  # whoever waits for rows learns of it now

    @property
    def _ends_by_failure(self) -> bool:
        """Whether a failure here ends the stream: not one that can be gone on with, nor one that is others' too."""
        return self._server is not None and not self._server.durability


def task_arguments(spec: Any) -> dict[str, Any]:
    return {field: getattr(spec, field) for field in spec.__struct_fields__}
