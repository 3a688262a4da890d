"""A worker process: ``python -m asyncflow_sdk.workflow``. It reads what to be from its first line of
standard input, and ends when that input ends: a worker never outlives its driver.

Exit status: 0 the stream ended; 3 an error that would come again (not restarted); 1 any other.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError, PluginError, SchemaError, WeightMismatch
from ..memory import remove_if_ownerless
from ..plugins import registry
from ..queue import Connection, TransferQueue, open_queue
from ..types import GRPO, Sampling, Weights
from ..types import events as ev
from ..wire import RunKey
from .work import Work

FATAL = (ConfigError, PluginError, SchemaError, WeightMismatch, ModuleNotFoundError)
EXIT_FATAL = 3


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
    algorithm: GRPO
    options: dict[str, Any]
    export: str
    weights: Weights


class WorkerConfig(msgspec.Struct, frozen=True):
    """What a worker is told: its name, the server, and its job."""

    name: str
    address: str
    job: RolloutJob | StageJob | TrainJob
    path: list[str]
    """The driver's import path, so that a function importable there is importable here."""
    key: RunKey | None = None
    """What the driver itself came in with, from another host."""


def main() -> int:
    config = msgspec.json.decode(_first_line(), type=WorkerConfig)
    directories: list[Path] = []
    threading.Thread(target=_end_with_driver, args=(directories,), daemon=True).start()
    connection = Connection(config.address, config.name, key=config.key)
    if not connection.inline:
        directories.append(connection.directory)
    sys.path += [entry for entry in config.path if entry not in sys.path]
    queue = open_queue(connection)
    _state(connection, "starting")
    try:
        _work(queue, config.job)
    except (Exception, SystemExit) as error:  # an engine that exits has not ended the stream
        _state(connection, "failed", traceback.format_exc(limit=-12))
        traceback.print_exc()
        queue.flush()
        connection.close()
        return EXIT_FATAL if isinstance(error, FATAL) else 1
    _state(connection, "stopped")
    queue.flush()
    connection.close()
    return 0


def _work(queue: TransferQueue, job: RolloutJob | StageJob | TrainJob) -> None:
    from . import roles
    from .stages import stage

    connection = queue._port.connection
    if isinstance(job, StageJob):
        _state(connection, "ready")
        stage(
            queue, job.work, task=job.task, needs=job.needs, gives=job.gives, batch=job.batch,
            concurrency=job.concurrency, groups=job.groups,
        )  # fmt: skip
    elif isinstance(job, TrainJob):
        engine = make_engine("train", job.engine, model=job.model, algorithm=job.algorithm, **job.options)
        _state(connection, "ready")
        roles.train(queue, engine, weights=job.weights, export=Path(job.export) if job.export else None)
    else:
        asyncio.run(_rollout(queue, job))


async def _rollout(queue: TransferQueue, job: RolloutJob) -> None:
    from .producer import Producer
    from .text import Text

    engine = make_engine("rollout", job.engine, model=job.model, **job.options)
    text = Text(job.tokenizer) if job.tokenizer else None
    producer = Producer(
        queue, engine, task=job.task, prefix=job.prefix, sampling=job.sampling, prompt=job.prompt, text=text, needs_first=job.needs_first,
        swap=job.swap, verify=job.verify,
    )  # fmt: skip
    _state(queue._port.connection, "ready")
    await producer.run()


def make_engine(kind: Literal["rollout", "train"], name: str, **options: Any) -> Any:
    """Make an engine. An option it does not have is the user's mistake, and named."""
    import inspect

    factory = registry().get(kind, name).load()
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        known = ", ".join(str(p) for p in inspect.signature(factory).parameters.values())
        raise ConfigError(f"engine {name!r}: {error}; it takes: {known}") from None
    return factory(**options)


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


def _end_with_driver(directories: list[Path]) -> None:
    """The driver holds the other end of standard input: when it ends, however it ends, so do we."""
    while os.read(0, 4096):
        pass
    for directory in directories:
        remove_if_ownerless(directory, wait_s=5.0)  # the lock falls a moment after the pipe
    os._exit(0)
