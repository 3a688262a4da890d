"""A worker that is killed at a step that a test names, on a machine of any speed: the trainer waits there until it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoTrain
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types import Batch
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState


class Killer:
    """Kills a worker after each of the given steps, as soon as it has said that it is ready."""

    def __init__(self, worker: str, at: list[int], gates: Path | None = None) -> None:
        self.worker, self.at, self.pid, self.step, self.killed = worker, list(at), 0, -1, 0
        self.events: list[Event] = []
        self._gates = gates
        if gates is not None:
            gates.mkdir()
            for step in at:
                (gates / str(step + 1)).touch()

    def trainer(self, engine: str = "gates:Gated", **options: Any) -> af.Train:
        """A trainer that does not begin the step after one of these before the worker was killed."""
        return af.Train(engine, gates=str(self._gates), **options)

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerState) and event.worker == self.worker and event.state == "ready":
            self.pid = event.pid
        if isinstance(event, StepTrained):
            self.step = event.step
        if self.at and self.step >= self.at[0] and self.pid:
            os.kill(self.pid, signal.SIGKILL)
            step = self.at.pop(0)
            self.pid, self.killed = 0, self.killed + 1
            if self._gates is not None:
                (self._gates / str(step + 1)).unlink()


class Gated(EchoTrain):
    """Begins no step of which there is a file in ``gates``."""

    def __init__(self, model: str = "", *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._gates = Path(gates)

    def train_step(self, batch: Batch) -> StepResult:
        _pass(self._gates, self.steps)
        return super().train_step(batch)


class GatedRanks(EchoRanks):
    """The same of several ranks."""

    def __init__(self, model: str = "", *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._gates = Path(gates)

    def train_step(self, batch: Batch) -> StepResult:
        _pass(self._gates, self.steps)
        return super().train_step(batch)


def _pass(gates: Path, step: int) -> None:
    while (gates / str(step)).exists():
        time.sleep(0.01)
