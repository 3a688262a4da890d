"""MlflowTracker: sends the metrics of a run to an MLflow server or folder.

af.Workflow(..., track=[("mlflow", {"experiment": "math", "sample_every": 10})])
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from asyncflow_sdk.interfaces import TrackedRun, Tracker

RUN_ID = "mlflow-run-id"
"""File in the run's directory: a resumed run continues the same run of MLflow."""
MOST_METRICS = 1000
"""Limit of MLflow for one request."""


class MlflowTracker(Tracker):
    """``experiment``: default "asyncflow". ``uri``: of the server; default: MLFLOW_TRACKING_URI.
    ``sample_every``: steps from one table of samples to the next; 0: none.

    Metrics are named "train/reward" etc.; the run's scalar options are parameters, its whole
    description is the artifact workflow.json. Characters that MLflow refuses in a name become "_". A
    step trained again after a resume is logged again: the later value has the later time.
    """

    def __init__(self, experiment: str = "asyncflow", uri: str | None = None, sample_every: int = 0) -> None:
        self.sample_every = sample_every
        self._experiment, self._client = experiment, MlflowClient(uri)

    def open(self, run: TrackedRun) -> None:
        known = run.directory / RUN_ID
        if run.resumed and known.exists():
            self._run = known.read_text().strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=run.directory.name).info.run_id
        known.write_text(self._run)
        options = [Param(name, str(v)) for name, v in run.description.items() if isinstance(v, (str, int, float))]
        self._client.log_batch(self._run, params=options)
        self._client.log_text(self._run, json.dumps(run.description, indent=2, default=str), "workflow.json")

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        numbers = {"version": float(version), **{f"train/{_name(name)}": value for name, value in metrics.items()}}
        sent = [Metric(name, value, now_ms, step) for name, value in numbers.items()]
        for first in range(0, len(sent), MOST_METRICS):
            self._client.log_batch(self._run, metrics=sent[first : first + MOST_METRICS])

    def samples(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        columns: dict[str, Any] = {"step": [step] * len(rows)}
        self._client.log_table(
            self._run, columns | {name: [row[name] for row in rows] for name in rows[0]}, "samples.json"
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _name(metric: str) -> str:
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in metric)
