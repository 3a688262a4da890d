"""Tracker: receives the metrics of a run, for TensorBoard, Weights & Biases or a custom table; the guide of plugins
has an example.

    af.Workflow(..., track=["lines"])                     # the name of an adapter of kind "tracker", or the class
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..types import Event


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run of a tracker. ``directory``: the existing run directory. ``description``: its configuration in JSON
    types: of a workflow, or the limits of the served queue. ``resumed``: True if it continues an earlier one. Later
    SDKs may add fields."""

    directory: Path
    description: Mapping[str, Any]
    resumed: bool = False


class Tracker(abc.ABC):
    """Receives steps and events in the run's serving process. The plugin's factory makes it before the run starts, as
    ``factory(**options)``, and raises ConfigError for invalid options. All methods run in a thread of the tracker,
    one call at a time, and may block: neither training nor the queue waits for them. An exception ends the tracker,
    not the run, with one warning. If a tracker stays slower than the run, events are dropped, with a warning.
    """

    sample_every: int = 0
    """Steps from one call of ``samples`` to the next; 0: no call."""

    def open(self, run: TrackedRun) -> None:
        """Called once, as the first method. Optional."""

    @abc.abstractmethod
    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Called after each trained step. ``version``: of the weights it started from. ``metrics``, by name: means
        over the step's rows, measurements of engine and algorithm, and the staleness of its tokens. Steps arrive in
        order; after a resume or a restart of the trainer some arrive again, and the later numbers count."""

    def samples(self, step: int, rows: Sequence[Mapping[str, str | float]]) -> None:
        """Called for steps 0, ``sample_every``, ..., after the next step or the last one. ``rows``: the first rows of
        the step, at most 8, with the same names: texts of at most 2,000 characters, numbers, and token ids as a text.
        Needs a recorded run, as a workflow's. Optional."""

    def event(self, event: Event) -> None:
        """Called for each event, also for each step, after ``log``. Optional."""

    def close(self) -> None:
        """Called once at the end of the run, as the last method, also after ``log`` or ``event`` raised, but not
        after ``open`` raised. The run waits at most 30 s for it. Optional."""
