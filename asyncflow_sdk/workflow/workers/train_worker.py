"""Train worker: train each step, publish its version, save checkpoints, follow rollbacks."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from ...errors import ConfigError, DeadlineExceeded, VersionGone
from ...interfaces import TrainEngine
from ...ledger import commands as cmd
from ...ledger.publication import VersionTaken
from ...queue import QueueClient
from ...types import VERSION_SPANS, Batch, Probe, Ragged, Weights, one_version
from ...types import events as ev
from ...weights import Restoration, TransportPublisher, get_restoration, pack_restoration
from ..checkpoint import Checkpoints, Damaged, ResumePoint
from ..model_folder import StepFolders, whole_folder
from .rank_communicator import RANK_ERRORS, RankCommunicator
from .trainer_steps import StepLost, StepWork, TrainerStep, step_metrics, trainer_steps
from .worker_log import WorkerLog

POLL_S = 60.0
"""Limit of one wait for the end of the evaluations (seconds): they may take hours."""


def train(
    queue: QueueClient,
    engine: TrainEngine,
    *,
    task: str = "train",
    weights: Weights | None = None,
    export: Path | None = None,
    checkpoints: Checkpoints | None = None,
    every: int = 50,
    ranks: RankCommunicator | None = None,
    model: str = "",
    part_rows: int = 0,
    drift_limit: float = math.inf,
    models: StepFolders | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Train each step until the stream ends, publish its version, and export the policy at the end.

    Publishes version 0 first: rollouts begin with exactly these weights. With ``checkpoints`` it resumes from the
    newest, or from the start if there is none; it saves one after every ``every`` steps, and a last one. Without
    them, if another trainer has published versions before it died, it continues with the next step and the weights
    of ``engine``, and reports this.

    After a rollback it loads the version's weights before it trains, saves or exports anything: with the optimizer's
    state from the checkpoint of that version, else by ``load_weights``. A step trained before that is not published,
    but trained again from these weights; so each acknowledged step is one of the later versions.

    ``models``: where to write the policy every few steps. At the end it waits until the evaluation of the last
    version, if there is one, can no longer roll it back. ``ready`` is called before the first step, after a resume.

    ``part_rows``: train each step in parts of at least so many rows, while the rest of it is being generated; 0:
    whole steps. A step in parts is discarded if its lease ends, as when one of its rows is removed, and then trained
    again as the queue delivers it. ``drift_limit``: the argument of ``Train``. ``model``: the engine's model folder.
    ``ranks``: the barrier of several trainers; each trains its shard of every step and publishes its part of every
    version, and the first rank reports for all."""
    ranks, log = ranks or RankCommunicator(), WorkerLog(queue.connection)
    with contextlib.ExitStack() as ending:  # everything is closed, even if the run is gone or one close fails
        ending.callback(engine.close)
        versions = _TrainedVersions(queue, engine, weights or Weights(), ranks, checkpoints, model)
        ending.callback(versions.close)
        ending.callback(queue.flush)
        point = checkpoints.resume() if checkpoints is not None else None
        if point is not None and point.path is not None:
            engine.load(point.path)
        versions.begin(point)
        ready()
        for step in trainer_steps(queue, engine, log, ranks, task=task, part_rows=part_rows):
            trained = _train(step, versions, ranks)
            if trained is None:  # the queue delivers the step again
                continue
            if ranks.first:
                log.report(ev.StepTrained, step=step.index, version=trained.version, metrics=trained.metrics)
            if drift := _drift(step.index, trained.metrics, drift_limit):
                versions.warn(drift, lasting=True)
                drift_limit = math.inf
            step.ack(trained.work)
            if checkpoints is not None and (step.index + 1) % every == 0:
                versions.restore()
                _save(engine, checkpoints, ranks, log)
            if models is not None and models.due(step.index + 1):
                versions.restore()
                _export(engine, models.path(step.index + 1), ranks, log)
                if ranks.first:
                    models.trim()
        versions.settle()
        if checkpoints is not None:
            _save(engine, checkpoints, ranks, log, last=True)
        if export is not None:
            _export(engine, export, ranks, log, last=True)


@dataclass(frozen=True)
class _TrainedStep:
    """A step whose version is published. ``work``: of this rank; ``metrics``: of the whole step."""

    version: int
    work: StepWork
    metrics: dict[str, float]


