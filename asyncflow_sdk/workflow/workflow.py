"""Workflow: a whole run as data. It is checked when made, runs, and leaves a directory.

result = af.Workflow(
    prompts={"prompt": questions, "answer": answers},
    rollout=af.Rollout("transformers", model=path, group_size=8, sampling=af.Sampling(max_tokens=32)),
    reward=exact_match,
    train=af.Train("torch", model=path, algorithm=af.GRPO(), learning_rate=1e-6),
    batch_size=256, steps=200, staleness=af.Staleness(max_staleness=1),
).run("runs/first")
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ConfigError, Interrupted, MemoryFull, WorkerFailed
from ..interfaces import SAMPLING_MASK
from ..ledger import Audit, TaskSpec
from ..ledger import commands as cmd
from ..ledger.state.rows import MAX_COLUMNS
from ..plugins import registry
from ..queue.protocol import error_text
from ..types import LOSS_MASK, Batch, Event, Staleness, Store, Weights
from ..types import events as ev
from ..types.spans import FINISH_REASON
from .data import Feeder, PromptStream, Selection, prompt_source, select_like
from .endpoints import serve
from .evaluation import EVALUATION, SCORES, Evaluator, TrainerState, best_of, read_evaluations
from .loops.engine_gateway import derived_seed
from .loops.event_sinks import EventSink, Listener, ProgressLine
from .loops.record_files import EVENTS
from .loops.recorder import Recorder
from .loops.trackers import tracker_list
from .loops.waits import FailureLimit, StallTimer
from .plan.checks import check_plan, find_models
from .plan.plan import AHEAD_STEPS, Plan, WorkflowOptions
from .plan.text import describe, mermaid, plan_text
from .processes.signals import StopSignals
from .processes.worker_pool import Worker
from .rewards import Rewards
from .run import Run
from .run_directory import Leg, RunDirectory
from .serialization import Serializable, keywords_of
from .specs import TRAINED, Rollout, Stage, Train, declare_task, trained_rollout
from .work import Generate

_OnEvent: TypeAlias = Callable[[Event], None]
REWARD_STEPS = 20
"""Most steps in the mean of the first and of the last reward of a summary."""
FINISH_S = 30.0
"""Workers may take this long to end after the last step, an export included (seconds)."""


_Spec = TypeVar("_Spec", Rollout, Stage)


def _seeded(spec: _Spec, seed: int) -> _Spec:
    """Return a copy with a seed for its task, unless its sampling has one."""
    drawing = spec.work if isinstance(spec, Stage) else spec
    if not isinstance(drawing, (Rollout, Generate)) or drawing.sampling.seed is not None:
        return spec
    sampling = replace(drawing.sampling, seed=derived_seed(seed, zlib.crc32(spec.task.encode())))
    if isinstance(spec, Stage):
        return spec.changed(work=drawing.changed(sampling=sampling))
    return spec.changed(sampling=sampling)


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run. ``summary``: the content of summary.json."""

    directory: Path
    summary: dict[str, Any]

    def __repr__(self) -> str:
        did = "{status}, {steps} of {steps_wanted} steps".format_map(self.summary)
        rewards = " to ".join("none" if each is None else f"{each:.3f}" for each in self.rewards)
        return f"Result({str(self.directory)!r}: {did}, reward {rewards})"

    @property
    def rewards(self) -> tuple[float, float]:
        """Mean reward over the first and over the last ``summary["reward_steps"]`` steps: 20, or half of fewer than
        40 steps; of a single step its reward, twice."""
        return self.summary["reward_first"], self.summary["reward_last"]

    @property
    def evaluations(self) -> list[ev.Evaluated]:
        """All evaluations, in order."""
        return read_evaluations(self.directory)

    @property
    def best(self) -> ev.Evaluated | None:
        """The evaluation with the best score, whose weights are in the folder ``best``; None without one."""
        return best_of(self.evaluations)


