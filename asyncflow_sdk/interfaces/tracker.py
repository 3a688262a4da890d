"""Tracker: where the numbers of a run go: TensorBoard, Weights & Biases, a table of one's own.

class Lines(af.Tracker):                                 # a user's own
    def open(self, run: af.TrackedRun) -> None:
        self.file = (run.directory / "lines.txt").open("a")

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self.file.write(f"{step} {metrics}\\n")

    def close(self) -> None:
        self.file.close()

af.Workflow(..., trackers=["lines"])                     # registered as an adapter of kind "tracker"; or the class itself
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..types import Event


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is opened for. ``directory``: of the run, which is there. ``description``: what was asked for, as JSON holds it: of a
    workflow all that ``describe`` says, else the limits it is served with. ``resumed``: whether the run was there before and
    goes on. Later SDKs may add fields."""

    directory: Path
    description: Mapping[str, Any]
    resumed: bool = False


class Tracker(abc.ABC):
    """Listens to a run, in the process that serves it. Made by its plugin's factory as ``factory(**options)`` before the run
    starts, when it raises ConfigError for options it cannot work with; all else is called in a thread of its own, one call at
    a time, so it may block: neither training nor the queue waits for it.

    What it raises then ends it, not the run: that is told once, as a warning of the run. Of a tracker that is slower than
    the run for so long that events pile up, some are left out, which is told, too.
    """

    def open(self, run: TrackedRun) -> None:
        """Called once, first of all. Optional."""

    @abc.abstractmethod
    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` was trained, from ``version`` of the weights. ``metrics``: means over its rows, whatever the engine
        and the algorithm measured, and how stale its tokens were, by name. Steps come in order, but a run that is resumed, or whose trainer was
        started again, may train some again: then the later numbers count."""

    def event(self, event: Event) -> None:
        """Something happened, see ``asyncflow_sdk.types.events``: for trackers that want more than steps. Also called for
        each step, after ``log``. Optional."""

    def close(self) -> None:
        """The run has ended, or stops here; nothing is called after it. Called once, also when ``log`` or ``event`` has raised, but
        not when ``open`` has. It has half a minute: then it is left to itself. Optional."""
