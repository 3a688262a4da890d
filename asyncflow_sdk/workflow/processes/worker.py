"""WorkerRuntime: one worker in this process or thread, from its WorkerSpec to its exit.

exit = run_worker(spec.config)                # in a process that a launcher started

``python -m asyncflow_sdk.workflow`` is the process started by the launcher "process". Its standard input is a socket
to the driver, whose first line is the WorkerSpec. The process ends when the socket ends, so a worker never outlives
its driver, and writes its last report to the socket. Exit status: 0: the stream ended; 3: an error that would recur,
no restart; 1: any other error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

import msgspec

from ...algorithms import make_algorithm
from ...errors import AsyncFlowError, ConfigError, MemoryFull, PluginError, SchemaError, ServerLost, WeightMismatch
from ...interfaces import (
    FATAL_STATUS,
    SAMPLING_MASK,
    Launcher,
    Placement,
    WorkerExit,
    WorkerHandle,
    WorkerSettings,
    WorkerSpec,
)
from ...ledger import commands as cmd
from ...memory import directory_at, remove_if_ownerless
from ...queue import Connection, LeaseRenewer, QueueClient, open_queue
from ...queue.protocol import error_text, plain_text, trace_text
from ...types import Weights
from ...types import events as ev
from ...weights import AUTO, make_transport
from ...weights.host import host_of
from ...wire import RunKey
from ..loops.engine_gateway import gives_of
from ..loops.engines import check_mask, loading_model, make_engine, whole_step_text
from ..loops.producer import EngineProducer
from ..loops.tokenizer import Tokenizer, end_tokens
from ..loops.train_worker import train
from ..loops.user_code import CallLimit, user_error_text
from ..serialization import from_json
from ..specs import Rollout, Stage, Train
from .launchers import COMPLETED, REPORT_BYTES
from .ranks import RankCommunicator, join_ranks

FATAL = (ConfigError, MemoryFull, PluginError, SchemaError, WeightMismatch, ModuleNotFoundError)
PATIENCE_S, TRAIN_PATIENCE_S = 3600.0, 86400.0  # a worker without progress keeps its leases this long (seconds)
TRACEBACK_BYTES = 8 << 10  # length of the traceback in a worker's exit


class WorkerRuntime:
    """Connects a worker to its run and works until the stream ends. ``stage``: an object of this process to work as,
    instead of the spec's role. ``expire``: an argument of ``CallLimit``. ``run`` is called once; ``leave`` is
    thread-safe."""

    def __init__(
        self, spec: WorkerSpec, stage: Stage | None = None, expire: Callable[[str], None] | None = None
    ) -> None:
        self.spec, self._expire = spec, expire
        self.directory = directory_at(spec.address)
        """The run's shared memory; None while unknown, or if it is on another host."""
        self._stage = stage
        self._connection: Connection | None = None
        self._renewer: LeaseRenewer | None = None
        self._leaving = False

    def run(self) -> WorkerExit:
        """Work until the stream ends. Raises nothing: errors are in the exit and in the log."""
        try:
            spec = self.spec
            key = None if spec.key is None else msgspec.convert(spec.key, RunKey)
            connection = Connection(spec.address, spec.name, key=key, insecure=spec.insecure, start_unit=True)
        except Exception as error:
            return _exit_of(error)
        self.directory = connection.directory or self.directory
        self._connection = connection
        sys.path += [entry for entry in spec.import_path if entry not in sys.path]
        for name, value in spec.plugins.items():  # the environment of the placement has precedence
            os.environ.setdefault(name, value)
        queue = open_queue(connection)
        try:
            ending = self._work(queue, connection)
            try:
                with contextlib.suppress(MemoryFull):  # its events are delivered all the same
                    queue.flush()
            except ServerLost:
                if not (ending.status or connection.wire.server_closed):
                    raise
            connection.close()
        except Exception as error:  # the server is gone
            return _exit_of(error)
        finally:
            if self._renewer is not None:
                self._renewer.close()
        return ending

    def leave(self) -> None:
        """Lease nothing more and end after the rows held now. Does not wait."""
        self._leaving = True
        if self._connection is not None:
            threading.Thread(target=self._dismiss, args=(self._connection,), daemon=True).start()

    def _dismiss(self, connection: Connection) -> None:
        with contextlib.suppress(AsyncFlowError):  # the worker or the run may have ended
            open_queue(connection).send(cmd.Dismiss())

    def _work(self, queue: QueueClient, connection: Connection) -> WorkerExit:
        _report_state(connection, "starting")
        try:
            if not self._leaving:
                self._work_as(self._stage or from_json(self.spec.role), queue)
        except (Exception, SystemExit) as error:  # SystemExit: of an engine, before the stream has ended
            holds = self._renewer is not None and self._renewer.holds
            if isinstance(error, ServerLost) and connection.wire.server_closed and not holds:
                return WorkerExit(0)  # the run was closed, and this worker held nothing
            ending = _exit_of(error)
            _report_state(connection, "failed", ending.text)
            return ending
        _report_state(connection, "stopped")
        return WorkerExit(0)

    def _work_as(self, role: Rollout | Stage | Train, queue: QueueClient) -> None:
        role.find_model()  # the cache of a host that did not download it may lack it
        trains = isinstance(role, Train)
        ranks = RankCommunicator(queue, self.spec.group, self.spec.rank, self.spec.world_size)
        join_ranks(ranks, queue.connection, self.spec.placement.env)
        self._renewer = LeaseRenewer(queue.connection, TRAIN_PATIENCE_S if trains else PATIENCE_S)
        if isinstance(role, Rollout):
            asyncio.run(_generate(role, self.spec.settings, queue))
        elif isinstance(role, Train):
            _train(role, self.spec, queue, ranks)
        else:
            _report_state(queue.connection, "ready")
            role.run_declared(queue, ranks, CallLimit(role.timeout_s, self._expire))


