"""A worker process: ``python -m asyncflow_sdk.workflow``. It reads what to be from its first line of
standard input, and ends when that input ends: a worker never outlives its driver.

Exit status: 0 the stream ended; 3 an error that would come again (not restarted); 1 any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..algorithms import AlgorithmSpec, make_algorithm
from ..errors import AsyncFlowError, ConfigError, PluginError, SchemaError, ServerLost, WeightMismatch
from ..interfaces import FATAL_STATUS, WorkerExit
from ..ledger import commands as cmd
from ..memory import directory_at, remove_if_ownerless
from ..plugins import plugin_variables
from ..queue import Connection, LeaseRenewer, QueueClient, open_queue
from ..queue.error_text import plain_text
from ..types import Sampling, Weights
from ..types import events as ev
from ..weights import check_fetching
from ..weights.host import host_of
from ..wire import RunKey
from .engines import loading_model, make_engine
from .user_code import FunctionFailed
from .work import AgentWork, Work

FATAL = (ConfigError, PluginError, SchemaError, WeightMismatch, ModuleNotFoundError)
PATIENCE_S, TRAIN_PATIENCE_S = 3600.0, 86400.0
"""For so long a worker may complete nothing before what it holds is others' (seconds)."""
LAST_WORDS = 32 << 10
"""Most bytes that a worker says of its end: so many fit into a socket that nobody reads yet."""
THROUGH = "through"
"""The last word of a worker that ended with the stream. A process that something made exit with status 0 does not say it."""


class RolloutJob(msgspec.Struct, frozen=True, tag="rollout"):
    engine: str
    model: str
    options: dict[str, Any]
    sampling: Sampling
    prompt: str
    tokenizer: str
    needs_first: bool
    swap: str
    verify: tuple[str, ...]
    task: str = "rollout"
    prefix: str = ""
    agent: AgentWork | None = None
    transport: str = ""
    """By which weights will come; "" where nobody knows yet."""


class StageJob(msgspec.Struct, frozen=True, tag="stage"):
    work: Work
    task: str
    needs: tuple[str, ...]
    gives: tuple[str, ...]
    batch: int
    concurrency: int
    groups: bool


class TrainJob(msgspec.Struct, frozen=True, tag="train"):
    engine: str
    model: str
    algorithm: AlgorithmSpec
    options: dict[str, Any]
    export: str
    weights: Weights
    checkpoints: str = ""
    """Where they are; "" for none."""
    every: int = 50
    keep: int = 2
    needs: tuple[str, ...] = ()
    """The columns of its batches."""


class Rank(msgspec.Struct, frozen=True):
    """Which of the processes of one trainer this is."""

    rank: int = 0
    world_size: int = 1


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is told: its name, the server, and its job."""

    name: str
    address: str
    job: RolloutJob | StageJob | TrainJob
    path: list[str]
    """The driver's import path, so that a function importable there is importable here."""
    key: RunKey | None = None
    """What the driver itself came in with, over tcp."""
    insecure: bool = False
    """The driver came in over tcp without a key."""
    plugins: dict[str, str] = msgspec.field(default_factory=plugin_variables)
    """The variables by which the driver's plugins were chosen."""
    rank: Rank = Rank()


class WorkerMain:
    """One worker, in this process. ``run`` is called once; ``leave`` from any thread, at any time. ``work``: what it does
    instead of the job that the configuration names."""

    def __init__(self, config: bytes, work: Callable[[QueueClient], None] | None = None) -> None:
        self.config = msgspec.json.decode(config, type=WorkerConfig)
        self.directory = directory_at(self.config.address)
        """Where the run's shared memory lies, as soon as that is known and where it is in sight."""
        self._work = work or (lambda queue: _work(queue, self.config.job, self.config.rank))
        self._connection: Connection | None = None
        self._leaving = False

    def run(self) -> WorkerExit:
        """Work until the stream ends. Raises nothing: what goes wrong is in the ending, and in the log."""
        try:
            config = self.config
            connection = Connection(config.address, config.name, key=config.key, insecure=config.insecure)
        except Exception as error:
            return _ending(error)
        if not connection.inline:
            self.directory = connection.directory
        self._connection = connection
        sys.path += [entry for entry in self.config.path if entry not in sys.path]
        for name, value in self.config.plugins.items():  # a launcher may hand no environment on; a place's own counts
            os.environ.setdefault(name, value)
        queue = open_queue(connection)
        renewing = LeaseRenewer(connection, TRAIN_PATIENCE_S if isinstance(self.config.job, TrainJob) else PATIENCE_S)
        try:
            ending = self._do(queue, connection, renewing)
            try:
                queue.flush()
            except ServerLost:
                if not (ending.status or connection.wire.server_closed):
                    raise
            connection.close()
        except Exception as error:  # the server is gone
            return _ending(error)
        finally:
            renewing.close()
        return ending

    def _do(self, queue: QueueClient, connection: Connection, renewing: LeaseRenewer) -> WorkerExit:
        _state(connection, "starting")
        try:
            if not self._leaving:
                self._work(queue)
        except (Exception, SystemExit) as error:  # an engine that exits has not ended the stream
            if isinstance(error, ServerLost) and connection.wire.server_closed and not renewing.holds:
                return WorkerExit(0)  # a run that is closed has ended, for who held nothing of it
            ending = _ending(error)
            _state(connection, "failed", ending.text)
            return ending
        _state(connection, "stopped")
        return WorkerExit(0)

    def leave(self) -> None:
        """Be given nothing more: it ends when it is through with what it holds. Does not wait."""
        self._leaving = True
        if self._connection is not None:
            threading.Thread(target=self._dismiss, args=(self._connection,), daemon=True).start()

    def _dismiss(self, connection: Connection) -> None:
        with contextlib.suppress(AsyncFlowError):  # it may have ended, or the run
            open_queue(connection).send(cmd.Dismiss())


