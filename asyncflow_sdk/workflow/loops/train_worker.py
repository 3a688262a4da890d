"""Train worker: train each step, publish its version, save checkpoints, follow rollbacks."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ...errors import ConfigError, DeadlineExceeded, LeaseLost, StepAborted, VersionGone
from ...interfaces import LeasedBatch, LeasedStep, StepPart, StepResult, TrainEngine, WorkerSettings
from ...ledger import commands as cmd
from ...ledger.publication import VersionTaken
from ...queue import QueueClient
from ...types import VERSION_SPANS, AgeSums, Batch, Probe, Ragged, Weights, one_version
from ...types import events as ev
from ...types.defaults import NEXT_S
from ...types.spans import FINISH_REASON
from ...weights import Restoration, TransportPublisher, get_restoration, pack_restoration
from ..checkpoint import Checkpoints, Damaged, ResumePoint
from ..model_folder import StepFolders, whole_folder
from ..processes.ranks import RANK_ERRORS, RankCommunicator
from ..rewards import RewardSums, reward_means, reward_sums
from ..specs import Train
from .event_sinks import WorkerLog

POLL_S = 60.0  # limit of one wait for the end of the evaluations (seconds): they may take hours


def train(
    queue: QueueClient,
    engine: TrainEngine,
    role: Train,
    settings: WorkerSettings,
    ranks: RankCommunicator,
    ready: Callable[[], None],
) -> None:
    """Train each step until the stream ends, publish its version, and export the policy at the end.

    Publishes version 0 first: rollouts begin with exactly these weights. With checkpoints it resumes from the
    newest, or from the start if there is none; it saves one every few steps, and a last one. Without
    them, if another trainer has published versions before it died, it continues with the next step and the weights
    of ``engine``, and reports this.

    After a rollback it loads the version's weights before it trains, saves or exports anything: with the optimizer's
    state from the checkpoint of that version, else by ``load_weights``. A step trained before that is not published,
    but trained again from these weights; so each acknowledged step is one of the later versions. At the end it waits
    until the evaluation of the last version, if there is one, can no longer roll it back.

    A step in parts is discarded if its lease ends, as when one of its rows is removed, and then trained again as the
    queue delivers it. ``ranks``: the barrier of several trainers; each trains its shard of every step and publishes
    its part of every version, and the first rank reports for all. ``ready``: a function called before the first step,
    after a resume."""
    log, drift_limit = WorkerLog(queue.connection), role.drift_limit
    checkpoints = models = None
    if settings.checkpoints:
        folder, keep = Path(settings.checkpoints), settings.checkpoint.keep
        checkpoints = Checkpoints(queue, folder, keep, ranks, reshards=engine.reshards)
    if settings.save_steps:
        models = StepFolders(Path(settings.models), settings.save_steps, settings.save_total_limit)
    with contextlib.ExitStack() as ending:  # everything is closed, even if the run is gone or one close fails
        ending.callback(engine.close)
        weights = settings.weights or role.weights or Weights()
        versions = _TrainedVersions(queue, engine, weights, ranks, checkpoints, role.model)
        ending.callback(versions.publisher.close)
        ending.callback(queue.flush)
        point = checkpoints.resume() if checkpoints is not None else None
        if point is not None and point.path is not None:
            engine.load(point.path)
        versions.begin(point)
        ready()
        for leased in _leased_steps(queue, role, ranks):
            step = _TrainerStep(leased, engine, log)
            trained = _train(step, versions, ranks)
            if trained is None:  # the queue delivers the step again
                continue
            done = step.index + 1
            if ranks.first:
                log.report(ev.StepTrained, step=step.index, version=trained.version, metrics=trained.metrics)
            if drift := _drift(step.index, trained.metrics, drift_limit):
                versions.warn(drift, lasting=True)
                drift_limit = math.inf
            leased.ack(filtered=trained.filtered)
            if checkpoints is not None and done % settings.checkpoint.every == 0:
                versions.restore()
                _write("checkpoint", partial(_save, engine, checkpoints), ranks, log)
            if models is not None and models.due(done):
                versions.restore()
                _write("export", partial(_export, engine, models.path(done), ranks), ranks, log)
                if ranks.first:
                    models.trim()
        versions.settle()
        if checkpoints is not None:
            _write("checkpoint", partial(_save, engine, checkpoints, last=True), ranks, log)
        if settings.export:
            _write("export", partial(_export, engine, Path(settings.export), ranks), ranks, log, last=True)


def _leased_steps(queue: QueueClient, role: Train, ranks: RankCommunicator) -> Iterator[LeasedBatch | LeasedStep]:
    """Lease one step after another until the stream ends: whole, or in parts. Raises the errors of
    ``TransferQueue.get``, except Ended."""
    shares = {**ranks.shares, "group": role.task}
    if role.stream:
        return iter(queue.steps(role.task, part_rows=role.part_rows or 1, timeout_s=NEXT_S, **shares))
    return iter(queue.stream(role.task, timeout_s=NEXT_S, ahead=True, **shares))


class _StepLost(Exception):
    """Raised if the lease of a step in parts ended before the step was trained: the queue delivers it again."""


class _StepWork(NamedTuple):
    """The work of a rank on a step. ``rewards``: sums of single rewards, and of truncated responses. ``parts``:
    the number of parts; 0 for a whole step."""

    result: StepResult
    ages: AgeSums
    rewards: tuple[RewardSums, ...]
    parts: int = 0


def _step_metrics(packed: Iterable[bytes]) -> dict[str, float]:
    """Return the ages, single rewards and ``truncated_fraction`` of a whole step, from the packed ages and rewards of
    each rank."""
    ranks = [msgspec.msgpack.decode(each, type=tuple[AgeSums, list[RewardSums]]) for each in packed]
    rewards = [part for _, parts in ranks for part in parts]
    return AgeSums.all(ages for ages, _ in ranks).metrics() | reward_means(rewards)


def _sums(batch: Batch) -> RewardSums:
    cut = batch.texts(FINISH_REASON).count("length") if FINISH_REASON in batch else -1
    return reward_sums(batch) | ({} if cut < 0 else {"truncated_fraction": (float(cut), batch.rows)})


class _TrainerStep:
    """A leased step: one batch, or parts that arrive while the rest of it is being generated. It keeps the delivered
    parts: a step trained again begins with them. ``version``: the version to train by its lease."""

    def __init__(self, leased: LeasedBatch | LeasedStep, engine: TrainEngine, log: WorkerLog) -> None:
        self.index, self.version = leased.index, leased.version
        self._leased, self._engine, self._log = leased, engine, log
        self._delivered: list[StepPart] = []

    def train(self, version: int) -> _StepWork:
        """Train ``version`` on all rows. Call it again after a rollback: it trains the same rows. Raises _StepLost,
        and then the engine has discarded the step."""
        if isinstance(self._leased, LeasedStep):
            return self._train_parts(self._leased, version)
        batch = self._leased
        ages = AgeSums.of(batch.ages(self.index))
        with self._log.timed("train", rows=batch.rows, tokens=ages.tokens, version=version):
            result = self._engine.train_step(batch)
        return _StepWork(result, ages, (_sums(batch),))

    def _train_parts(self, step: LeasedStep, version: int) -> _StepWork:
        ages = []
        self._engine.begin_step(self.index)
        try:
            for part in self._parts(step):
                ages.append(AgeSums.of(part.ages(self.index)))
                what = f"part {part.part} of step {self.index}"
                with self._log.timed("train", rows=part.rows, tokens=ages[-1].tokens, version=version, detail=what):
                    self._engine.accumulate(part)
            with self._log.timed("train", version=version, detail=f"update of step {self.index}"):
                result = self._engine.end_step()
        except (LeaseLost, StepAborted) as error:  # or another rank's: the ranks have one lease
            self._engine.abort_step()
            raise _StepLost(str(error)) from error
        return _StepWork(result, AgeSums.all(ages), tuple(map(_sums, self._delivered)), len(ages))

    def _parts(self, step: LeasedStep) -> Iterator[StepPart]:
        yield from self._delivered
        for part in step.parts():
            self._delivered.append(part)
            yield part


class _TrainedStep(NamedTuple):
    version: int
    filtered: npt.NDArray[np.bool_] | None
    metrics: dict[str, float]


def _train(step: _TrainerStep, versions: _TrainedVersions, ranks: RankCommunicator) -> _TrainedStep | None:
    """Train a step and publish its version; again from the restored weights after each rollback
    meanwhile. Return None if its lease was lost; then nothing was published."""
    while True:
        versions.restore()
        version = versions.number(step)
        try:
            work = step.train(version)
        except _StepLost as lost:
            versions.warn(f"step {step.index} is discarded and trained again: {lost}")
            return None
        # Hazard: if a step from before a rollback is acknowledged before its version is published, the ledger counts
        # the update as given up, and the version as that of a later step.
        published = versions.publish(version + 1, at_once=version != step.version)
        sums = msgspec.msgpack.encode((work.ages, work.rewards))
        payloads = ranks.all_gather(f"the end of step {step.index}", bytes([published]) + sums)
        if all(payload[0] for payload in payloads):
            metrics = {name: float(value) for name, value in work.result.metrics.items()}
            metrics |= _step_metrics(payload[1:] for payload in payloads)
            metrics |= {"parts": float(work.parts)} if work.parts else {}
            return _TrainedStep(version, work.result.filtered, metrics)
        versions.warn(f"step {step.index} is trained again: a rollback gave up the weights it was trained from")


def _drift(step: int, metrics: Mapping[str, float], limit: float) -> str:
    """Return a warning for a step that the trainer's own weights drew, if its log-probs are not theirs; else ""."""
    drift = metrics.get("logprob_drift", 0.0)
    if metrics.get("staleness_max") != 0 or not drift > limit:
        return ""
    return (
        f"the log-probs of rollout and trainer differ: {drift:.3g} a token on average in step {step}, where"
        f" drift_limit={limit:g} is allowed. The trainer's own weights drew this step, so both should agree, and the"
        " gradient is wrong. Likely causes: packed rows of a model with other layers than attention (packed=False), a"
        " tied lm_head unlike the embedding, another temperature or dtype, a rollout engine that computes with weights"
        " of its own (weights=af.Weights(probe=...) compares)"
    )