def run_worker(config: bytes) -> WorkerExit:
    """Run the worker of a ``WorkerSpec`` in this process until the stream ends. Blocks; raises
    nothing. The calling launcher must end this process when the driver ends."""
    try:
        return WorkerRuntime(WorkerSpec.decoded(config)).run()
    except msgspec.MsgspecError as error:
        return _exit_of(ConfigError(f"the config is no WorkerSpec: {error}"))


async def _generate(rollout: Rollout, settings: WorkerSettings, queue: QueueClient) -> None:
    weights, connection = settings.weights or Weights(), queue.connection
    with loading_model(queue, rollout.task):
        engine = make_engine("rollout", rollout.engine, model=rollout.model, **rollout.options)
    if gives_of(engine, rollout.sampling).keys() != set(rollout.columns):
        gives, declared = sorted(engine.gives), sorted({*rollout.columns} - {*SAMPLING_MASK})
        text = f"engine {rollout.engine!r} gives columns {gives}, and its adapter declares {declared}"
        raise ConfigError(f"{text}: say AdapterSpec(..., can={{'gives': {gives}}})")
    ends = [*end_tokens(rollout.model or "-"), *rollout.sampling.stop_ids] if rollout.keep_special else None
    producer = EngineProducer(
        queue, engine, task=rollout.task, prefix=rollout.prefix, sampling=rollout.sampling, prompt=rollout.prompt,
        text=Tokenizer(rollout.tokenizer, ends) if rollout.tokenizer else None, chat=rollout.chat,
        agent=rollout.agent, needs_first=settings.needs_first, swap=settings.swap or rollout.swap or weights.swap,
        verify=tuple(weights.verify if rollout.verify is None else rollout.verify), samplings=settings.samplings,
        trained=rollout.admits, prompt_limit=settings.prompt_limit,
    )  # fmt: skip
    if weights.transport != AUTO:
        host = host_of(connection, f"{connection.session}-trial")
        takes = engine.capabilities.transports
        if takes is not None and weights.transport not in takes:
            text = f"engine {rollout.engine!r} cannot take weights by {weights.transport}, only by"
            raise ConfigError(f"{text} {', '.join(sorted(takes)) or 'nothing'}; say Weights(transport=...)")
        make_transport(weights.transport).receiver(host).close()  # raises if this engine cannot fetch here
    _report_state(connection, "ready")
    await producer.run()


def _train(role: Train, spec: WorkerSpec, queue: QueueClient, ranks: RankCommunicator) -> None:
    settings, name = spec.settings, role.algorithm_spec.label
    algorithm = make_algorithm(role.algorithm_spec)
    lacking = [column for column in algorithm.needs if column not in spec.role["needs"]]
    if lacking:  # the driver could not make the algorithm, so its task lacks them
        text = f"algorithm {name!r} needs columns that the trainer is not given: say Train(..., needs={lacking})"
        raise ConfigError(text)
    with loading_model(queue, "train"):
        engine = make_engine("train", role.engine, model=role.model, algorithm=algorithm, **role.options)
    unknown = [number for number in algorithm.asks if number not in engine.computes]
    if unknown:
        text = f"algorithm {name!r} asks its engine for {', '.join(unknown)}, which engine {role.engine!r} does not"
        raise ConfigError(f"{text} compute; it computes {', '.join(engine.computes) or 'nothing for algorithms'}")
    check_mask(type(engine).__name__, engine.sampling_mask, spec.role["needs"])
    if role.stream and engine.whole_step:
        raise ConfigError(whole_step_text(role.engine, engine.whole_step))
    train(queue, engine, role, settings, ranks, lambda: _report_state(queue.connection, "ready"))


