"""WorkerRuntime: one worker in this process or thread, from its WorkerSpec to its exit.

exit = run_worker(spec.config)                # in a process that a launcher started
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from ...algorithms import make_algorithm
from ...errors import AsyncFlowError, ConfigError, MemoryFull, PluginError, SchemaError, ServerLost, WeightMismatch
from ...interfaces import FATAL_STATUS, SAMPLING_MASK, WorkerExit, WorkerSettings, WorkerSpec
from ...ledger import commands as cmd
from ...memory import directory_at
from ...queue import Connection, LeaseRenewer, QueueClient, open_queue
from ...queue.protocol import error_text, plain_text, trace_text
from ...types import Weights
from ...types import events as ev
from ...weights import AUTO, make_transport
from ...weights.host import host_of
from ...wire import RunKey
from ..checkpoint import Checkpoints
from ..model_folder import StepFolders
from ..rollout.engine_columns import gives_of
from ..rollout.producer import EngineProducer
from ..rollout.tokenizer import Tokenizer, end_tokens
from ..serialization import from_json
from ..specs import Rollout, Stage, Train
from .call_limit import CallLimit
from .engines import check_mask, loading_model, make_engine, whole_step_text
from .rank_communicator import RankCommunicator
from .ranks import join_ranks
from .train_worker import train

FATAL = (ConfigError, MemoryFull, PluginError, SchemaError, WeightMismatch, ModuleNotFoundError)
PATIENCE_S, TRAIN_PATIENCE_S = 3600.0, 86400.0
"""A worker without progress keeps its leases this long (seconds)."""
TRACEBACK_BYTES = 8 << 10
"""Length of the traceback in a worker's exit."""


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
            limit = CallLimit(role.timeout_s, self._expire)
            role.run_declared(queue, ranks, limit) if self._stage is None else role.run(queue, limit)


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
        raise ConfigError(
            f"engine {rollout.engine!r} gives columns {sorted(engine.gives)}, and its adapter declares"
            f" {sorted({*rollout.columns} - {*SAMPLING_MASK})}: say AdapterSpec(..., can={{'gives': {sorted(engine.gives)}}})"
        )
    ends = [*end_tokens(rollout.model or "-"), *rollout.sampling.stop_ids] if rollout.keep_special else None
    text = Tokenizer(rollout.tokenizer, ends) if rollout.tokenizer else None
    producer = EngineProducer(
        queue, engine, task=rollout.task, prefix=rollout.prefix, sampling=rollout.sampling, prompt=rollout.prompt,
        text=text, chat=rollout.chat, agent=rollout.agent, needs_first=settings.needs_first,
        swap=settings.swap or rollout.swap or weights.swap,
        verify=tuple(weights.verify if rollout.verify is None else rollout.verify), samplings=settings.samplings,
        trained=rollout.admits, prompt_limit=settings.prompt_limit,
    )  # fmt: skip
    if weights.transport != AUTO:
        host = host_of(connection, f"{connection.session}-trial")
        takes = engine.capabilities.transports
        if takes is not None and weights.transport not in takes:
            raise ConfigError(
                f"engine {rollout.engine!r} cannot take weights by {weights.transport}, only by"
                f" {', '.join(sorted(takes)) or 'nothing'}; say Weights(transport=...)"
            )
        make_transport(weights.transport).receiver(host).close()  # raises if this engine cannot fetch here
    _report_state(connection, "ready")
    await producer.run()


def _train(role: Train, spec: WorkerSpec, queue: QueueClient, ranks: RankCommunicator) -> None:
    settings, name = spec.settings, role.algorithm_spec.label
    algorithm = make_algorithm(role.algorithm_spec)
    lacking = [column for column in algorithm.needs if column not in spec.role["needs"]]
    if lacking:  # the driver could not make the algorithm, so its task lacks them
        raise ConfigError(
            f"algorithm {name!r} needs columns that the trainer is not given: say Train(..., needs={lacking})"
        )
    with loading_model(queue, "train"):
        engine = make_engine("train", role.engine, model=role.model, algorithm=algorithm, **role.options)
    unknown = [number for number in algorithm.asks if number not in engine.computes]
    if unknown:
        raise ConfigError(
            f"algorithm {name!r} asks its engine for {', '.join(unknown)}, which engine {role.engine!r} does"
            f" not compute; it computes {', '.join(engine.computes) or 'nothing for algorithms'}"
        )
    check_mask(type(engine).__name__, engine.sampling_mask, spec.role["needs"])
    if role.stream and engine.whole_step:
        raise ConfigError(whole_step_text(role.engine, engine.whole_step))
    saved = settings.checkpoint
    checkpoints = None
    if settings.checkpoints:
        folder = Path(settings.checkpoints)
        checkpoints = Checkpoints(queue, folder, saved.keep, ranks, reshards=engine.reshards)
    train(
        queue, engine, weights=settings.weights or role.weights or Weights(),
        export=Path(settings.export) if settings.export else None,
        checkpoints=checkpoints, every=saved.every, ranks=ranks, model=role.model,
        part_rows=(role.part_rows or 1) if role.stream else 0, drift_limit=role.drift_limit,
        models=StepFolders(Path(settings.models), settings.save_steps, settings.save_total_limit)
        if settings.save_steps else None,
        ready=lambda: _report_state(queue.connection, "ready"),
    )  # fmt: skip


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
