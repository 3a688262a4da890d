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
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..errors import AsyncFlowError, ConfigError, Interrupted, PluginError, WorkerFailed
from ..interfaces import TRAIN_COLUMNS
from ..ledger import Audit
from ..plugins import registry
from ..types import Staleness, Weights
from ..weights.publisher import check_publishing
from .data import Feeder, Prompts, load_prompts
from .launch import LocalProcess
from .recorder import Recorder, Sink
from .run import Run, serve, task_arguments
from .specs import Rollout, Stage, Train
from .text import Text

AHEAD_STEPS = 3
"""Rows that may be alive at once, in steps beyond max_staleness: one trains, one fills, one is being fed."""
FINISH_S = 30.0
"""How long workers may take to end by themselves after the last step (seconds); exporting a model counts."""


@dataclass(frozen=True)
class Result:
    """How a run ended. ``summary`` is what summary.json holds."""

    directory: Path
    summary: dict[str, Any]

    @property
    def rewards(self) -> tuple[float, float]:
        """Mean reward over the first and the last 20 steps."""
        return self.summary["reward_first"], self.summary["reward_last"]


class Workflow:
    """Prompts → rollout → stages → train. ``stages`` run between rollout and training, each as soon as its own
    columns are there; ``reward`` is the stage that gives ``reward``.

    ``batch_size``: rows of a step, a multiple of the group size. ``weights``: how new versions reach the replicas. ``seed``: of
    the order of the prompts.
    Raises ConfigError when made, for everything that can be known before a process starts.
    """

    def __init__(
        self,
        *,
        prompts: Prompts,
        rollout: Rollout,
        reward: Callable[..., Any] | Stage,
        train: Train,
        batch_size: int,
        steps: int,
        stages: Sequence[Stage] = (),
        staleness: Staleness | None = None,
        weights: Weights | None = None,
        seed: int = 0,
    ) -> None:
        self.rollout, self.train = rollout, train
        self.batch_size, self.steps, self.seed = batch_size, steps, seed
        self.staleness = staleness or Staleness()
        self.weights = weights or train.weights or Weights()
        self.reward = reward if isinstance(reward, Stage) else Stage(reward, task="reward", gives=["reward"])
        self.stages = (self.reward, *stages)
        self.data = load_prompts(prompts, rollout.prompt)
        self._check()

    def _check(self) -> None:
        size = self.rollout.group_size
        if self.steps < 1:
            raise ConfigError(f"steps must be 1 or more, not {self.steps}")
        if self.batch_size < 1 or self.batch_size % size:
            near = max(size, round(self.batch_size / size) * size)
            raise ConfigError(
                f"no number of groups of {size} fills a batch of {self.batch_size} rows; use batch_size={near}"
            )
        if size == 1 and getattr(self.train.algorithm, "drop_zero_advantage", False):
            raise ConfigError(
                "group_size is 1: an advantage relative to the group is then always 0 and nothing would be"
                " learned; use groups of 2 or more"
            )
        for kind, spec in (("rollout", self.rollout), ("train", self.train)):
            if spec.place.python is None:  # another interpreter has plugins of its own
                registry().get(kind, spec.engine).load()  # type: ignore[arg-type]
            if spec.model and not Path(spec.model, "config.json").is_file():
                raise ConfigError(f"{kind} model {spec.model!r} is no model folder: it has no config.json")
        self._check_columns()
        self._check_lengths()
        self._check_temperature()
        self._check_weights()

    def _check_weights(self) -> None:
        if self.weights.quorum > self.rollout.replicas:
            raise ConfigError(
                f"quorum={self.weights.quorum} replicas must have a version staged before any loads it, and there are"
                f" {self.rollout.replicas}"
            )
        if self.train.place.python is None and not self.train.place.env:  # as it will be in the trainer's process
            check_publishing(self.weights.transport, self.weights.options)
        else:
            registry().get("transport", self.weights.transport)
        temperature = self.train.options.get("temperature", 1.0)
        if self.weights.probe is not None and temperature != 1.0:
            raise ConfigError(
                f"a probe is compared at temperature 1, and training computes log-probs at {temperature:g}: leave the"
                " probe out"
            )

    def _check_temperature(self) -> None:
        """Ratios of log-probs mean something only under the same distribution."""
        drawn, trained = self.rollout.sampling.temperature, self.train.options.get("temperature", 1.0)
        if drawn == 0:
            raise ConfigError("sampling at temperature 0 draws the same response for a whole group; use one above 0")
        if drawn != trained:
            raise ConfigError(
                f"responses are sampled at temperature {drawn:g}, but their log-probs are recomputed at {trained:g};"
                f" say Train(..., temperature={drawn:g})"
            )

    def _check_columns(self) -> None:
        there = set(self.data) | set(self.rollout.declare().gives)
        pending = list(self.stages)
        if len({s.task for s in pending} | {self.rollout.task, self.train.task}) < len(pending) + 2:
            raise ConfigError("two tasks have the same name")
        while pending:
            able = [stage for stage in pending if set(stage.needs) <= there]
            if not able:
                lacks = {s.task: sorted(set(s.needs) - there) for s in pending}
                text = "; ".join(f"{task!r} needs {', '.join(map(repr, names))}" for task, names in lacks.items())
                raise ConfigError(f"columns nobody gives: {text}. There are: {', '.join(sorted(there))}")
            for stage in able:
                twice = set(stage.gives) & there
                if twice:
                    raise ConfigError(f"stage {stage.task!r} gives {sorted(twice)}, which others give already")
                there |= set(stage.gives)
                pending.remove(stage)
        lacking = set(TRAIN_COLUMNS) - there
        if lacking:
            raise ConfigError(f"training needs {sorted(lacking)}, which no stage gives")

    def _check_lengths(self) -> None:
        """Prompts that leave no room for a response, where tokenizer and context are known here."""
        context = _context(self.rollout.model)
        if context is None:
            return
        if self.rollout.prompt == "prompt_ids":
            lengths = self.data.ragged("prompt_ids").lengths
        else:
            try:
                encoded = Text(self.rollout.tokenizer).encode(self.data.texts(self.rollout.prompt))
            except PluginError:  # no tokenizers in this environment: the worker has them, and checks
                return
            lengths = np.array([len(ids) for ids in encoded])
        most = context - self.rollout.sampling.max_tokens
        odd = np.flatnonzero((lengths > most) | (lengths == 0))
        if len(odd):
            first = int(odd[0])
            raise ConfigError(
                f"prompt {first} has {lengths[first]} tokens, and {len(odd)} of {len(lengths)} prompts do not fit: with"
                f" max_tokens={self.rollout.sampling.max_tokens} a prompt may have 1 to {most} tokens, since the"
                f" model's context is {context}"
            )

    def describe(self) -> dict[str, Any]:
        """What will run, as plain data."""
        return {
            "prompts": {"rows": self.data.rows, "columns": {n: str(c.spec) for n, c in self.data.columns.items()}},
            "rollout": {
                "engine": self.rollout.engine, "model": self.rollout.model, "options": self.rollout.options,
                "group_size": self.rollout.group_size, "replicas": self.rollout.replicas,
                "sampling": msgspec.to_builtins(self.rollout.sampling),
            },
            "stages": [{"task": s.task, "needs": s.needs, "gives": s.gives} for s in self.stages],
            "train": {
                "engine": self.train.engine, "model": self.train.model, "options": self.train.options,
                "algorithm": {type(self.train.algorithm).__name__: msgspec.to_builtins(self.train.algorithm)},
            },
            "batch_size": self.batch_size, "steps": self.steps, "seed": self.seed,
            "staleness": msgspec.to_builtins(self.staleness), "weights": msgspec.to_builtins(self.weights),
        }  # fmt: skip

    def run(self, directory: str | Path, *, on_event: Sink | None = None) -> Result:
        """Run to the last step. ``on_event`` hears every event, in a thread of its own.

        Whatever happens, the directory holds what was done, and no process and no shared memory is left.
        Raises WorkerFailed naming the worker, with its traceback; Interrupted after Ctrl-C; ConfigError.
        """
        directory = Path(directory)
        recorder = Recorder(directory, [on_event] if on_event is not None else [])
        (directory / "workflow.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.describe()), indent=2))
        began = time.monotonic()
        outcome = _Outcome()
        with _stoppable() as unstoppable:
            try:
                self._run(directory, recorder, outcome, unstoppable)
            except KeyboardInterrupt:
                outcome.status = "interrupted"
                outcome.error = Interrupted(f"stopped by request; what was done is in {directory}")
            except AsyncFlowError as error:
                outcome.status, outcome.error = "failed", error
            except Exception as error:
                outcome.status, outcome.error = "failed", WorkerFailed(f"the driver failed: {error!r}", "driver")
                outcome.error.__cause__ = error
            unstoppable()
            recorder.close()
            summary = self._summary(recorder, outcome, time.monotonic() - began)
            (directory / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2))
        if outcome.error is not None:
            raise outcome.error
        return Result(directory, summary)

    def _run(self, directory: Path, recorder: Recorder, outcome: _Outcome, unstoppable: Callable[[], None]) -> None:
        rows = self.batch_size * (self.staleness.max_staleness + AHEAD_STEPS)
        run = serve(
            directory, on_event=recorder.event, on_step=recorder.step, steps=self.steps,
            max_staleness=self.staleness.max_staleness, capacity_rows=rows, keep_versions=self.weights.keep,
            max_swapping=self.weights.max_swapping, quorum=self.weights.quorum,
        )  # fmt: skip
        try:
            trainer = self._start(run, directory)
            run.wait(trainer)
            run.join_workers(FINISH_S)
        finally:
            unstoppable()  # what follows takes seconds and must not be left half done
            try:
                run.finish()
                outcome.audit = run.audit()
            finally:
                run.close()

    def _start(self, run: Run, directory: Path) -> LocalProcess:
        spec = self.train.declare(self.batch_size)
        run.queue.declare(**task_arguments(spec))
        for stage in self.stages:
            run.start(stage)
        run.start(self.rollout, needs_first=True, weights=self.weights)
        (trainer,) = run.start(self.train, export=str(directory / "model"), weights=self.weights)
        Feeder(
            run.queue, self.data, group_size=self.rollout.group_size, chunk=self.batch_size // self.rollout.group_size,
            seed=self.seed, on_failure=run.fail,
        ).start()  # fmt: skip
        assert isinstance(trainer, LocalProcess)
        return trainer

    def _summary(self, recorder: Recorder, outcome: _Outcome, wall_s: float) -> dict[str, Any]:
        audit, rewards = outcome.audit, recorder.rewards
        return {
            "status": outcome.status,
            "error": str(outcome.error) if outcome.error is not None else None,
            "steps": recorder.steps,
            "steps_wanted": self.steps,
            "reward_first": float(np.mean(rewards[:20])) if rewards else None,
            "reward_last": float(np.mean(rewards[-20:])) if rewards else None,
            "rows": audit.terminal if audit else {},
            "rows_put": audit.put if audit else 0,
            "rows_live": audit.live if audit else 0,
            "reasons": audit.reasons if audit else {},
            "balanced": audit.balanced if audit else None,
            "staleness_max": recorder.staleness_max,
            "wall_s": round(wall_s, 3),
            "seed": self.seed,
            "model": self.train.model,
            "report": None,
            "warnings": recorder.errors,
        }


@dataclass
class _Outcome:
    """What is known of a run's end, filled in as it ends."""

    status: str = "completed"
    error: AsyncFlowError | None = None
    audit: Audit | None = None


@contextlib.contextmanager
def _stoppable() -> Iterator[Callable[[], None]]:
    """SIGTERM stops a run as Ctrl-C does. Gives a function after which neither interrupts any more."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals are the main thread's
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def unstoppable() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield unstoppable
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _context(model: str) -> int | None:
    """The most tokens a model folder's configuration allows; None when it does not say."""
    try:
        config = msgspec.json.decode(Path(model, "config.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None
    context = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return context if isinstance(context, int) else None
