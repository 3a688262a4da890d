"""What a training worker does once it is connected. (Rollout is ``producer``, a stage ``stages``.)"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from ..errors import ConfigError, VersionGone
from ..interfaces import LeasedBatch, TrainEngine, optimizer_source
from ..memory import make_private_directory
from ..queue import QueueClient
from ..types import VERSION_SPANS, AgeSums, Batch, Probe, Ragged, Weights, one_version
from ..types import events as ev
from ..types.defaults import NEXT_S
from ..weights import Restoration, TransportPublisher, packed_restoration, restoration, restored
from .checkpoint import Checkpoints, Damaged, ResumePoint
from .meeting import APART, Meeting


def train(
    queue: QueueClient,
    engine: TrainEngine,
    *,
    task: str = "train",
    weights: Weights | None = None,
    export: Path | None = None,
    checkpoints: Checkpoints | None = None,
    every: int = 50,
    ranks: Meeting | None = None,
    model: str = "",
) -> None:
    """Train step after step until the stream ends, publishing each version; then export the policy, if the engine can.

    Publishes version 0 first, so that rollouts start from these very weights. With ``checkpoints`` it goes on from the newest,
    or begins anew where there is none; it makes one after ``every`` so many steps, and a last one. Without, where versions are
    published already (another trainer's, who died), it goes on with the next step from the weights ``engine`` has, and says so.

    After a rollback it loads the version's weights before it trains, saves or exports anything: with the optimizer's state from
    the checkpoint of that version, else by ``load_weights``. A step that was trained meanwhile is not published, but trained again
    from these weights: so each acknowledged step is one of the versions that follow.

    ``model``: the folder that the engine was made of. ``ranks``: this is one of several that train each step together, each its shard of one lease, and publish each version
    together. What is said once is said by the first.
    """
    connection, ranks = queue.connection, ranks or Meeting()
    with contextlib.ExitStack() as ending:  # of a run that is gone, too, whatever of this fails then
        ending.callback(engine.close)
        versions = _Versions(queue, engine, weights or Weights(), ranks, checkpoints, model)
        ending.callback(versions.close)
        ending.callback(queue.flush)
        versions.begin(_gone_on(engine, checkpoints) if checkpoints is not None else None)
        steps = queue.stream(
            task, timeout_s=NEXT_S, ahead=True, group=task, rank=ranks.rank, world_size=ranks.world_size
        )
        for step in steps:
            while True:
                versions.restore()
                trained = versions.trained_by(step)
                began, cpu = time.monotonic(), time.process_time()
                result = engine.train_step(step)
                took, cpu_s = time.monotonic() - began, time.process_time() - cpu
                # Hazard: if the acknowledgement of a step from before a rollback comes before its version, the ledger takes
                # the update for one that was given up, and the version for that of a later step.
                published = versions.publish(trained + 1, at_once=trained != step.version)
                ages = step.ages(step.index)
                connection.report(
                    ev.Span(
                        time_s=began, worker=connection.name, kind="train", seconds=took, rows=step.rows,
                        tokens=len(ages.total), version=trained, cpu_s=cpu_s,
                    )
                )  # fmt: skip
                word = bytes([published]) + AgeSums.of(ages).packed()
                every_rank = ranks.words(f"the end of step {step.index}", word)
                if all(word[0] for word in every_rank):
                    break
                versions.warn(
                    f"step {step.index} is trained again, since it was trained from weights that a rollback gave up"
                )
            if ranks.first:
                metrics = {name: float(value) for name, value in result.metrics.items()}
                metrics |= AgeSums.all([word[1:] for word in every_rank]).metrics()
                connection.report(
                    ev.StepTrained(
                        time_s=time.monotonic(), worker=connection.name, step=step.index, version=trained,
                        metrics=metrics,
                    )
                )  # fmt: skip
            step.ack(filtered=result.filtered)
            if checkpoints is not None and (step.index + 1) % every == 0:
                versions.restore()
                _keep(queue, engine, checkpoints, ranks)
        versions.restore()
        if checkpoints is not None:
            _keep(queue, engine, checkpoints, ranks, last=True)
        versions.finish()
        if export is not None:
            _export(queue, engine, export, ranks)


def _gone_on(engine: TrainEngine, checkpoints: Checkpoints) -> ResumePoint:
    point = checkpoints.resume()
    if point.path is not None:
        engine.load(point.path)
    return point


def _keep(
    queue: QueueClient, engine: TrainEngine, checkpoints: Checkpoints, ranks: Meeting, *, last: bool = False
) -> None:
    """A checkpoint that cannot be made costs the rows their memory, and a restart some steps; training goes on."""
    connection, began = queue.connection, time.monotonic()
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


def _export(queue: QueueClient, engine: TrainEngine, path: Path, ranks: Meeting) -> None:
    """Optional for engines: the run is through, and one that cannot has trained no worse."""

    def begin() -> bytes:
        make_private_directory(path)
        return b""

    ranks.by_first("the folder for the model", begin)
    try:
        engine.export(path)
    except NotImplementedError as error:
        if not ranks.first:
            return
        with contextlib.suppress(OSError):  # it was there, and is not empty
            path.rmdir()
        connection = queue.connection
        text = f"no model folder was written: {error}"
        connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="warning"))


class _Versions:
    """What a trainer publishes: one version for each step; and what it loads after a rollback."""

    def __init__(
        self, queue: QueueClient, engine: TrainEngine, how: Weights, ranks: Meeting, checkpoints: Checkpoints | None,
        model: str,
    ) -> None:  # fmt: skip
        self._queue, self._engine, self._probe, self._ranks = queue, engine, how.probe, ranks
        self._checkpoints, self._name = checkpoints, type(engine).__name__
        refused = (
            f"the trainer's engine, {self._name}, has no load_weights, so it would go on from the weights given up"
        )
        self._publisher = TransportPublisher(
            queue, how.transport, rank=ranks.rank, world_size=ranks.world_size, dtype=how.dtype,
            no_rollback="" if engine.restores else refused, **{"model": model, **how.options},
        )  # fmt: skip
        self._last = -1

    def begin(self, point: ResumePoint | None) -> None:
        """Publish version 0, unless another has; where training goes on, what the ledger asks for."""
        if point is not None:
            if point.version is not None:
                self.publish(point.version)
            return
        current = self._publisher.current
        if current < 0:
            self.publish(0)
        else:
            self.warn(
                f"version {current} is current already: training goes on from there; this trainer goes on with the weights"
                f" that its own {self._name} has"
            )

    def trained_by(self, step: LeasedBatch) -> int:
        """The version that a step trains: a later one than the step was leased with, if there was a rollback since."""
        return max(step.version, self._last)

    def publish(self, version: int, *, at_once: bool = False) -> bool:
        """Publish the engine's weights. False if a rollback has given them up. ``at_once``: wait until this rank's part is there."""
        probe = _scored(self._probe, self._engine) if self._probe is not None else None
        try:
            self._publisher.flush()
            self._last = self._publisher.publish(version, self._engine.named_weights(), probe=probe).version
            if at_once:
                self._publisher.flush()
        except (ConfigError, VersionGone):
            if restoration(self._queue) is None:
                raise
            return False
        return True

    def restore(self) -> None:
        """Load the version of a rollback, if one is pending. Of several ranks all load the same one."""
        while (asked := self._asked()) is not None:
            with contextlib.suppress(ConfigError, VersionGone):  # the version on its way was withdrawn
                self._publisher.flush()
            optimizer = self._load(asked)
            what = f"the weights of version {asked.version}"
            if self._ranks.by_first(what, partial(self._say_restored, asked, optimizer)):
                self._last = asked.version

    def finish(self) -> None:
        """Wait until every rank's part of the last version is there: a rank that closes before that withdraws it."""
        try:
            self._publisher.flush()
        except (ConfigError, VersionGone):
            if restoration(self._queue) is None:
                raise
        self._ranks.words("the last version")

    def close(self) -> None:
        self._publisher.close()

    def warn(self, text: str) -> None:
        """Report a warning, once for all ranks."""
        if self._ranks.first:
            connection = self._queue.connection
            connection.report(ev.Note(time_s=time.monotonic(), worker=connection.name, text=text, level="warning"))

    def _asked(self) -> Restoration | None:
        packed = self._ranks.by_first("rollbacks", lambda: packed_restoration(self._queue))
        return Restoration.decoded(self._queue, packed)

    def _load(self, asked: Restoration) -> str:
        """Have the engine take the version. Returns where its optimizer's state comes from."""
        began, what, step = time.monotonic(), f"loading version {asked.version}", asked.checkpoint
        path = self._ranks.by_first(f"the checkpoint of version {asked.version}", lambda: self._checkpoint(step))
        with self._ranks.all_or_none(what):
            if path:
                self._engine.load(Path(os.fsdecode(path)))
            elif not self._engine.restores:
                raise ConfigError(f"{what}: {self._name} has no load_weights")
            else:
                with asked.fetch() as update:
                    self._engine.load_weights(update)
        connection = self._queue.connection
        connection.report(
            ev.Span(
                time_s=began, worker=connection.name, kind="load", seconds=time.monotonic() - began, version=asked.version
            )
        )  # fmt: skip
        return optimizer_source(step if path else -1)

    def _checkpoint(self, step: int) -> bytes:
        """The path of a checkpoint's engine state; b"" if there is none that is whole."""
        if step < 0 or self._checkpoints is None:
            return b""
        try:
            return os.fsencode(self._checkpoints.at(step))
        except Damaged as error:
            self.warn(f"the checkpoint of step {step} cannot be loaded: {error}; the optimizer begins anew")
            return b""

    def _say_restored(self, asked: Restoration, optimizer: str) -> bytes:
        """b"" if another rollback came meanwhile."""
        try:
            restored(self._queue, asked.version, optimizer)
        except ConfigError:
            return b""
        return b"restored"


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
