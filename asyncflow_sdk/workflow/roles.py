"""What a training worker does once it is connected. (Rollout is ``producer``, a stage ``stages``.)"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import numpy as np

from ..errors import ConfigError, VersionGone
from ..interfaces import TrainEngine
from ..queue import TransferQueue
from ..types import VERSION_SPANS, AgeSums, Batch, Probe, Ragged, Weights, one_version
from ..types import events as ev
from ..weights import WeightPublisher
from .checkpoint import Checkpoints, Point
from .consumer import Consumer
from .meeting import APART, Meeting


def train(
    queue: TransferQueue,
    engine: TrainEngine,
    *,
    task: str = "train",
    weights: Weights | None = None,
    export: Path | None = None,
    checkpoints: Checkpoints | None = None,
    every: int = 50,
    ranks: Meeting | None = None,
) -> None:
    """Train step after step until the stream ends, publishing each version; then export the policy, if the engine can.

    Publishes version 0 first, so that rollouts start from these very weights. With ``checkpoints`` it goes on from the newest,
    or begins anew where there is none; it makes one after ``every`` so many steps, and a last one. Without, where versions are
    published already (another trainer's, who died), it goes on with the next step from the weights ``engine`` has, and says so.

    ``ranks``: this is one of several that train each step together, each its shard of one lease, and publish each version
    together. What is said once is said by the first.
    """
    connection, ranks = queue._port.connection, ranks or Meeting()
    shard = {"team": task, "rank": ranks.rank, "world_size": ranks.world_size}
    with contextlib.ExitStack() as ending:  # of a run that is gone, too, whatever of this fails then
        ending.callback(engine.close)
        versions = _Versions(queue, engine, weights or Weights(), ranks)
        ending.callback(versions.close)
        ending.callback(queue.flush)
        versions.begin(_gone_on(engine, checkpoints) if checkpoints is not None else None)
        for step in Consumer(queue, task, ahead=True, ranks=shard if ranks.world_size > 1 else None):
            began, cpu = time.monotonic(), time.process_time()
            result = engine.train_step(step)
            took, cpu_s = time.monotonic() - began, time.process_time() - cpu
            versions.publish(step.version + 1)
            ages = step.ages(step.index)
            connection.report(
                ev.Span(
                    time_s=began, worker=connection.name, kind="train", seconds=took, rows=step.rows,
                    tokens=len(ages.total), version=step.version, cpu_s=cpu_s,
                )
            )  # fmt: skip
            every_rank = ranks.words(f"the end of step {step.index}", AgeSums.of(ages).packed())
            if ranks.first:
                metrics = {name: float(value) for name, value in result.metrics.items()}
                metrics |= AgeSums.all(every_rank).metrics()
                connection.report(
                    ev.StepTrained(
                        time_s=time.monotonic(), worker=connection.name, step=step.index, version=step.version,
                        metrics=metrics,
                    )
                )  # fmt: skip
            step.ack(filtered=result.filtered)
            if checkpoints is not None and (step.index + 1) % every == 0:
                _keep(queue, engine, checkpoints, ranks)
        if checkpoints is not None:
            _keep(queue, engine, checkpoints, ranks, last=True)
        if export is not None:
            _export(queue, engine, export, ranks)


def _gone_on(engine: TrainEngine, checkpoints: Checkpoints) -> Point:
    point = checkpoints.resume()
    if point.path is not None:
        engine.load(point.path)
    return point


def _keep(
    queue: TransferQueue, engine: TrainEngine, checkpoints: Checkpoints, ranks: Meeting, *, last: bool = False
) -> None:
    """A checkpoint that cannot be made costs the rows their memory, and a restart some steps; training goes on."""
    connection, began = queue._port.connection, time.monotonic()
    try:
        path = checkpoints.save(engine.save, last=last)
    except Exception as error:
        if ranks.world_size > 1 and isinstance(error, APART):
            raise
        if not ranks.first:
            return
        text = f"no checkpoint was made: {type(error).__name__}: {error}"
        connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="error"))
    else:
        span = ev.Span(
            time_s=began, worker=connection.name, kind="checkpoint", seconds=time.monotonic() - began,
            detail=path.parent.name,
        )  # fmt: skip
        if ranks.first:
            connection.report(span)


def _export(queue: TransferQueue, engine: TrainEngine, path: Path, ranks: Meeting) -> None:
    """Optional for engines: the run is through, and one that cannot has trained no worse."""
    try:
        engine.export(path)
    except NotImplementedError as error:
        if not ranks.first:
            return
        connection = queue._port.connection
        text = f"no model folder was written: {error}"
        connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="warning"))


class _Versions:
    """What a trainer publishes: ``step.version + 1`` for each step. A rollback takes the number of a step that was leased before
    it, and withdraws the version that is on its way: then nothing is published for that step."""

    def __init__(self, queue: TransferQueue, engine: TrainEngine, how: Weights, ranks: Meeting) -> None:
        self._queue, self._engine, self._probe, self._ranks = queue, engine, how.probe, ranks
        self._publisher = WeightPublisher(
            queue, how.transport, rank=ranks.rank, world_size=ranks.world_size, dtype=how.dtype, **how.options
        )
        self._last = -1

    def begin(self, point: Point | None) -> None:
        """Publish version 0, unless another has; where training goes on, what the ledger asks for."""
        if point is not None:
            if point.version is not None:
                self.publish(point.version)
            return
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
        if not self._ranks.first:
            return
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
