"""Evaluator: puts the prompts of each evaluation, scores its rows, and acts on the score.

RUN/evaluations.jsonl            one evaluation a line; a score is there before anything follows from it
RUN/evaluations/000020.safetensors
                                 the rows of the evaluation of version 20
RUN/best/                        the Hugging Face folder of the best version

The prompts of an evaluation are put before its version exists, pinned to it. After a death of the
driver the rows are still in the queue: the next driver scores them, and completes the work.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from math import comb
from pathlib import Path

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ConfigError, Ended, LeaseLost
from ..interfaces import LeasedBatch
from ..ledger import commands as cmd
from ..memory import make_private_directory
from ..types import VERSION_SPANS, Batch, Event
from ..types import events as ev
from ..types.defaults import FEED_S
from ..weights import fetch_version
from .evaluation import EVALUATION, SCORES, Evaluation
from .events.event_sinks import EventSink
from .events.failure_limit import KEPT
from .events.step_files import write_batch
from .model_folder import write_model_folder
from .run import Run
from .specs import TRAINED


class TrainerState(EventSink):
    """Knows if the trainer works: before it has resumed, a rollback would give up its checkpoints."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def event(self, event: Event) -> None:
        """Take an event of the run."""
        if isinstance(event, ev.WorkerState) and event.worker.startswith("train-"):
            (self.ready.set if event.state == "ready" else self.ready.clear)()


