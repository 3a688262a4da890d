"""WandbTracker: sends the metrics of a run to Weights & Biases.

af.Workflow(..., track=[("wandb", {"project": "math", "sample_every": 10})])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from asyncflow_sdk.interfaces import TrackedRun, Tracker

RUN_ID = "wandb-run-id"
"""File in the run's directory: a resumed run continues the same run of Weights & Biases."""


class WandbTracker(Tracker):
    """``project``: default "asyncflow". ``sample_every``: steps from one table of samples to the next;
    0: none. ``init``: further arguments of ``wandb.init``. The account and the mode come from the
    usual places, such as WANDB_API_KEY and WANDB_MODE.

    Metrics are named "train/reward" etc. and drawn over "train/step". A step trained again after a
    resume is sent again.
    """

    def __init__(self, project: str = "asyncflow", sample_every: int = 0, **init: Any) -> None:
        self.sample_every = sample_every
        self._init = {"project": project, **init}

    def open(self, run: TrackedRun) -> None:
        known = run.directory / RUN_ID
        run_id = known.read_text().strip() if run.resumed and known.exists() else None
        self._run = wandb.init(
            **{"name": run.directory.name, "dir": str(run.directory), "id": run_id, "resume": "allow"} | self._init,
            config=dict(run.description),
        )
        known.write_text(self._run.id)
        self._run.define_metric("train/step")
        self._run.define_metric("train/*", step_metric="train/step")

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        numbers = {f"train/{name}": value for name, value in metrics.items()}
        self._run.log({"train/step": step, "train/version": version, **numbers})

    def samples(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"train/step": step, "train/samples": table})

    def close(self) -> None:
        self._run.finish()