class Workflow(Serializable):
    """Prompts → rollout → stages → train, or any other acyclic dataflow: every task works on the rows that have its
    columns, at the same time as the others. ``print`` shows it.

    ``rename``: new names of the data's columns, by their old ones. Columns that no task needs are left out; one with
    the name of a column of the run is called ``data_NAME``. ``long_prompts``: "error" refuses prompts without room
    for ``max_tokens`` in the model's context, "drop" leaves them out, "truncate_left" keeps their last tokens.
    ``rollout``: one, or several of different engines. ``stages``: between rollout and training; ``reward``: a further
    one that gives the column ``reward``: a function, a Stage, or a list of functions and pairs (function, weight)
    whose weighted sum it is; each also fills a column ``reward_NAME``, and None leaves it out of a row's sum.
    ``batch_size``: rows of a step, a multiple of the group size. ``steps``: of the run; ``epochs``: end it earlier,
    when every prompt was put this often; None: prompts repeat until the last step. ``staleness``, ``weights``: how
    old trained tokens may be, and how versions reach the replicas. ``seed``: seed of the order of prompts and, for
    samplings without one, of the draws; None: draws differ in each run. ``on_failure``: stop or continue once a
    worker has failed for good. ``max_failed``: share of the last 100 groups that ended, or of a step's if it has
    more, that may fail in any task before the run ends; others take their place. ``capacity_rows``: limit of live
    rows; None: as batch and staleness need. ``checkpoint``: how often to save, so that ``resume`` continues the run
    after any death, and a restarted trainer (``max_restarts``) its training. ``evaluate``: evaluations beside
    training. ``save_steps``: write the Hugging Face folder ``models/step-000020`` every so many steps;
    ``save_total_limit``: keep so many, the newest; None: all. ``store``: where columns stay; another one than "local"
    needs a ``checkpoint``, since the record of the run reads rows after they were trained. ``stall_timeout_s``: fail,
    with all waits of the run, if no step was trained for this long. ``track``: as of ``serve``.

    ``address``: tcp address for workers of other hosts, which ``hosts`` of a rollout, stage or train starts, or
    people by ``asyncflow worker``; ``advertise``: as of ``serve``. Both are with keys.

    The constructor raises ConfigError with every problem that can be known before a process starts; PluginError if a
    missing engine is the only one."""

    elsewhere: Mapping[str, str] = {"learning_rate": "did you mean learning_rate= of Train?"}

    plan: Plan
    """All settings, with the choices of transport and swap policies."""

    @keywords_of(WorkflowOptions)
    def __init__(self, options: WorkflowOptions) -> None:
        rollouts = (options.rollout,) if isinstance(options.rollout, Rollout) else tuple(options.rollout)
        if not rollouts:
            raise ConfigError("a workflow needs a rollout; this one has none")
        staleness, evaluate, seed = options.staleness or Staleness(), options.evaluate, options.seed
        first = trained_rollout(rollouts)
        scoring = _scoring(options.reward)
        evaluating = [] if evaluate is None else [evaluate.stage, *filter(None, [evaluate.rollout])]
        find_models(
            rollout=rollouts, reward=scoring, stages=options.stages, train=[options.train], evaluate=evaluating
        )
        stages = tuple(each.masked(rollouts) for each in options.stages)
        stages = stages if evaluate is None else (*stages, evaluate.stage)
        if seed is not None and seed >= 0:
            rollouts = tuple(_seeded(each, seed) for each in rollouts)
            scoring, stages = (tuple(_seeded(each, seed) for each in given) for given in (scoring, stages))
            first = trained_rollout(rollouts)
        if evaluate is not None:
            rollouts = evaluate.rollouts(rollouts, stages)
        train = options.train.needing(
            *(name for each in scoring if isinstance(each.work, Rewards) for name in each.work.names),
            FINISH_REASON,
            *([LOSS_MASK] if any(each.agent is not None and each.admits for each in rollouts) else []),
            *(SAMPLING_MASK if first.sampling.sampling_mask else ()),
        )
        columns = _select(first.prompt, rollouts, (*scoring, *stages), train, options.rename)
        source = prompt_source(options.prompts, columns)
        stream = source if isinstance(source, PromptStream) else None
        data = source.head if isinstance(source, PromptStream) else source
        held_out = None if evaluate is None else select_like(evaluate.prompts, columns, data)
        capacity = options.batch_size * (staleness.max_staleness + AHEAD_STEPS)
        if evaluate is not None and held_out is not None:
            capacity += held_out.rows * evaluate.samples
        self._given: tuple[Batch | None, Batch | None] = (None, None)
        """Prompts and held-out ones, none left out or cut, for a resumed run."""
        if options.checkpoint is not None:
            self._given = None if stream is not None else data, held_out
        names = {TRAINED[0]: set(data), EVALUATION: set(held_out if held_out is not None else data)}
        self.plan = Plan(
            options=options,
            data=data,
            columns=columns,
            stream=stream,
            rollouts=rollouts,
            stages=tuple(each.of_data(names) for each in (*scoring, *stages)),
            train=train.sized(options.batch_size, first.group_size, options.steps),
            staleness=staleness,
            weights=options.weights or train.weights or Weights(),
            capacity_rows=capacity if options.capacity_rows is None else options.capacity_rows,
            held_out=held_out,
            store=Store.of(options.store),
            trackers=tracker_list(options.track),
        )
        check_plan(self.plan)

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain data. ``edges``: columns from task to task; ``choices``: all choices with their
        reasons."""
        return describe(self.plan)

    def mermaid(self) -> str:
        """Return the tasks and the columns between them as a Mermaid flowchart."""
        return mermaid(self.plan)

    def __str__(self) -> str:
        return plan_text(self.plan)

    def __repr__(self) -> str:
        plan = self.plan
        engines = ", ".join(each.engine for each in (*plan.rollouts, plan.train))
        return f"Workflow({engines}: {plan.options.steps} steps of {plan.options.batch_size} rows)"

    def run(
        self, directory: str | Path, *, on_event: Callable[[Event], None] | None = None, progress: bool | None = None
    ) -> Result:
        """Run to the last step. ``on_event`` receives every event, in a thread of its own. ``progress``: show a line
        of it on the terminal, or else log it; None: unless ``on_event`` is given.

        After any end the directory holds the results so far, and no process and no shared memory is left. Raises
        WorkerFailed with the worker and its traceback; Interrupted after Ctrl-C, which stops the workers in the
        middle of their work (a second one kills them); ConfigError."""
        return self._run_in(RunDirectory(Path(directory)), on_event, progress, again=False)

    @classmethod
    def load(cls, directory: str | Path, changes: Mapping[str, Any] | None = None) -> Workflow:
        """Make the workflow of a run directory again. ``changes``: as of ``resume``. Raises ConfigError, also if a
        part of it cannot be imported any more."""
        workflow = RunDirectory(Path(directory)).read_workflow(changes or {})
        if not isinstance(workflow, cls):
            raise ConfigError(f"{directory} holds no workflow")
        return workflow

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        *,
        changes: Mapping[str, Any] | None = None,
        on_event: Callable[[Event], None] | None = None,
        progress: bool | None = None,
    ) -> Result:
        """Continue a run with a ``checkpoint`` that was killed, failed or interrupted: the queue as it was, training
        from the newest checkpoint. ``changes``: new values by dotted key. With other numbers and places of workers,
        as {"rollout.replicas": 4, "train.hosts": ["gpu3"]}, the queue stays; with others, as {"steps": 400,
        "train.learning_rate": 1e-6}, also of a completed run, rows that the checkpoint does not cover are generated
        anew. Without such changes it returns the result of a completed run. ``on_event``, ``progress``: arguments of
        ``run``. Raises its errors; ConfigError if another process runs the directory, if a part of the workflow is
        gone, and for values that cannot change, by name."""
        return cls.load(directory, changes).resume_in(Path(directory), on_event, progress)

    def resume_in(self, directory: Path, on_event: _OnEvent | None = None, progress: bool | None = None) -> Result:
        """Continue the run of ``directory`` with this workflow, which may differ from the recorded one; see
        ``resume``."""
        record = RunDirectory(directory)
        summary, changes = record.read_summary(), record.changes_to(self, self.plan.stream is None)
        if summary.get("status") == "completed" and not changes:
            return Result(directory, summary)
        new = changes or record.queue_is_over
        return self._run_in(record, on_event, progress, again=True, changes=changes if new else None)

    def _run_in(
        self,
        directory: RunDirectory,
        on_event: _OnEvent | None,
        progress: bool | None,
        *,
        again: bool,
        changes: dict[str, list[Any]] | None = None,
    ) -> Result:
        resumable = self.plan.options.checkpoint is not None
        if changes is None:
            directory.check_record(continues=again, trained=again)
        with contextlib.ExitStack() as held:
            if resumable:
                held.enter_context(directory.lock())
            legs: list[Leg] = directory.legs() if again else []
            directory.keep(*self._given)
            if changes is not None:
                legs.append(directory.begin_leg(changes, self.plan.options.steps))
            with directory.writable():
                recorder = Recorder(directory.path, again=again)
            try:
                whole = self.plan.stream is None
                directory.write_description(self.describe(), self if resumable else None, whole, legs)
            except BaseException:
                recorder.close()
                if not again:
                    (directory.path / EVENTS).unlink(missing_ok=True)
                raise
            shown = on_event is None if progress is None else progress
            line = ProgressLine(self.plan.options.steps) if shown else None
            return _Execution(self.plan, directory, recorder, line, on_event, legs).run(again, changes is not None)


def _scoring(reward: Callable[..., Any] | Stage | Sequence[Any] | None) -> tuple[Stage, ...]:
    """Return the stage of a reward, if there is one."""
    if isinstance(reward, (list, tuple)):
        rewards = Rewards.of(reward)
        return (Stage(rewards, task="reward", gives=rewards.gives),)
    if reward is None or isinstance(reward, Stage):
        return () if reward is None else (reward,)
    return (Stage(reward, task="reward", gives=["reward"]),)  # type: ignore[arg-type]


def _select(
    prompt: str, rollouts: Sequence[Rollout], stages: Sequence[Stage], train: Train, rename: Mapping[str, str] | None
) -> Selection:
    """Return the columns of the data for all tasks; for a function with ``**columns``, as many others as there is
    room for. A prompt is always the data's."""
    tasks: list[TaskSpec | Stage] = [*(each.task_spec for each in rollouts), *stages]
    needs = {prompt, *train.needs, *(name for each in tasks for name in each.needs)}
    gives = {name for each in tasks for name in each.gives} - {each.prompt for each in rollouts}
    more = max(0, MAX_COLUMNS - len(needs | gives)) if any(each.takes_all for each in stages) else 0
    return Selection(prompt=prompt, needs=needs, gives=gives, rename=rename or {}, more=more)