def _train(step: TrainerStep, versions: _TrainedVersions, ranks: RankCommunicator) -> _TrainedStep | None:
    """Train a step and publish its version; again from the restored weights after each rollback
    meanwhile. Return None if its lease was lost; then nothing was published."""
    while True:
        versions.restore()
        version = versions.number(step)
        try:
            work = step.train(version)
        except StepLost as lost:
            versions.warn(f"step {step.index} is discarded and trained again: {lost}")
            return None
        # Hazard: if a step from before a rollback is acknowledged before its version is published, the ledger counts
        # the update as given up, and the version as that of a later step.
        published = versions.publish(version + 1, at_once=version != step.version)
        payloads = ranks.all_gather(f"the end of step {step.index}", bytes([published]) + work.packed())
        if all(payload[0] for payload in payloads):
            metrics = {name: float(value) for name, value in work.result.metrics.items()}
            metrics |= step_metrics(payload[1:] for payload in payloads)
            return _TrainedStep(version, work, metrics | ({"parts": float(work.parts)} if work.parts else {}))
        versions.warn(f"step {step.index} is trained again: a rollback gave up the weights it was trained from")


def _drift(step: int, metrics: Mapping[str, float], limit: float) -> str:
    """Return a warning for a step that the trainer's own weights drew, if its log-probs are not theirs; else ""."""
    drift = metrics.get("logprob_drift", 0.0)
    if metrics.get("staleness_max") != 0 or not drift > limit:
        return ""
    return (
        f"the log-probs of rollout and trainer differ: {drift:.3g} a token on average in step {step}, where drift_limit={limit:g} is allowed. The trainer's own"
        " weights drew this step, so both should agree, and the gradient is wrong. Likely causes: packed rows of a model"
        " with other layers than attention (packed=False), a tied lm_head unlike the embedding, another temperature or"
        " dtype, a rollout engine that computes with weights of its own (weights=af.Weights(probe=...) compares)"
    )


def _save(
    engine: TrainEngine, checkpoints: Checkpoints, ranks: RankCommunicator, log: WorkerLog, *, last: bool = False
) -> None:
    """Save a checkpoint. After an error training goes on; a restart then repeats more steps."""
    began = time.monotonic()
    try:
        path = checkpoints.save(engine.save, last=last)
    except Exception as error:
        if ranks.world_size > 1 and isinstance(error, RANK_ERRORS):
            raise
        if ranks.first:
            log.note(f"no checkpoint was made: {type(error).__name__}: {error}", "error")
    else:
        if ranks.first:
            log.span("checkpoint", began, detail=path.parent.name)


def _export(engine: TrainEngine, path: Path, ranks: RankCommunicator, log: WorkerLog, *, last: bool = False) -> None:
    """Export the policy, whole or not at all. Optional for engines: without it the training still
    counts. After another error training goes on, unless it was the ``last`` export."""
    began = time.monotonic()
    try:
        with contextlib.ExitStack() as whole:

            def begin() -> bytes:
                return os.fsencode(whole.enter_context(whole_folder(path)))

            part = Path(os.fsdecode(ranks.by_first("the folder for the model", begin)))
            with ranks.all_or_none("the export of the model"):
                engine.export(part)
    except Exception as error:
        optional = isinstance(error, NotImplementedError)
        if ranks.first:
            hint = "; with a checkpoint, `asyncflow resume` writes it" if last and not optional else ""
            text = f"no model folder was written: {type(error).__name__}: {error}{hint}"
            log.note(text, "info" if optional else "error")
        if not optional and (last or (ranks.world_size > 1 and isinstance(error, RANK_ERRORS))):
            raise
    else:
        if ranks.first:
            log.span("export", began, detail=path.name)