def _write(
    kind: str, write: Callable[[], Path], ranks: RankCommunicator, log: WorkerLog, *, last: bool = False
) -> None:
    """Write a checkpoint, or export the policy. Exports are optional: without one the training still counts. After
    another error training goes on, unless the ranks have lost each other, or it was the ``last`` export. A
    restart then repeats more steps."""
    began = time.monotonic()
    try:
        path = write()
    except Exception as error:
        optional = kind == "export" and isinstance(error, NotImplementedError)
        if ranks.first:
            missing = "no checkpoint was made" if kind == "checkpoint" else "no model folder was written"
            hint = "; with a checkpoint, `asyncflow resume` writes it" if last and not optional else ""
            log.note(f"{missing}: {type(error).__name__}: {error}{hint}", "info" if optional else "error")
        if not optional and (last or (ranks.world_size > 1 and isinstance(error, RANK_ERRORS))):
            raise
    else:
        if ranks.first:
            log.span(kind, began, detail=path.name)


def _save(engine: TrainEngine, checkpoints: Checkpoints, *, last: bool = False) -> Path:
    return checkpoints.save(engine.save, last=last).parent


def _export(engine: TrainEngine, path: Path, ranks: RankCommunicator) -> Path:
    with contextlib.ExitStack() as whole:

        def _begin() -> bytes:
            return os.fsencode(whole.enter_context(whole_folder(path)))

        part = Path(os.fsdecode(ranks.by_first("the folder for the model", _begin)))
        with ranks.all_or_none("the export of the model"):
            engine.export(part)
    return path


