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
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from ..errors import AsyncFlowError, ConfigError, DeadlineExceeded, Ended, WorkerFailed
from ..interfaces import TRAIN_COLUMNS, Sampler
from ..ledger import Audit
from ..ledger import commands as cmd
from ..queue import Connection, LeasedBatch, QueueServer, Recovered, TransferQueue, open_queue
from ..queue._once import drive
from ..types import Batch, Event, Weights
from ..weights import OwnUpdates, WeightPublisher
from ..weights.arguments import version_number
from ..wire import MAX_BYTES, ServerKeys, on_loopback, server_keys
from .address import find_address, remove_addresses, write_addresses
from .consumer import Consumer
from .data import Feeder, Prompts, load_prompts
from .launch import GRACE_S, LocalProcess
from .specs import Rollout, Stage, Train
from .worker import RolloutJob, StageJob, TrainJob, WorkerConfig

_DEFAULT = Weights()
LOOK_S = 5.0
"""How long a consumer may not see that a worker has failed, where that does not end the stream."""


class Run:
    """A connection to a run: its queue, its weights, and the workers started from here. Thread-safe."""

    def __init__(
        self, connection: Connection, server: QueueServer | None = None, directory: Path | None = None
    ) -> None:
        self.queue: TransferQueue = open_queue(connection)
        self.directory = directory
        self._connection = connection
        self._server = server
        self._workers: list[Worker] = []
        self._counts: dict[str, int] = {}
        self._feeds: set[str] = set()
        self._updates: list[OwnUpdates] = []
        self._changed = threading.Event()  # a worker ended, or something failed
        self.failure: BaseException | None = None

    @property
    def address(self) -> str:
        """What ``connect`` takes."""
        return self._connection.wire.address if self._server is None else self._server.addresses[-1]

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
        if isinstance(spec, Train):
            return [self._launch(spec, "train", self._train_job(spec, **job))]
        declared = spec.declare()
        self.queue.declare(**task_arguments(declared))
        if isinstance(spec, Rollout):
            return [self._launch(spec, spec.task, self._rollout_job(spec, **job)) for _ in range(spec.replicas)]
        work = spec.job()
        if work is None:
            return [self._thread(spec)]
        todo = StageJob(work, spec.task, spec.needs, spec.gives, spec.batch, spec.concurrency, spec.whole_groups)
        return [self._launch(spec, spec.task, todo)]

    def consumer(
        self,
        task: str = "train",
        *,
        batch_size: int | None = None,
        count: int = 1,
        needs: tuple[str, ...] = TRAIN_COLUMNS,
        timeout_s: float = 3600.0,
        lease_s: float = 86400.0,
        sampler: str | tuple[str, Mapping[str, Any]] | None = None,
        team: str = "",
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
        ranks = {"team": team or task, "rank": rank, "world_size": world_size, "shards": shards}
        return _Watched(
            self, self.queue, task, count=count, timeout_s=timeout_s, ranks=ranks if world_size > 1 else None
        )

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

    def weight_publisher(self, transport: str = "shm", **options: Any) -> WeightPublisher:
        """The publishing end for a trainer in this process. ``options``: of ``WeightPublisher`` (rank, world_size, dtype, ...),
        and of the transport. Raises ConfigError where another publishes, and for a transport that cannot work from here."""
        return WeightPublisher(self.queue, transport, **options)

    def weight_updates(
        self,
        *,
        loaded: int | None = None,
        timeout_s: float = 3600.0,
        fetch_timeout_s: float = 600.0,
        rename: Callable[[str], str] | None = None,
    ) -> OwnUpdates:
        """New versions for an engine of one's own: ``for update in run.weight_updates(): with update: ...``. See ``OwnUpdates``.

        Versions are fetched and verified in the background from now on; until they are closed this connection is a
        replica, and no other on it: ConfigError. ``loaded``: the
        version that its engine has already. ``timeout_s``: the longest it waits for one; ``fetch_timeout_s``: the longest
        that fetching one may take. ``rename``: from the names of the checkpoint to the engine's."""
        updates = OwnUpdates(
            self.queue, loaded=loaded, timeout_s=timeout_s, fetch_timeout_s=fetch_timeout_s, rename=rename
        )
        self._updates.append(updates)
        return updates

    def rollback(self, version: int, reason: str = "") -> int:
        """Make the weights of a version that is kept current again, under a new number, which is returned. Rows that were
        generated by the versions given up expire. ``reason``: for people. Raises ConfigError, which says which are kept, for
        one that is not."""
        reply = drive(self.queue._port.send(cmd.Rollback(version=version_number(version), reason=reason)))
        return int(reply.version)

    def audit(self) -> Audit:
        """Every row by where it ended; always adds up."""
        return self.queue.audit()

    def wait(self, worker: Worker) -> None:
        """Wait until a worker has ended. Raises the failure of any worker at once."""
        while not worker.ended.is_set():
            self.check()
            self._changed.wait()
            self._changed.clear()
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
        try:
            for updates in self._updates:
                updates.close()
            self.finish() if end else self.stop_workers()
        finally:
            self._connection.close()
            if self._server is not None:
                if self.directory is not None:
                    remove_addresses(self.directory, self._server.addresses)
                self._server.close()

    def finish(self) -> None:
        """Stop the workers started from here. The process that serves ends the stream, too, and cancels rows that no
        full step holds; from elsewhere that is ``queue.end(cancel=True)``."""
        if self._server is not None:
            self.queue.end(cancel=True)
        self.stop_workers()

    def stop_workers(self) -> None:
        """Stop the workers started from here; those that do not end within seconds are killed."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(GRACE_S)

    def join_workers(self, timeout_s: float) -> None:
        """Wait for workers to end by themselves, then stop those that have not."""
        until = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.ended.wait(max(0.0, until - time.monotonic()))
        self.stop_workers()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- workers

    def _rollout_job(self, spec: Rollout, needs_first: bool = False, weights: Weights = _DEFAULT) -> RolloutJob:
        return RolloutJob(
            spec.engine, spec.model, spec.options, spec.sampling, spec.prompt, spec.tokenizer, needs_first,
            spec.swap or weights.swap, tuple(weights.verify if spec.verify is None else spec.verify), spec.task, spec.prefix,
        )  # fmt: skip

    def _train_job(self, spec: Train, export: str = "", weights: Weights | None = None) -> TrainJob:
        return TrainJob(
            spec.engine, spec.model, spec.algorithm, spec.options, export, weights or spec.weights or Weights()
        )

    def _launch(self, spec: Rollout | Stage | Train, role: str, job: RolloutJob | StageJob | TrainJob) -> Worker:
        name = self._name(role)
        config = WorkerConfig(name, self._near, job, _own_path(), self._connection.wire.key)
        log = (self.directory or Path(".")) / "logs" / f"{name}.log"
        self._workers.append(LocalProcess(config, spec.place, log, self._report, self.fail, self._changed.set))
        return self._workers[-1]

    def _thread(self, spec: Stage) -> Worker:
        connection = Connection(self._near, self._name(spec.task), key=self._connection.wire.key)
        self._workers.append(_Thread(spec, connection, self.fail, self._changed.set))
        return self._workers[-1]

    def _name(self, role: str) -> str:
        number = self._counts.get(role, 0)
        self._counts[role] = number + 1
        return f"{role}-{number}"

    def _report(self, event: Event) -> None:
        self._connection.report(event)
        with contextlib.suppress(AsyncFlowError):  # the run may be over
            self.queue.flush()

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


class Worker(Protocol):
    """A worker started from here. ``ended`` is set when it has."""

    name: str
    ended: threading.Event

    def stop(self) -> None: ...

    def join(self, timeout_s: float) -> bool: ...


class _Watched(Consumer):
    """A consumer that raises a worker's failure instead of waiting for rows that will not come."""

    def __init__(self, run: Run, queue: TransferQueue, task: str, **options: Any) -> None:
        super().__init__(queue, task, **options)
        self._run = run

    def _get(self) -> LeasedBatch:
        if self._run._ends_by_failure:
            try:
                return super()._get()
            except Ended:
                self._run.check()
                raise
        began, whole_s = time.monotonic(), self._timeout_s
        try:
            while True:  # a failure here wakes nobody at the server
                self._run.check()
                left_s = began + whole_s - time.monotonic()
                self._timeout_s = min(LOOK_S, left_s)
                try:
                    return super()._get()
                except DeadlineExceeded as error:
                    if left_s <= LOOK_S:
                        why = str(error).partition(": ")[2]
                        raise DeadlineExceeded(f"after {time.monotonic() - began:.1f} s: {why}") from None
        finally:
            self._timeout_s = whole_s


class _Thread:
    """A stage whose function no other process can import, in a thread of this one."""

    def __init__(
        self,
        spec: Stage,
        connection: Connection,
        on_failure: Callable[[BaseException], None],
        on_end: Callable[[], None],
    ) -> None:
        self.name = connection.name
        self.ended = threading.Event()
        self._stopping, self._on_end = False, on_end
        self._spec, self._connection, self._on_failure = spec, connection, on_failure
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def stop(self) -> None:
        """The end of the stream ends it; there is nothing else to tell a thread."""
        self._stopping = True

    def join(self, timeout_s: float) -> bool:
        return self.ended.wait(timeout_s)

    def _work(self) -> None:
        try:
            self._spec.run(open_queue(self._connection))
            self._connection.close()
        except Exception as error:
            if not self._stopping:
                self._on_failure(WorkerFailed(f"stage {self.name!r} failed: {error}", self.name))
        finally:
            self.ended.set()
            self._on_end()


def serve(
    directory: str | Path | None = None,
    *,
    address: str | None = None,
    key: str | os.PathLike[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
    on_step: Callable[[int, Callable[[], Batch]], None] | None = None,
    name: str = "driver",
    max_staleness: int = 1,
    capacity_rows: int = 100_000,
    capacity_bytes: int | None = None,
    steps: int | None = None,
    keep_versions: int = 2,
    max_swapping: int = 0,
    quorum: int = 0,
    durability: Literal["process", "host"] | None = None,
    max_call_bytes: int = MAX_BYTES,
    samplers: Mapping[str, Callable[..., Sampler]] | None = None,
) -> Run:
    """Serve a run from this process. ``directory``: where workers log. ``address``: also listen there
    (``tcp://127.0.0.1:0`` picks a port); a socket of the run is always there. ``capacity_bytes``: of payload alive
    at once; by default half of what is free where the segments lie.

    An address that other hosts may reach (``tcp://0.0.0.0:7000``) is served with keys: ``server.key`` and ``run.key``
    in ``directory``, made there unless they are; clients get a copy of ``run.key``. ``key``: another path for
    ``server.key``; given, an address on loopback has keys too. ``max_call_bytes``: most that a client there may put or
    complete in one call.

    ``keep_versions``: so many versions of the weights, the newest, can be fetched and rolled back to. ``max_swapping``: so many
    replicas load one at once (0: all). ``quorum``: so many must have it staged before any loads it (0: none).

    ``samplers``: those of this process by name, beside the installed ones.

    ``durability``: what was acknowledged survives the kill of any process ("process"), or of the host too ("host",
    which waits for the disk): a journal is kept in ``directory``, and whoever serves the same directory again goes on
    where that run died, with the limits it had; clients that still live just wait for it. ``run.recovered`` tells what
    was found. Raises ConfigError, also while another process serves it.
    """
    path = Path(directory) if directory is not None else None
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
    if durability not in (None, "process", "host"):
        raise ConfigError(f'durability is "process" or "host", not {durability!r}')
    if durability is not None and path is None:
        raise ConfigError(f'a run of durability "{durability}" needs a directory for its journal')
    journal = path / "journal" if path is not None and (durability or (path / "journal").is_dir()) else None
    keys = _keys(path, address, key)
    server = QueueServer(
        [address] if address else [], on_event=on_event, on_step=on_step, journal=journal, durability=durability,
        keys=keys, max_call_bytes=max_call_bytes, samplers=samplers,
    )  # fmt: skip
    try:
        run = Run(Connection(server.here, name), server, path)
        if capacity_bytes is None:
            room = os.statvfs(server.rows)
            capacity_bytes = max(room.f_bavail * room.f_frsize // 2, 1)
        if server.recovered is None:
            run.queue.configure(
                max_staleness=max_staleness, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes, steps=steps,
                keep_versions=keep_versions, max_swapping=max_swapping, quorum=quorum,
            )  # fmt: skip
        if path is not None:
            write_addresses(path, server.addresses)
    except BaseException:
        server.close()
        raise
    return run


def connect(
    address: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str] | None = None,
    shared_memory: bool = True,
    name: str = "client",
    timeout_s: float = 30.0,
) -> Run:
    """Connect to a run: by its address or, on its own host, by its directory while it is served.

    ``key``: the path of a copy of the run's ``run.key``, which a run that other hosts can reach asks for.
    ``shared_memory`` False: send values over the socket even where the server's memory is in sight, as it is done
    anyway from another host. ``timeout_s``: the longest it waits for a server, which may start meanwhile. Raises
    ConfigError, AccessDenied, ServerLost, ProtocolError.
    """
    return Run(Connection(find_address(address), name, key=key, shared_memory=shared_memory, timeout_s=timeout_s))


def _keys(directory: Path | None, address: str | None, key: str | os.PathLike[str] | None) -> ServerKeys | None:
    """The keys to serve an address with; None for one that needs none."""
    tcp = address is not None and address.startswith("tcp:")
    if key is not None and not tcp:
        raise ConfigError(
            f"key= is for a tcp address; {address or 'the socket of a run'} is on this host and needs none"
        )
    if key is not None:
        return server_keys(Path(key), (directory or Path(key).parent) / "run.key")
    if directory is None or address is None or not tcp or on_loopback(address):
        return None
    return server_keys(directory / "server.key", directory / "run.key")


def _own_path() -> list[str]:
    """Where this process imports the user's modules from; an interpreter's own packages are its own."""
    homes = tuple({os.path.abspath(home) for home in (sys.prefix, sys.base_prefix)})
    entries = (os.path.abspath(entry or ".") for entry in sys.path)
    return [entry for entry in entries if not entry.startswith(homes)]


def task_arguments(spec: Any) -> dict[str, Any]:
    return {field: getattr(spec, field) for field in spec.__struct_fields__}
