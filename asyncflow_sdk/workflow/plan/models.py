"""Models of a workflow: each is found once, before anything starts.

find_models(rollout=[rollout], train=[train])           # both models are folders of this host now
"""

from __future__ import annotations

from collections.abc import Sequence

from ..hub import model_folder
from ..specs import Rollout, Stage, Train
from ..work import EngineSpec
from .problems import Key, Problems, is_checked_here


def find_models(**parts: Sequence[Rollout | Stage | Train]) -> None:
    """Make the models of parts, by their key in the workflow, folders of this host. A model of the hub
    is downloaded once, so that all parts have the same commit. Raises all problems: ConfigError,
    PluginError."""
    problems = Problems()
    users: dict[tuple[str, str | None], list[tuple[Key, EngineSpec]]] = {}
    for key, listed in parts.items():
        for number, part in enumerate(listed):
            spec = part.work if isinstance(part, Stage) else part
            if isinstance(spec, EngineSpec) and is_checked_here(part.task):
                users.setdefault((spec.model, spec.model_revision), []).append(((key, number, "model"), spec))
    for asked, found in users.items():
        with problems.collect(*found[0][0]):
            folder = model_folder(*asked)
            for _, user in found:
                user.take_model(folder)
    problems.raise_all()