class _TrainedVersions:
    """The versions of one trainer: one published for each step, and one loaded after a rollback."""

    def __init__(
        self,
        queue: QueueClient,
        engine: TrainEngine,
        weights: Weights,
        ranks: RankCommunicator,
        checkpoints: Checkpoints | None,
        model: str,
    ) -> None:
        self._queue, self._engine, self._probe, self._ranks = queue, engine, weights.probe, ranks
        self._checkpoints, self._name, self._log = checkpoints, type(engine).__name__, WorkerLog(queue.connection)
        refused = "has no load_weights: it would continue with the weights given up"
        refused = "" if engine.restores else f"the trainer's engine, {self._name}, {refused}"
        options = {"model": model, "no_rollback": refused, **weights.options}
        self.publisher = TransportPublisher(
            queue, weights.transport, rank=ranks.rank, world_size=ranks.world_size, dtype=weights.dtype, **options
        )
        self._last = -1

    def begin(self, point: ResumePoint | None) -> None:
        """Publish version 0, unless there are versions, or rollouts began with their own; after a resume,
        the ledger's choice."""
        current, own = self.publisher.current, f"with the weights of this trainer's {self._name}"
        if point is not None and point.version is not None:
            self.publish(point.version)
        elif point is None and current >= 0:
            self.warn(f"version {current} is current already: training continues after it, {own}")
        elif point is None:
            try:
                self.publish(0)
            except VersionTaken:
                text = "rollouts began with weights of their own, which are version 0: version 1 is trained"
                self.warn(f"{text} {own}")

    def number(self, step: _TrainerStep) -> int:
        """Return the version trained by a step; after a rollback it is later than the leased one."""
        return max(step.version, self._last)

    def publish(self, version: int, *, at_once: bool = False) -> bool:
        """Publish the weights. Return False after a rollback. ``at_once``: wait for this rank's part."""
        probe = _scored(self._probe, self._engine) if isinstance(self._probe, Probe) else None
        try:
            self.publisher.flush()
            given, untrained = self._engine.named_weights(), self._engine.untrained
            self._last = self.publisher.publish(version, given, probe=probe, untrained=untrained).version
            if not version and untrained and self._ranks.first:
                named = ", ".join(untrained[:3]) + (", …" if len(untrained) > 3 else "")
                self._log.note(f"{len(untrained)} tensors stay as in the model folder: {named}", "info")
            if at_once:
                self.publisher.flush()
        except (ConfigError, VersionGone):
            if get_restoration(self._queue) is None:
                raise
            return False
        return True

    def restore(self) -> bool:
        """Load the version of a pending rollback; the same in all ranks. Return False without one."""
        loaded = False
        while True:
            packed = self._ranks.by_first("rollbacks", lambda: pack_restoration(self._queue))
            target = Restoration.decoded(self._queue, packed)
            if target is None:
                return loaded
            with contextlib.suppress(ConfigError, VersionGone):  # the version being published was withdrawn
                self.publisher.flush()
            optimizer = self._load(target)
            what = f"the weights of version {target.version}"
            if self._ranks.by_first(what, partial(self._report_restored, target, optimizer)):
                self._last = target.version
            loaded = True

    def settle(self) -> None:
        """Wait for every rank's part of the last version, since a closing rank withdraws its part, and
        for the end of the evaluations. Load what these roll back to."""
        while True:
            self.restore()
            try:
                self.publisher.flush()
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

    def warn(self, text: str, lasting: bool = False) -> None:
        """Report a warning, once for all ranks."""
        if self._ranks.first:
            self._log.note(text, lasting=lasting)

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
    prompts, responses = (Ragged.of(list(ids), np.int32) for ids in (probe.prompt_ids, probe.response_ids))
    lengths = responses.lengths
    columns = {"prompt_ids": prompts, "response_ids": responses, VERSION_SPANS: one_version(0, lengths)}
    columns["logprobs"] = Ragged.from_lengths(np.zeros(int(lengths.sum()), np.float32), lengths)
    scores = engine.logprobs(Batch.of({**columns, "reward": np.zeros(len(lengths), np.float32)}))
    return msgspec.structs.replace(probe, logprobs=tuple(tuple(map(float, row)) for row in scores))
