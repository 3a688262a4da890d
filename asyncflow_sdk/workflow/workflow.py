"""Workflow: a whole run as data. It checks itself before anything starts, runs, and leaves a directory.

result = af.Workflow(
    prompts={"prompt": questions, "answer": answers},
    rollout=af.Rollout("transformers", model=path, group_size=8, sampling=af.Sampling(max_tokens=32)),
    reward=exact_match,
    train=af.Train("torch", model=path, algorithm=af.GRPO(), lr=1e-6),
    batch_size=256, steps=200, staleness=af.Staleness(max_staleness=1),
).run("runs/first")
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import AsyncFlowError, ConfigError, Interrupted, MemoryFull, WorkerFailed
from ..interfaces import OnFailure, Placement
from ..ledger import Audit
from ..plugins import registry
from ..types import LOSS_MASK, Checkpoint, Event, Staleness, Weights
from ..types import events as ev
from .checking import AHEAD_STEPS, problems_of
from .data import Feeder, Prompts, load_prompts
from .describing import Described
from .planning import Plan
from .recorder import Recorder, Sink
from .resuming import again, alone, read_summary, writable, write_description, write_whole
from .run import Run, task_arguments
from .serving import serve
from .showing import described, drawn, shown
from .signals import StopSignals
from .specs import Rollout, Stage, Train
from .supervise import Worker
from .tracking import Tracked, several
from .waiting import Stall

REWARD_STEPS = 20
"""Most steps that the first and the last reward of a summary are the mean of."""
FINISH_S = 30.0
"""How long workers may take to end by themselves after the last step (seconds); exporting a model counts."""


@dataclass(frozen=True)
class Result:
    """How a run ended. ``summary`` is what summary.json holds."""

    directory: Path
    summary: dict[str, Any]

    @property
    def rewards(self) -> tuple[float, float]:
        """Mean reward over the first and over the last ``summary["reward_steps"]`` steps: 20, of fewer than 40 steps half of them, so
        that no step counts in both; of a single step its reward, twice."""
        return self.summary["reward_first"], self.summary["reward_last"]


class Workflow(Described):
    """Prompts → rollout → stages → train, or any other dataflow without cycles: every task works on the rows that have the
    columns it needs, at the same time as the others. ``print`` shows it.

    ``rollout``: one, or several of different engines. ``stages``: between rollout and training; ``reward`` is the one that
    gives ``reward``, where no other does. ``batch_size``: rows of a step, a multiple of the group size. ``epochs``: the
    run ends, at ``steps`` at the latest, when every prompt was put so often; None goes on as long as steps want rows.
    ``weights``: how new versions reach the replicas. ``seed``: of the order of the prompts. ``on_failure``: whether the run
    stops or goes on when a worker has failed for good. ``capacity_rows``: most rows alive at once; None: what the
    batch and the staleness ask for. ``checkpoint``: how often a checkpoint is made, so that ``resume`` goes on with the run
    after whatever died, and a trainer that is started again (``max_restarts``) after itself. ``stall_timeout_s``: when no step was
    trained for so long, the run ends and says who waits for what. ``trackers``: those that hear of the run, see ``serve``.
    Raises ConfigError when made, for everything that can be known before a process starts, all of it at once; PluginError
    where an engine is missing and nothing else is wrong.
    """

    plan: Plan
    """By what weights travel and when they are loaded, with the reasons."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        rollout: Rollout | Sequence[Rollout],
        train: Train,
        batch_size: int,
        steps: int,
        reward: Callable[..., Any] | Stage | None = None,
        stages: Sequence[Stage] = (),
        staleness: Staleness | None = None,
        weights: Weights | None = None,
        epochs: int | None = None,
        seed: int = 0,
        on_failure: OnFailure = "stop",
        capacity_rows: int | None = None,
        checkpoint: Checkpoint | None = None,
        stall_timeout_s: float = 3600.0,
        trackers: Tracked | Sequence[Tracked] = (),
    ) -> None:
        self.rollouts = (rollout,) if isinstance(rollout, Rollout) else tuple(rollout)
        if not self.rollouts:
            raise ConfigError("a workflow needs a rollout; this one has none")
        self.rollout = next((each for each in self.rollouts if each.admits), self.rollouts[0])
        masked = any(rollout.agent is not None and rollout.admits for rollout in self.rollouts)
        self.train = train.needing(LOSS_MASK) if masked else train
        self.batch_size, self.steps, self.epochs, self.seed = batch_size, steps, epochs, seed
        self.staleness = staleness or Staleness()
        self.weights = weights or train.weights or Weights()
        if reward is not None and not isinstance(reward, Stage):
            reward = Stage(reward, task="reward", gives=["reward"])
        self.reward = reward
        self.stages = (*([reward] if reward is not None else []), *stages)
        self.on_failure = Placement(on_failure=on_failure).on_failure or "stop"
        self.checkpoint, self.stall_timeout_s = checkpoint, stall_timeout_s
        self.trackers = several(trackers)
        self.data = load_prompts(prompts, self.rollout.prompt)
        ahead = batch_size * (self.staleness.max_staleness + AHEAD_STEPS)
        self.capacity_rows = ahead if capacity_rows is None else capacity_rows
        self._check()

    def _check(self) -> None:
        problems_of(self).raise_all()

    def describe(self) -> dict[str, Any]:
        """What will run, as plain data: ``edges`` are the columns from task to task, ``choices`` what was chosen and why."""
        return described(self)

    def mermaid(self) -> str:
        """The tasks and the columns between them as a Mermaid flowchart."""
        return drawn(self)

    def __str__(self) -> str:
        return shown(self)

    def run(self, directory: str | Path, *, on_event: Sink | None = None) -> Result:
        """Run to the last step. ``on_event`` hears every event, in a thread of its own.

        Whatever happens, the directory holds what was done, and no process and no shared memory is left.
        Raises WorkerFailed naming the worker, with its traceback; Interrupted after Ctrl-C, when the workers were stopped in the
        middle of what they did, and after a second Ctrl-C, when they were killed; ConfigError.
        """
        return self._run_in(Path(directory), on_event, again=False)

    @classmethod
    def resume(cls, directory: str | Path, *, on_event: Sink | None = None) -> Result:
        """Go on with a run that has a ``checkpoint`` and did not end: killed, failed or interrupted. The queue is as it was, and
        training goes on from the newest checkpoint. What a run that is complete came to is returned. Raises what ``run``
        raises; ConfigError for a directory that another process runs, and where something it is made of is gone."""
        return again(Path(directory)).resume_in(Path(directory), on_event)

    def resume_in(self, directory: Path, on_event: Sink | None) -> Result:
        summary = read_summary(directory)
        if summary.get("status") == "completed":
            return Result(directory, summary)
        return self._run_in(directory, on_event, again=True)

    def _run_in(self, directory: Path, on_event: Sink | None, *, again: bool) -> Result:
        with contextlib.ExitStack() as held:
            if self.checkpoint is not None:
                held.enter_context(alone(directory))
            with writable(directory):
                recorder = Recorder(directory, [on_event] if on_event is not None else [], again=again)
            try:
                if not again:
                    write_description(self, directory)
            except BaseException:
                recorder.close()
                (directory / "events.jsonl").unlink()
                raise
            return self._record(directory, recorder, again)

    def _record(self, directory: Path, recorder: Recorder, again: bool) -> Result:
        began = time.monotonic()
        recorder.event(ev.Begun(time_s=began, again=again))
        outcome = _Outcome()
        with StopSignals() as signals:
            try:
                self._run(directory, recorder, outcome, signals)
            except KeyboardInterrupt:
                outcome.status = "interrupted"
                outcome.error = Interrupted(f"stopped by request; what was done is in {directory}")
            except AsyncFlowError as error:
                outcome.status, outcome.error = "failed", error
            except Exception as error:
                outcome.status, outcome.error = "failed", WorkerFailed(f"the driver failed: {error!r}", "driver")
                outcome.error.__cause__ = error
            signals.closing()
            recorder.close()
            summary = self._summary(recorder, outcome, time.monotonic() - began)
            try:
                write_whole(directory / "summary.json", summary)
            except OSError as error:
                text = f"{directory} has no summary.json: {error}; the run {outcome.status}"
                outcome.error = outcome.error or MemoryFull(f"{text}, {recorder.steps} of {self.steps} steps trained")
        if isinstance(outcome.error, Interrupted):
            outcome.error.repeated = signals.hurried
        if outcome.error is not None:
            raise outcome.error
        return Result(directory, summary)

    def _run(self, directory: Path, recorder: Recorder, outcome: _Outcome, signals: StopSignals) -> None:
        stall = Stall(self.stall_timeout_s)

        def hear(event: Event) -> None:
            stall.hear(event)
            recorder.event(event)

        run = serve(
            directory, on_event=hear, on_step=recorder.step, on_final=recorder.settle, steps=self.steps,
            max_staleness=self.staleness.max_staleness, staleness_policy=self.staleness.policy,
            capacity_rows=self.capacity_rows, keep_versions=self.weights.keep,
            max_swapping=self.weights.max_swapping, quorum=self.weights.quorum,
            on_failure=self.on_failure,
            checkpoints=self.checkpoint is not None, durability=None if self.checkpoint is None else "process",
            history=self.checkpoint is not None and self.checkpoint.history,
            trackers=self.trackers, description=self.describe() if self.trackers else None,
        )  # fmt: skip
        completed = False
        for problem in registry().problems:
            run.tell(ev.Note(time_s=time.monotonic(), text=problem, level="warning"))
        for choice in self.plan.choices:
            run.tell(ev.Chosen(time_s=time.monotonic(), what=choice.what, chosen=choice.chosen, reason=choice.reason))
        try:
            trainer = self._start(run, directory)
            run.wait(trainer, timeout_s=math.inf, stall=stall)
            run.join_workers(FINISH_S)
            completed = True
        finally:
            signals.closing(run.kill_workers)  # what follows must not be left half done
            try:
                run.finish() if completed or self.checkpoint is None else run.stop_workers()
                outcome.audit = run.audit()
            finally:
                run.close()

    def _start(self, run: Run, directory: Path) -> Worker:
        spec = self.train.declare(self.batch_size)
        run.queue.declare(**task_arguments(spec))
        for stage in self.stages:
            run.start(stage)
        weights = dataclasses.replace(self.weights, transport=self.plan.transport)
        for rollout, swap in zip(self.rollouts, self.plan.swaps, strict=True):
            run.start(rollout, needs_first=True, weights=weights, swap=swap)
        kept: dict[str, Any] = {}
        if self.checkpoint is not None:
            kept = {"checkpoint": self.checkpoint, "checkpoints": str((directory / "checkpoints").absolute())}
        (trainer,) = run.start(self.train, export=str(directory / "model"), weights=weights, **kept)
        Feeder(
            run.queue, self.data, group_size=self.rollout.group_size, chunk=self.batch_size // self.rollout.group_size,
            seed=self.seed, on_failure=run.fail, epochs=self.epochs,
        ).start()  # fmt: skip
        return trainer

    def _summary(self, recorder: Recorder, outcome: _Outcome, wall_s: float) -> dict[str, Any]:
        audit, rewards = outcome.audit, recorder.rewards
        ends = min(REWARD_STEPS, max(len(rewards) // 2, 1))  # the two means share no step
        return {
            "status": outcome.status,
            "error": str(outcome.error) if outcome.error is not None else None,
            "steps": recorder.steps,
            "steps_wanted": self.steps,
            "reward_first": float(np.mean(rewards[:ends])) if rewards else None,
            "reward_last": float(np.mean(rewards[-ends:])) if rewards else None,
            "reward_steps": ends if rewards else 0,
            "rows": audit.terminal if audit else {},
            "rows_put": audit.put if audit else 0,
            "rows_live": audit.live if audit else 0,
            "reasons": audit.reasons if audit else {},
            "balanced": audit.balanced if audit else None,
            "staleness_max": recorder.staleness_max,
            **recorder.tally.summary(),
            "wall_s": round(recorder.tally.before_s + wall_s, 3),
            "seed": self.seed,
            "model": self.train.model,
            "report": None,
            "warnings": recorder.errors,
        }


def resume(directory: str | Path, *, on_event: Sink | None = None) -> Result:
    """``Workflow.resume``."""
    return Workflow.resume(directory, on_event=on_event)


@dataclass
class _Outcome:
    """What is known of a run's end, filled in as it ends."""

    status: str = "completed"
    error: AsyncFlowError | None = None
    audit: Audit | None = None
