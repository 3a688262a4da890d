"""The demo: warm up a tiny model, train it by asynchronous GRPO, show it live, leave a report.

Run by ``asyncflow demo``. A user writes the same workflow with a model and data of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import asyncflow_sdk as af
from asyncflow_sdk.cli.run_command import outcome_of
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types.events import Event, Loaded

from .task import DIGITS, exact_match, prompts

PROMPTS_A_STEP, GROUP_SIZE = 32, 8
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # two engines share the cores; more threads would only wait for each other
REFERENCE, PLAIN = "transformers", "torch"
PROBE = af.Probe(((5, 6, 7, 8, 9, 14), (3, 12, 4, 11, 10, 14)), ((9, 8, 7, 6, 5, 2), (10, 11, 4, 12, 3, 2)))


@dataclass(frozen=True, kw_only=True)
class DemoGenerator:
    """The engine for generation. ``python``: interpreter with the engine; None: the trainer's.
    ``options``: of the engine."""

    engine: str = REFERENCE
    python: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> af.Weights:
        """Weight synchronisation of this engine. An engine with code unlike the trainer's must
        match the trainer's log-probs of a probe, before it generates with a version."""
        return af.Weights() if self.engine == REFERENCE else af.Weights(probe=PROBE, verify=["probe"])


@dataclass(frozen=True, kw_only=True)
class DemoTrainer:
    """The engine for training, its ranks, its algorithm, and whether it trains steps in parts, as in
    ``af.Train``. ``python``, ``options``: as in ``DemoGenerator``."""

    engine: str = PLAIN
    world_size: int = 1
    stream: bool = False
    python: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Any = None


def demo_workflow(
    model: Path, steps: int, seed: int, max_staleness: int, policy: str = "wait", generator: DemoGenerator | None = None,
    trainer: DemoTrainer | None = None, weights: af.Weights | None = None,
) -> af.Workflow:  # fmt: skip
    """Reverse five digits: 32 prompts a step, 8 responses each, rewarded when exactly right.
    ``weights``: by default the generator's."""
    generator, trainer = generator or DemoGenerator(), trainer or DemoTrainer()
    return af.Workflow(
        prompts=prompts(PROMPTS_A_STEP * steps, seed),
        rollout=af.Rollout(
            generator.engine,
            model=model,
            group_size=GROUP_SIZE,
            sampling=af.Sampling(max_tokens=DIGITS + 2, seed=seed),
            python=generator.python,
            env=ONE_THREAD,
            **generator.options,
        ),
        reward=exact_match,
        train=af.Train(
            trainer.engine,
            model=model,
            algorithm=trainer.algorithm,
            learning_rate=2e-4,
            seed=seed,
            world_size=trainer.world_size,
            stream=trainer.stream,
            python=trainer.python,
            env=ONE_THREAD,
            **trainer.options,
        ),
        batch_size=PROMPTS_A_STEP * GROUP_SIZE,
        steps=steps,
        staleness=af.Staleness(max_staleness=max_staleness, policy=policy),
        weights=weights or generator.weights,
        seed=seed,
    )


def run_demo(
    out: Path, steps: int, seed: int, max_staleness: int, model: Path | None, console: Console, policy: str = "wait",
    engine: str = REFERENCE, python: str | None = None, options: Mapping[str, Any] | None = None,
    train: str = PLAIN, world_size: int = 1, train_python: str | None = None, train_options: Mapping[str, Any] | None = None,
    algorithm: Any = None,
) -> int:  # fmt: skip
    """Run the demo into ``out`` and print the result. ``engine``, ``python``, ``options``: as in
    ``DemoGenerator``; the others as in ``DemoTrainer``. Returns the exit status.

    Raises Interrupted after Ctrl-C; ``out`` then holds the finished part, with its report.
    """
    if python is None:  # a missing engine raises before the warm-up
        registry().get("rollout", engine).load()
    if train_python is None:
        registry().get("train", train).load()
    if model is None:
        model = out / "start"
        _warm_up(model, seed, console)
    generates = DemoGenerator(engine=engine, python=python, options=options or {})
    trains = DemoTrainer(
        engine=train, world_size=world_size, python=train_python, options=train_options or {}, algorithm=algorithm
    )
    workflow = demo_workflow(model, steps, seed, max_staleness, policy, generates, trains)
    loaded: list[int] = []
    try:
        with (
            outcome_of(out, console),
            af.LiveView(steps, "asyncflow demo: reverse five digits", console=console) as view,
        ):

            def show_event(event: Event) -> None:
                view(event)
                if isinstance(event, Loaded) and event.version:  # 0 is the folder's
                    loaded.append(event.version)

            workflow.run(out, on_event=show_event)
    finally:
        if generates.weights.verify:
            console.print(
                f"{generates.engine} loaded {len(loaded)} versions, the last of them {max(loaded, default=0)}:"
                " each had the trainer's names, and gave the trainer's log-probs for a probe",
                soft_wrap=True,
            )
    return 0


def _warm_up(folder: Path, seed: int, console: Console) -> None:
    from .model import warm_up

    columns = (
        TextColumn("warm-up by supervised steps"),
        BarColumn(),
        TextColumn("step {task.fields[step]}, accuracy {task.fields[accuracy]:.2f} of {task.total:.2f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bar = progress.add_task("", total=0.15, step=0, accuracy=0.0)

        def show(step: int, accuracy: float, target: float) -> None:
            progress.update(bar, completed=min(accuracy, target), total=target, step=step, accuracy=accuracy)

        warm_up(folder, seed=seed, on_progress=show)
    console.print(f"saved the start as a Hugging Face folder: {folder}", markup=False, highlight=False)
