"""``asyncflow export``: a model folder of a run, at its end, at a step, or of the best version."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path

from ..algorithms import make_algorithm
from ..errors import ConfigError
from ..interfaces import TrainEngine
from ..workflow import Workflow
from ..workflow.checkpoint import Damaged, check
from ..workflow.loops.engines import make_engine
from ..workflow.model_folder import steps_in, whole_folder
from ..workflow.plan.problems import for_role


def export_model(directory: Path, out: Path, step: int | None, best: bool) -> str:
    """Write a model folder of the run in ``directory``. Return its origin. A step without a folder is
    exported from its checkpoint by the run's train engine. Raises ConfigError, and the errors of the
    engine."""
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder")
    if best and step is not None:
        raise ConfigError("--best is a version of its own: leave --step out")
    name = "best" if best else "model" if step is None else f"models/step-{step:06d}"
    with whole_folder(out) as part:
        if (directory / name).is_dir():
            shutil.copytree(directory / name, part, dirs_exist_ok=True)
            return str(directory / name)
        checkpoint = directory / "checkpoints" / f"step-{step or 0:06d}"
        if step is None or not checkpoint.is_dir():
            what = "no best version: no evaluation was finished" if best else f"no {name}"
            raise ConfigError(f"{directory} has {what}; it has: {', '.join(_folders(directory)) or 'none'}")
        _export_checkpoint(directory, checkpoint, part)
        return str(checkpoint)


def _folders(directory: Path) -> list[str]:
    """Return the model folders and checkpoints of a run."""
    found = [name for name in ("model", "best") if (directory / name).is_dir()]
    for parent in ("models", "checkpoints"):
        found += [f"{parent}/step-{step:06d}" for step in steps_in(directory / parent)]
    return found


def _export_checkpoint(directory: Path, checkpoint: Path, part: Path) -> None:
    with for_role("train"):
        train = Workflow.load(directory).plan.train
    python = train.place.python
    if python is not None and os.path.abspath(python) != sys.executable:
        raise ConfigError(
            f"engine {train.engine!r} is in another environment: {python} -m asyncflow_sdk.cli export ..."
        )
    try:
        check(checkpoint)
    except Damaged as error:
        raise ConfigError(f"{checkpoint} cannot be exported: {error}") from None
    algorithm = make_algorithm(train.algorithm_spec)
    engine: TrainEngine = make_engine("train", train.engine, model=train.model, algorithm=algorithm, **train.options)
    with contextlib.closing(engine):
        if train.world_size > 1 and not engine.reshards:
            raise ConfigError(
                f"{checkpoint} is of {train.world_size} ranks, and engine {train.engine!r} loads it in as many only,"
                " not in this process. Let the run write folders, with save_steps="
            )
        engine.load(checkpoint / "engine")
        engine.export(part)
