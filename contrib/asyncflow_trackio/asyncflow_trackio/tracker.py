"""TrackioTracker: writes the metrics of a run for Trackio's local dashboard.

af.Workflow(..., track=[("trackio", {"project": "math", "sample_every": 10})])     # then: trackio show
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas
import trackio

from asyncflow_sdk.interfaces import TrackedRun, Tracker


class TrackioTracker(Tracker):
    """``project``: default "asyncflow". ``sample_every``: steps from one table of samples to the next;
    0: none. ``init``: further arguments of ``trackio.init``, such as ``space_id``.

    The run is named after its directory. Metrics are named "train/reward" etc. A step trained again
    after a resume is written again.
    """

    def __init__(self, project: str = "asyncflow", sample_every: int = 0, **init: Any) -> None:
        self.sample_every = sample_every
        self._init = {"project": project, **init}

    def open(self, run: TrackedRun) -> None:
        resume = "allow" if run.resumed else "never"
        named = {"name": run.directory.name, "resume": resume, "embed": False} | self._init
        self._run = trackio.init(**named, config=dict(run.description))

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        numbers = {f"train/{name}": value for name, value in metrics.items()}
        self._run.log({"version": version, **numbers}, step=step)

    def samples(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        self._run.log({"samples": trackio.Table(dataframe=pandas.DataFrame(list(rows)))}, step=step)

    def close(self) -> None:
        self._run.finish()