class Evaluator:
    """Evaluates the versions of a run in a thread of its own. ``results``: so far, also of earlier
    drivers. ``model``: source of configuration and tokenizer. ``steps``: of the run.
    ``on_failure`` is called with an error of its thread."""

    def __init__(
        self, run: Run, evaluation: Evaluation, data: Batch, directory: Path, *, model: str, steps: int,
        trainer: TrainerState,
        on_failure: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._run, self._queue, self._evaluation, self._data = run, run.queue, evaluation, data
        self._directory, self._model, self._steps, self._on_failure = directory, model, steps, on_failure
        self._trainer = trainer
        self._file = directory / "evaluations.jsonl"
        self.results = read_evaluations(directory)
        self._puts = 0  # also of earlier drivers
        self._failed = 0  # the version at the end of an evaluation without a score that counts
        self._thread = threading.Thread(target=self._guard, name="evaluator", daemon=True)

    @property
    def best(self) -> ev.Evaluated | None:
        """The evaluation with the best score; of several the first."""
        return max(self.results, key=lambda each: each.score, default=None)

    def start(self) -> None:
        """Put the first prompts, before their version exists, and start its thread."""
        last: cmd.LastPut = self._queue.send(cmd.GetPut(prefix=f"{EVALUATION}-"))
        self._puts = int(last.key.rpartition("-")[2]) + 1 if last.key else 0
        if not last.key:  # else the rows of an earlier driver come first
            self._put()
        self._thread.start()

    def _guard(self) -> None:
        try:
            more = True
            while more:
                self._score_rows(time.monotonic())
                more = self._put()
            self._queue.end(partition=EVALUATION)
        except Ended:
            pass
        except Exception as error:
            self._on_failure(error)

    def _put(self) -> bool:
        """Put the prompts for the next version. Return False after the last one."""
        every, best = self._evaluation.every, self.best
        last = max(self._failed, self.results[-1].version if self.results else 0)
        position: cmd.TrainingPosition = self._queue.send(cmd.GetTrainingPosition())
        if position.step >= self._steps and position.version <= last:
            return False
        guarded = best is not None and self._evaluation.rollback_margin is not None
        try:
            self._queue.put(
                dict(self._data), group_size=self._evaluation.samples, key=f"{EVALUATION}-{self._puts}",
                partition=EVALUATION, version=(last // every + 1) * every,
                keep_version=best.version if best is not None and guarded else None, timeout_s=FEED_S,
            )  # fmt: skip
        except Ended:
            return False
        self._puts += 1
        return True

    def _score_rows(self, began: float) -> None:
        """Score the rows put last, once they are all there. Rows of a version rolled back or lost are put again."""
        rows = self._data.rows * self._evaluation.samples
        try:
            batch = self._queue.get(SCORES.name, rows, at_least=rows, partition=EVALUATION, timeout_s=FEED_S)
        except Ended:
            batch = None
        letters = [each for each in self._queue.failed(KEPT) if each.key == f"{EVALUATION}-{self._puts - 1}"]
        lost = any(not each.task for each in letters)  # with their host: the others are no fair sample
        if letters:
            failed, last = sum(each.rows for each in letters), "".join(letters[-1].reasons[-1:]).partition("\n")[0]
            then = f"{'it has no' if batch is None else 'they are not in its'} score; the last one: {last}"
            if lost and batch is not None:
                score = batch.array("reward").astype(np.float64).mean()
                then = f"the others' score, {score:.4g}, counts for nothing; the last one: {last}"
            self._note(f"{failed} of {rows} rows of an evaluation failed, and {then}", "warning")
        if batch is None:
            if letters:
                self._failed = self._queue.send(cmd.GetTrainingPosition()).version
            return
        version = int(batch.ragged(VERSION_SPANS).values[0, 0])
        if lost:
            self._failed = version
        try:
            if not lost:
                known = next((each for each in self.results if each.version == version), None)
                self._act(known or self._record(batch, version, time.monotonic() - began))
            batch.complete()
        except LeaseLost:  # its rollback has ended the rows
            pass

    def _record(self, batch: LeasedBatch, version: int, seconds: float) -> ev.Evaluated:
        rewards, best = batch.array("reward").astype(np.float64), self.best
        score = float(rewards.mean())
        scored = ev.Evaluated(
            time_s=time.monotonic(), version=version, score=score, rows=batch.rows,
            best=best is None or score > best.score, pass_at=pass_at(rewards >= 1, batch.groups), seconds=seconds,
        )  # fmt: skip
        folder = self._directory / "evaluations"
        make_private_directory(folder)
        write_batch(folder / f"{version:06d}.safetensors", batch)
        with open(self._file, "ab") as file:
            file.write(msgspec.json.encode(scored) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.results.append(scored)
        self._run.report(scored)
        return scored

    def _act(self, scored: ev.Evaluated) -> None:
        """Keep the best version, give up a bad one, or end training. Also again, after a death between."""
        margin, patience, best = self._evaluation.rollback_margin, self._evaluation.early_stopping_patience, self.best
        assert best is not None
        if scored is best:
            self._keep_folder(scored.version)
        elif margin is not None and scored.score < best.score - margin:
            self._trainer.ready.wait(FEED_S)
            why = f"version {scored.version} scored {scored.score:.4g}, and version {best.version} {best.score:.4g}"
            try:
                done = self._run.rollback(best.version, why)
            except ConfigError as error:
                self._note(f"{why}, but it cannot be rolled back: {error}", "error")
            else:
                self._note(f"{why}: rolled back, as version {done.version}", "warning")
        since = len(self.results) - 1 - self.results.index(best)
        if patience is not None and since >= patience:
            self._note(
                f"training ends early: {since} evaluations in a row scored no better than version {best.version}"
            )
            self._queue.end(partition=TRAINED[0], cancel=True)

    def _keep_folder(self, version: int) -> None:
        """Write the folder of the best version, in the place of the one before."""
        try:
            with fetch_version(self._queue, version).fetch() as update:
                write_model_folder(update, self._model, self._directory / "best")
        except (AsyncFlowError, OSError, NotImplementedError) as error:
            self._note(f"version {version} is the best so far, and its folder was not written: {error}", "error")

    def _note(self, text: str, level: str = "info") -> None:
        self._run.report(ev.Note(time_s=time.monotonic(), text=text, level=level))


def read_evaluations(directory: Path) -> list[ev.Evaluated]:
    """Return the evaluations of a run so far. A torn last line is left out."""
    found = []
    try:
        lines = (directory / "evaluations.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=ev.Evaluated))
        except msgspec.MsgspecError:
            continue
    return found


def pass_at(passed: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, … and the number of samples: the share of prompts with a passing
    response among k, by the unbiased estimator 1 - C(n - c, k) / C(n, k) of arXiv 2107.03374, eq. 1."""
    _, prompt, n = np.unique(groups, return_inverse=True, return_counts=True)
    correct = np.bincount(prompt, weights=passed).astype(int)
    most = int(n.min())
    counts = list(zip(n.tolist(), correct.tolist(), strict=True))
    ks = sorted({most, *(1 << power for power in range(most.bit_length()))})
    return {
        str(k): float(np.mean([1 - comb(total - right, k) / comb(total, k) for total, right in counts])) for k in ks
    }
