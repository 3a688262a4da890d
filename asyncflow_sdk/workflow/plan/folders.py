"""Comparison of model folders before anything starts: a rollout takes what the trainer publishes."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..model_folder import WEIGHTS, ModelFolder, own_model
from ..specs import Rollout, Train
from .plan import Plan
from .problems import Problems, is_checked_here

_SHOWN = 10


def check_folders(plan: Plan, problems: Problems) -> None:
    """Find a quantised folder of the trainer, rollouts with other tensors in their folder than the trainer's, by name
    and shape, and folders with a tied configuration and another ``lm_head``.

    Reads headers only, and the bytes of a tied ``lm_head``, which a folder may also lack. Numbers are not
    compared: a rollout loads a version before its first prompt, except tensors that training leaves out. Folders
    of other hosts and folders without safetensors are not compared.
    """
    read: dict[str, ModelFolder] = {}

    def folder_of(spec: Rollout | Train, *key: str | int) -> ModelFolder | None:
        here = is_checked_here(spec.task) and not spec.place.hosts and spec.model
        path = os.path.realpath(spec.model)
        if not here or not any(Path(path, name).is_file() for name in WEIGHTS):  # for its engine to judge
            return None
        with problems.collect(*key, "model"):
            read[path] = read.get(path) or ModelFolder(spec.model)
        return read.get(path)

    trained = folder_of(plan.train, "train")
    if trained is not None:
        with problems.collect("train", "model"):
            trained.check_unquantised()
    for number, rollout in enumerate(plan.rollouts):
        served = folder_of(rollout, "rollout", number)
        with problems.collect("rollout", number, "model"):
            if served is not None and trained is not None and served is not trained:
                _compare(rollout.task, served, trained)


def _compare(task: str, served: ModelFolder, trained: ModelFolder) -> None:
    """Raise ConfigError with all differences."""
    if found := served.differences(trained, served.folder, trained.folder):
        listed = "\n  ".join(found[:_SHOWN])
        more = f"\n  and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ConfigError(
            f"rollout {task!r} has the model {served.folder}, whose weights are not those of {trained.folder}, which"
            f" train publishes; give both the same model=:\n  {listed}{more}"
        )


def needs_trust(model: str, factory: Callable[..., Any]) -> bool:
    """True if an engine with the option trust_remote_code needs it: the folder has Python of its own for a model
    type that transformers, found here without importing it, lacks."""
    kind, own = own_model(model)
    if not own or "trust_remote_code" not in inspect.signature(factory).parameters:
        return False
    found = importlib.util.find_spec("transformers")
    places = (found.submodule_search_locations if found is not None else None) or ()
    models = [file for each in places if (file := Path(each, "models", "auto", "modeling_auto.py")).is_file()]
    return bool(models) and not any(f'"{kind}"' in each.read_text() for each in models)