def run_worker(config: bytes) -> WorkerExit:
    """Be the worker that a ``WorkerSpec`` configures, in this process, until the stream ends. Blocks; raises nothing.
    For launchers: the caller sees to it that the process ends with its driver."""
    return WorkerMain(config).run()


def main() -> int:
    """The worker that standard input names."""
    # Hazard: tokenizers wakes a thread a core for a few short texts, which takes longer than they do; its place may say otherwise.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    line = _first_line()
    if not line:  # the driver died before it had said what to be
        return 0
    worker = WorkerMain(line)
    threading.Thread(target=_end_with_driver, args=(worker,), daemon=True).start()
    ending = worker.run()
    with contextlib.suppress(OSError):  # a pipe cannot be answered on
        os.write(0, (ending.text if ending.status else THROUGH).encode()[-LAST_WORDS:])
    return ending.status


def _ending(error: BaseException) -> WorkerExit:
    if isinstance(error, FunctionFailed):  # whose message has the user's frames, and the SDK's would hide them
        whole = text = str(error)
    else:
        whole = "".join(traceback.format_exception(error))
        text = "".join(traceback.format_exception(error, limit=-12))
    text = plain_text(text, LAST_WORDS // 4)
    with contextlib.suppress(OSError):  # a disk that is full may be why
        print(plain_text(whole, len(whole)).rstrip(), file=sys.stderr)
    return WorkerExit(FATAL_STATUS if isinstance(error, FATAL) else 1, text)


def _work(queue: QueueClient, job: RolloutJob | StageJob | TrainJob, rank: Rank) -> None:
    from .checkpoint import Checkpoints
    from .rank_communicator import RankCommunicator
    from .stage_worker import run_stage
    from .train_worker import train

    connection = queue.connection
    if isinstance(job, StageJob):
        _state(connection, "ready")
        run_stage(
            queue, job.work, task=job.task, needs=job.needs, gives=job.gives, batch=job.batch,
            concurrency=job.concurrency, groups=job.groups,
        )  # fmt: skip
    elif isinstance(job, TrainJob):
        algorithm = make_algorithm(job.algorithm)
        lacking = [name for name in algorithm.needs if name not in job.needs]
        if lacking:  # the driver did not know, as only this interpreter has it
            raise ConfigError(
                f"algorithm {job.algorithm.label!r} needs columns that the trainer is not given: say Train(..., needs={lacking})"
            )
        with loading_model(queue, "train"):
            engine = make_engine("train", job.engine, model=job.model, algorithm=algorithm, **job.options)
        unknown = [name for name in algorithm.asks if name not in engine.computes]
        if unknown:
            raise ConfigError(
                f"algorithm {job.algorithm.label!r} asks its engine for {', '.join(unknown)}, which engine {job.engine!r} does"
                f" not compute; it computes {', '.join(engine.computes) or 'nothing for algorithms'}"
            )
        _state(connection, "ready")
        ranks = RankCommunicator(queue, "train", rank.rank, rank.world_size)
        checkpoints = Checkpoints(queue, Path(job.checkpoints), job.keep, ranks) if job.checkpoints else None
        train(
            queue, engine, weights=job.weights, export=Path(job.export) if job.export else None,
            checkpoints=checkpoints, every=job.every, ranks=ranks, model=job.model,
        )  # fmt: skip
    else:
        asyncio.run(_rollout(queue, job))


async def _rollout(queue: QueueClient, job: RolloutJob) -> None:
    from .agent import Agent
    from .producer import EngineProducer
    from .tokenizer import Tokenizer

    with loading_model(queue, job.task):
        engine = make_engine("rollout", job.engine, model=job.model, **job.options)
    text = Tokenizer(job.tokenizer) if job.tokenizer else None
    agent = Agent.of(job.agent) if job.agent is not None else None
    producer = EngineProducer(
        queue, engine, task=job.task, prefix=job.prefix, sampling=job.sampling, prompt=job.prompt, text=text, needs_first=job.needs_first,
        swap=job.swap, verify=job.verify, agent=agent,
    )  # fmt: skip
    connection = queue.connection
    if job.transport:
        host = host_of(connection, f"{connection.session}-trial")
        check_fetching(f"engine {job.engine!r}", engine.capabilities, job.transport, host)
    _state(connection, "ready")
    await producer.run()


def _state(connection: Connection, state: str, detail: str = "") -> None:
    connection.report(
        ev.WorkerState(time_s=time.monotonic(), worker=connection.name, state=state, pid=os.getpid(), detail=detail)
    )


def _first_line() -> bytes:
    """Read unbuffered: a thread that sat in a buffered read at exit would abort the interpreter."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 65536)
        if not byte:
            break
        line += byte
    return line


def _end_with_driver(worker: WorkerMain) -> None:
    """End this process when its standard input ends: the driver, which has the other end, asks to stop, or is gone. Only the worker
    of a driver that is gone cleans up after it; a driver that lives does so itself, and waits for this process."""
    while os.read(0, 4096):
        pass
    if _is_gone(0):
        if worker.directory is not None:
            remove_if_ownerless(worker.directory, wait_s=5.0)  # the lock falls a moment after the pipe
        if os.getpgid(0) == os.getpid():  # what this worker started
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _is_gone(line: int) -> bool:
    """Whether nobody has the other end of a socket any more; who only asks to stop has."""
    looked = select.poll()
    looked.register(line, 0)
    return any(what & select.POLLHUP for _, what in looked.poll(0))