def _exit_of(error: BaseException) -> WorkerExit:
    """Return the exit for an error, and print its whole traceback into the log."""
    whole = "".join(traceback.format_exception(error))
    text = plain_text(f"{error_text(error)}\n{trace_text(error, error.__traceback__, 12)}", TRACEBACK_BYTES)
    with contextlib.suppress(OSError):  # the disk may be full
        print(plain_text(whole, len(whole)).rstrip(), file=sys.stderr)
    return WorkerExit(FATAL_STATUS if isinstance(error, FATAL) else 1, text)


def _report_state(connection: Connection, state: str, detail: str = "") -> None:
    connection.report(
        ev.WorkerState(time_s=time.monotonic(), worker=connection.name, state=state, pid=os.getpid(), detail=detail)
    )


# ---- in a process


def main() -> int:
    """Run the worker given by standard input. Returns the exit status."""
    # Hazard: for a few short texts tokenizers wakes one thread a core, slower than one. The placement may set it.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: a thread in a buffered read at exit would abort the interpreter
        more = os.read(0, 65536)
        if not more:  # the driver died before it sent the spec
            return 0
        line += more
    worker = WorkerRuntime(WorkerSpec.decoded(line))
    threading.Thread(target=_end_with_driver, args=(worker,), daemon=True).start()
    ending = worker.run()
    with contextlib.suppress(OSError):  # a pipe cannot be written to
        os.write(0, (ending.text if ending.status else COMPLETED).encode()[-REPORT_BYTES:])
    return ending.status


def _end_with_driver(worker: WorkerRuntime) -> None:
    """End this process when the driver asks for it or is gone. If it is gone, remove the run's
    memory and this worker's children; a living driver does so itself."""
    while os.read(0, 4096):
        pass
    poll = select.poll()
    poll.register(0, 0)
    if any(what & select.POLLHUP for _, what in poll.poll(0)):  # no process holds the other end of the socket
        if worker.directory is not None:
            remove_if_ownerless(worker.directory, wait_s=5.0)  # the driver's lock ends after its socket
        if os.getpgid(0) == os.getpid():  # the session of this worker's children
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


# ---- in a thread


class ThreadLauncher(Launcher):
    """Workers in threads of this process, for tests, notebooks, and functions without an import path. They share its
    interpreter and its GIL. A thread cannot be killed: it is abandoned. ``stage``: every worker runs this object, in
    spite of its placement."""

    def __init__(self, stage: Stage | None = None) -> None:
        self._stage = stage

    def check(self, placement: Placement) -> None:
        """Refuse settings of a process. Raises ConfigError."""
        given = [name for name in ("python", "env", "cpus", "gpus", "hosts") if getattr(placement, name)]
        if given and self._stage is None:
            text = "a thread has the interpreter, the environment and the CPUs of its driver"
            raise ConfigError(f"{given[0]}= is for workers in processes; {text}")

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a thread."""
        return _ThreadHandle(spec, self._stage)

    def start_ranks(self, specs: Sequence[WorkerSpec]) -> Sequence[WorkerHandle]:
        """Raise ConfigError: ranks need an environment each."""
        raise ConfigError("threads share the environment of their process, so they cannot be ranks")


class _ThreadHandle(WorkerHandle):
    def __init__(self, spec: WorkerSpec, stage: Stage | None) -> None:
        self.pid, self.host = os.getpid(), socket.gethostname()
        self._worker = WorkerRuntime(spec, stage, lambda reason: self._end(WorkerExit(FATAL_STATUS, reason)))
        self._exit: Future[WorkerExit] = Future()
        threading.Thread(target=self._run, name=spec.name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._end(self._worker.run())
        except BaseException as error:  # a user's function may raise KeyboardInterrupt: it ends this thread only
            self._end(WorkerExit(1, user_error_text(error_text(error), error)))

    def _end(self, how: WorkerExit) -> None:
        with contextlib.suppress(InvalidStateError):  # a thread that was abandoned may still end
            self._exit.set_result(how)

    def wait(self) -> WorkerExit:
        """Wait for the thread, or for ``kill``."""
        return self._exit.result()

    def stop(self) -> None:
        """Let the worker finish the rows it holds."""
        self._worker.leave()

    def kill(self) -> None:
        """Abandon the thread: it ends by itself or with its process."""
        self._end(WorkerExit(1, "its thread was left behind"))