class _TrainedVersions:
    """The versions of one trainer: one published for each step, and one loaded after a rollback."""

    def __init__(
        self, queue: QueueClient, engine: TrainEngine, weights: Weights, ranks: RankCommunicator,
        checkpoints: Checkpoints | None, model: str,
    ) -> None:  # fmt: skip
        self._queue, self._engine, self._probe, self._ranks = queue, engine, weights.probe, ranks
        self._checkpoints, self._name, self._log = checkpoints, type(engine).__name__, WorkerLog(queue.connection)
        refused = (
            f"the trainer's engine, {self._name}, has no load_weights: it would continue with the weights given up"
        )
        self._publisher = TransportPublisher(
            queue, weights.transport, rank=ranks.rank, world_size=ranks.world_size, dtype=weights.dtype,
            no_rollback="" if engine.restores else refused, **{"model": model, **weights.options},
        )  # fmt: skip
        self._last = -1

    def begin(self, point: ResumePoint | None) -> None:
        """Publish version 0, unless there are versions, or rollouts began with their own; after a resume,
        the ledger's choice."""
        if point is not None:
            if point.version is not None:
                self.publish(point.version)
            return
        current = self._publisher.current
        own = f"with the weights of this trainer's {self._name}"
        if current >= 0:
            self.warn(f"version {current} is current already: training continues after it, {own}")
            return
        try:
            self.publish(0)
        except VersionTaken:
            self.warn(f"rollouts began with weights of their own, which are version 0: version 1 is trained {own}")

    def number(self, step: TrainerStep) -> int:
        """Return the version trained by a step; after a rollback it is later than the leased one."""
        return max(step.version, self._last)

    def publish(self, version: int, *, at_once: bool = False) -> bool:
        """Publish the weights. Return False after a rollback. ``at_once``: wait for this rank's part."""
        probe = _scored(self._probe, self._engine) if isinstance(self._probe, Probe) else None
        try:
            self._publisher.flush()
            given, untrained = self._engine.named_weights(), self._engine.untrained
            self._last = self._publisher.publish(version, given, probe=probe, untrained=untrained).version
            if not version and untrained and self._ranks.first:
                named = ", ".join(untrained[:3]) + (", …" if len(untrained) > 3 else "")
                self._log.note(f"{len(untrained)} tensors stay as in the model folder: {named}", "info")
            if at_once:
                self._publisher.flush()
        except (ConfigError, VersionGone):
            if get_restoration(self._queue) is None:
                raise
            return False
        return True

    def restore(self) -> bool:
        """Load the version of a pending rollback; the same in all ranks. Return False without one."""
        loaded = False
        while (target := self._target()) is not None:
            with contextlib.suppress(ConfigError, VersionGone):  # the version being published was withdrawn
                self._publisher.flush()
            optimizer = self._load(target)
            what = f"the weights of version {target.version}"
            if self._ranks.by_first(what, partial(self._report_restored, target, optimizer)):
                self._last = target.version
            loaded = True
        return loaded

    def settle(self) -> None:
        """Wait for every rank's part of the last version, since a closing rank withdraws its part, and
        for the end of the evaluations. Load what these roll back to."""
        while True:
            self.restore()
            try:
                self._publisher.flush()
            except (ConfigError, VersionGone):
                if get_restoration(self._queue) is None:
                    raise
            self._ranks.all_gather("the last version")
            while self._ranks.by_first("the end of the evaluations", self._await_evaluations):
                pass
            if not self.restore():
                return

    def _await_evaluations(self) -> bytes:
        """Return b"" once no version is evaluated any more, or a rollback is pending."""
        try:
            self._queue.send(cmd.AwaitPins(timeout_s=POLL_S))
        except DeadlineExceeded:
            return b"wait"
        return b""

    def close(self) -> None:
        """Close the publisher."""
        self._publisher.close()

    def warn(self, text: str, lasting: bool = False) -> None:
        """Report a warning, once for all ranks."""
        if self._ranks.first:
            self._log.note(text, lasting=lasting)

    def _target(self) -> Restoration | None:
        packed = self._ranks.by_first("rollbacks", lambda: pack_restoration(self._queue))
        return Restoration.decoded(self._queue, packed)

    def _load(self, target: Restoration) -> str:
        """Load a version into the engine. Return the origin of its optimizer's state."""
        began, what, step = time.monotonic(), f"loading version {target.version}", target.checkpoint
        path = self._ranks.by_first(f"the checkpoint of version {target.version}", lambda: self._checkpoint(step))
        with self._ranks.all_or_none(what):
            if path:
                self._engine.load(Path(os.fsdecode(path)))
            elif not self._engine.restores:
                raise ConfigError(f"{what}: {self._name} has no load_weights")
            else:
                with target.fetch() as update:
                    self._engine.load_weights(update)
        self._log.span("load", began, version=target.version)
        return f"checkpoint of step {step}" if path else "fresh"

    def _checkpoint(self, step: int) -> bytes:
        """Return the path of a checkpoint's engine state; b"" without an intact one."""
        if step < 0 or self._checkpoints is None:
            return b""
        try:
            return os.fsencode(self._checkpoints.at(step))
        except Damaged as error:
            self.warn(f"the checkpoint of step {step} cannot be loaded: {error}; the optimizer begins anew")
            return b""

    def _report_restored(self, target: Restoration, optimizer: str) -> bytes:
        """Report the loaded version to the ledger. Return b"" after another rollback meanwhile."""
        try:
            self._queue.send(cmd.ReportRestored(version=target.version, optimizer=optimizer))
        except ConfigError:
            return b""
        return b"restored"


def _scored(probe: Probe, engine: TrainEngine) -> Probe:
    """Return the probe with its log-probs under the engine's weights."""
    prompts, responses = (Ragged.of(list(ids), np.int32) for ids in (probe.prompt_ids, probe.response_ids))
    lengths = responses.lengths
    columns = {
        "prompt_ids": prompts, "response_ids": responses, VERSION_SPANS: one_version(0, lengths),
        "logprobs": Ragged.from_lengths(np.zeros(int(lengths.sum()), np.float32), lengths),
        "reward": np.zeros(len(lengths), np.float32),
    }  # fmt: skip
    scores = engine.logprobs(Batch.of(columns))
    return msgspec.structs.replace(probe, logprobs=tuple(tuple(map(float, row)) for row in scores))
