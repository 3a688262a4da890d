"""What the workers do once they are connected: train, or run a stage. (Rollout is ``producer``.)"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import ConfigError, LeaseLost, SchemaError, VersionGone
from ..interfaces import TrainEngine
from ..queue import LeasedBatch, TransferQueue
from ..types import VERSION_SPANS, Batch, Probe, Ragged, Weights, one_version, token_staleness
from ..types import events as ev
from ..types.columns import pack
from ..weights import WeightPublisher
from .consumer import Consumer


def train(
    queue: TransferQueue,
    engine: TrainEngine,
    *,
    task: str = "train",
    weights: Weights | None = None,
    export: Path | None = None,
) -> None:
    """Train step after step until the stream ends, publishing each version; then export the policy.

    Publishes version 0 first, so that rollouts start from these very weights. Where versions are published already (another
    trainer's, who died) it does not: it goes on with the next step from the weights ``engine`` has, and says so.
    """
    connection = queue._port.connection
    versions = _Versions(queue, engine, weights or Weights())
    try:
        versions.begin()
        for step in Consumer(queue, task, ahead=True):
            began, cpu = time.monotonic(), time.process_time()
            result = engine.train_step(step)
            took, cpu_s = time.monotonic() - began, time.process_time() - cpu
            versions.publish(step.version + 1)
            late = token_staleness(step.ragged(VERSION_SPANS), step.version)
            metrics = {name: float(value) for name, value in result.metrics.items()} | {
                "staleness_mean": float(late.mean()),
                "staleness_max": float(late.max()),
            }
            connection.report(
                ev.Span(
                    time_s=began, worker=connection.name, kind="train", seconds=took, rows=step.rows,
                    tokens=len(late), version=step.version, cpu_s=cpu_s,
                ),
                ev.StepTrained(
                    time_s=time.monotonic(), worker=connection.name, step=step.index, version=step.version,
                    metrics=metrics,
                ),
            )  # fmt: skip
            step.ack(filtered=result.filtered)
        if export is not None:
            engine.export(export)
    finally:
        queue.flush()
        versions.close()
        engine.close()


class _Versions:
    """What a trainer publishes: ``step.version + 1`` for each step. A rollback takes the number of a step that was leased before
    it, and withdraws the version that is on its way: then nothing is published for that step."""

    def __init__(self, queue: TransferQueue, engine: TrainEngine, how: Weights) -> None:
        self._queue, self._engine, self._probe = queue, engine, how.probe
        self._publisher = WeightPublisher(queue, how.transport, dtype=how.dtype, **how.options)
        self._last = -1

    def begin(self) -> None:
        """Publish version 0, unless another has."""
        current = self._publisher.current
        if current < 0:
            self.publish(0)
        else:
            self._warn(f"version {current} is current already: training goes on from there")

    def publish(self, version: int) -> None:
        probe = _scored(self._probe, self._engine) if self._probe is not None else None
        self._settle()
        try:
            self._last = self._publisher.publish(version, self._engine.named_weights(), probe=probe).version
        except ConfigError:
            current = self._queue.status().version
            if current < version:
                raise
            self._warn(f"version {current} was made current by a rollback, and version {version} is not published")

    def close(self) -> None:
        try:
            self._settle()
        finally:
            self._publisher.close()

    def _settle(self) -> None:
        """Wait for the version on its way."""
        try:
            self._publisher.flush()
        except (ConfigError, VersionGone):
            if self._queue.status().version < self._last:
                raise
            self._warn(f"version {self._last} was withdrawn by a rollback")

    def _warn(self, what: str) -> None:
        connection, name = self._queue._port.connection, type(self._engine).__name__
        text = f"{what}; this trainer goes on with the weights that its own {name} has"
        connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="warning"))


def _scored(probe: Probe, engine: TrainEngine) -> Probe:
    """The probe with its log-probs under the weights that ``engine`` has now."""
    prompts, responses = (Ragged.of(list(ids), np.int32) for ids in (probe.prompt_ids, probe.response_ids))
    lengths = responses.lengths
    columns = {
        "prompt_ids": prompts, "response_ids": responses, VERSION_SPANS: one_version(0, lengths),
        "logprobs": Ragged.from_lengths(np.zeros(int(lengths.sum()), np.float32), lengths),
        "reward": np.zeros(len(lengths), np.float32),
    }  # fmt: skip
    scores = engine.logprobs(Batch.of(columns))
    return msgspec.structs.replace(probe, logprobs=tuple(tuple(map(float, row)) for row in scores))


class StageFailed(ConfigError):
    """Raised when a user's function raised, or returned what is no column. Carries the rows it was given."""


def stage(
    queue: TransferQueue, function: Callable[..., Any], *, task: str, gives: tuple[str, ...], batch: int = 256
) -> None:
    """Apply ``function`` to the rows of a task until the stream ends."""
    connection = queue._port.connection
    kind = gives[0] if gives else task
    for rows in Consumer(queue, task, count=batch):
        began, cpu = time.monotonic(), time.process_time()
        columns = _apply(function, rows, gives)
        try:
            rows.complete(columns)
        except LeaseLost as error:  # the rows ended, or took too long: they are others' now
            text = f"{rows.rows} results of task {task!r} came too late: {error}"
            connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="warning"))
        connection.report(
            ev.Span(
                time_s=began,
                worker=connection.name,
                kind=kind,
                seconds=time.monotonic() - began,
                rows=rows.rows,
                cpu_s=time.process_time() - cpu,
            )
        )
    queue.flush()


def _apply(function: Callable[..., Any], rows: LeasedBatch, gives: tuple[str, ...]) -> dict[str, Any]:
    """Call a user's function and check what it returns. Raises StageFailed that names function and row."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        out = function(**dict(rows))
    except Exception as error:
        ids = f"rows {rows.ids[0]} to {rows.ids[-1]}" if rows.rows > 1 else f"row {rows.ids[0]}"
        raise StageFailed(
            f"{name}() raised {type(error).__name__}: {error} (called with {', '.join(rows)} of {ids})"
        ) from error
    columns = dict(out) if isinstance(out, Mapping) else {gives[0]: out}
    if set(columns) != set(gives):
        raise StageFailed(f"{name}() returned columns {sorted(columns)}; the stage gives {sorted(gives)}")
    for column, values in columns.items():
        columns[column] = _checked(name, column, values, rows)
    return columns


def _checked(name: str, column: str, values: Any, rows: LeasedBatch) -> Any:
    try:
        packed = pack(column, values)
    except SchemaError as error:
        raise StageFailed(f"{name}() returned no column: {error}") from None
    if len(packed) != rows.rows:
        raise StageFailed(f"{name}() returned {len(packed)} values for {rows.rows} rows")
    array = packed.values
    if column == "reward":
        # One dtype for ever: a function that returns ints for one batch and floats for the next is fine.
        if packed.spec.kind != "fixed" or packed.spec.shape:
            raise StageFailed(f"{name}() returned a reward that is {packed.spec}; it must be one number a row")
        array = array.astype(np.float32)
        odd = np.flatnonzero(~np.isfinite(array))
        if len(odd):
            first = int(odd[0])
            seen = {key: rows[key][first] for key in rows}
            raise StageFailed(f"{name}() returned {array[first]} for row {rows.ids[first]}, given {seen!r}")
        return array
    return values