class _Execution:
    """One process's run of a plan in a directory."""

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        recorder: Recorder,
        line: ProgressLine | None,
        on_event: _OnEvent | None,
        legs: Sequence[Leg],
    ) -> None:
        self._legs = legs
        self._plan, self._directory, self._recorder, self._line = plan, directory, recorder, line
        self._stall = StallTimer(plan.options.stall_timeout_s)
        group_size = plan.rollout.group_size
        self._failures = FailureLimit(plan.options.max_failed, plan.options.batch_size // group_size, group_size)
        self._trainer = TrainerState()
        self._listeners = [Listener(each) for each in (line, on_event) if each is not None]
        self._sinks: list[EventSink] = [self._stall, self._failures, self._trainer, recorder, *self._listeners]
        self._status = "completed"
        self._error: AsyncFlowError | None = None
        self._audit: Audit | None = None
        self._feeder: Feeder | None = None

    def run(self, again: bool, changed: bool) -> Result:
        """Run to the end and write the summary. Raises the run's error."""
        path, recorder = self._directory.path, self._recorder
        began = time.monotonic()
        for sink in self._sinks:
            sink.event(ev.Begun(time_s=began, again=again))
            if changed:
                sink.event(ev.Note(time_s=began, text=f"training goes on {self._legs[-1]}"))
        with StopSignals() as signals:
            try:
                self._serve(signals)
            except KeyboardInterrupt:
                self._status = "interrupted"
                self._error = Interrupted(f"stopped by request; what was done is in {path}")
            except AsyncFlowError as error:
                self._status, self._error = "failed", error
            except Exception as error:
                self._status, self._error = "failed", WorkerFailed("the driver failed", "driver", error_text(error))
                self._error.__cause__ = error
            signals.closing()
            self._close_sinks()
            summary = self._summary(time.monotonic() - began)
            try:
                self._directory.write_summary(summary)
            except OSError as error:
                text = f"{path} has no summary.json: {error}; the run {self._status}"
                steps = f"{recorder.steps} of {self._plan.options.steps} steps trained"
                self._error = self._error or MemoryFull(f"{text}, {steps}")
        if isinstance(self._error, Interrupted):
            self._error.repeated = signals.hurried
        if self._error is not None:
            raise self._error
        return Result(path, summary)

    def _close_sinks(self) -> None:
        self._recorder.close()
        for listener in self._listeners:
            for note in self._recorder.notes:
                listener.event(note)
            listener.close()
            self._recorder.errors += listener.problems
        if self._line is not None:
            self._line.end()

    def _serve(self, signals: StopSignals) -> None:
        plan, options = self._plan, self._plan.options
        resumable = options.checkpoint is not None
        run = serve(
            self._directory.path,
            address=options.address,
            advertise=options.advertise,
            sinks=self._sinks,
            on_failure=options.on_failure,
            durability="process" if resumable else None,
            store=plan.store,
            history=options.checkpoint is not None and options.checkpoint.history,
            track=plan.trackers,
            description=describe(plan) if plan.trackers else None,
            **plan.limits,
        )
        completed = False
        if self._legs:
            run.queue.send(cmd.Configure(first_step=self._legs[-1].step))
        self._recorder.connect(run.report)
        for problem in (*registry().problems, *plan.warnings):
            run.report(ev.Note(time_s=time.monotonic(), text=problem, level="warning"))
        for choice in plan.choices:
            run.report(
                ev.Chosen(time_s=time.monotonic(), what=choice.what, chosen=choice.chosen, reason=choice.reason)
            )
        try:
            trainer = self._start(run)
            if self._legs and self._legs[-1].step >= options.steps:  # the export was missing alone
                run.queue.end()
            run.wait(trainer, timeout_s=math.inf, stall=self._stall, failures=self._failures)
            self._recorder.settle(options.steps)  # a warning of the last steps is still logged
            run.join_workers(FINISH_S)
            completed = True
        finally:
            signals.closing(run.kill_workers)  # a signal must not interrupt the rest
            try:
                run.finish() if completed or not resumable else run.stop_workers()
                self._audit = run.audit()
            finally:
                run.close()

    def _start(self, run: Run) -> Worker:
        """Declare the tasks, start all workers and the feeder. Returns the trainer."""
        plan, options, path = self._plan, self._plan.options, self._directory.path.absolute()
        run.declare(plan.train, options.batch_size)
        for stage in plan.stages:
            run.start(stage)
        weights = plan.chosen_weights
        samplings: dict[str, Any] = {}
        if options.evaluate is not None:
            samplings = {EVALUATION: options.evaluate.sampling_of(plan.rollout)}
            declare_task(run.queue, SCORES)
        for rollout, swap in zip(plan.rollouts, plan.swaps, strict=True):
            limit = plan.prompt_limit(rollout) if options.long_prompts == "truncate_left" else None
            draws = samplings if {EVALUATION, "*"}.intersection(rollout.partitions) else {}
            run.start(rollout, needs_first=True, weights=weights, swap=swap, samplings=draws, prompt_limit=limit)
        saved: dict[str, Any] = {}
        if options.checkpoint is not None:
            saved = {"checkpoint": options.checkpoint, "checkpoints": str(path / "checkpoints")}
        if options.save_steps is not None:
            saved |= {"models": str(path / "models"), "save_steps": options.save_steps}
            saved |= {"save_total_limit": options.save_total_limit}
        if options.evaluate is not None and plan.held_out is not None:  # before any version it is put for
            Evaluator(run, options.evaluate, plan.held_out, plan.train.model, options.steps, self._trainer).start()
        (trainer,) = run.start(plan.train, export=str(path / "model"), weights=weights, **saved)
        self._feeder = Feeder(
            run.queue,
            plan.stream or plan.data,
            group_size=plan.rollout.group_size,
            chunk=options.batch_size // plan.rollout.group_size,
            seed=options.seed or 0,
            on_failure=run.fail,
            epochs=options.epochs,
            ends=None if options.evaluate is None else TRAINED[0],
            begin=self._legs[-1].prompts if self._legs else 0,
        )
        self._feeder.start()
        return trainer

    def _summary(self, wall_s: float) -> dict[str, Any]:
        recorder, audit = self._recorder, self._audit
        rewards, statistics = recorder.rewards, recorder.statistics
        ends = min(REWARD_STEPS, max(len(rewards) // 2, 1))  # the two means share no step
        return {
            "status": self._status,
            "error": str(self._error) if self._error is not None else None,
            "steps": recorder.steps,
            "steps_wanted": self._plan.options.steps,
            "reward_first": float(np.mean(rewards[:ends])) if rewards else None,
            "reward_last": float(np.mean(rewards[-ends:])) if rewards else None,
            "reward_steps": ends if rewards else 0,
            "prompts_left_out": self._plan.left_out + (self._feeder.left_out if self._feeder is not None else 0),
            "rows": audit.terminal if audit else {},
            "rows_put": audit.put if audit else 0,
            "rows_live": audit.live if audit else 0,
            "reasons": audit.reasons if audit else {},
            "legs": msgspec.to_builtins(self._legs),
            "balanced": audit.balanced if audit else None,
            "staleness_max": recorder.staleness_max,
            **self._evaluated(),
            **statistics.summary(),
            "wall_s": round(statistics.before_s + wall_s, 3),
            "seed": self._plan.options.seed,
            "model": self._plan.train.model,
            "report": None,
            "warnings": recorder.errors,
        }

    def _evaluated(self) -> dict[str, Any]:
        evaluations = read_evaluations(self._directory.path)
        if (best := best_of(evaluations)) is None:
            return {}
        scores = {str(each.version): each.score for each in evaluations}
        return {"evaluations": scores, "best_version": best.version, "best_score": best.score}


resume = Workflow.resume
