"""Make the order of a run certain on a machine of any speed: trainers that wait before a step until a test opens it and note what they
trained, replicas that wait for each other, and kills right after a step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types import Batch
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState


class Gates:
    """Steps that a trainer does not begin before they are opened."""

    def __init__(self, folder: Path, *steps: int | str) -> None:
        self.folder = folder
        folder.mkdir()
        for step in steps:
            (folder / str(step)).touch()

    def trainer(self, engine: str = "gates:Gated", **options: Any) -> af.Train:
        place = {} if {"world_size", "max_restarts"} & options.keys() else {"launcher": "thread"}
        return af.Train(engine, gates=str(self.folder), **(place | options))

    def open(self, *steps: int | str) -> None:
        """Open steps; those that are open stay so."""
        for step in steps:
            (self.folder / str(step)).unlink(missing_ok=True)

    def reached(self, step: int | str) -> int:
        """How many ranks have waited before it."""
        return len(list(self.folder.glob(f"{step} *")))


class Listener:
    """Listen to a run. ``pids``: of its workers that it has said to be ready."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pids: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, WorkerState) and event.state == "ready":
            self.pids[event.worker] = event.pid

    def pid(self, worker: str) -> int:
        """Of a worker that is ready, though the event that says so may still be on its way."""
        until(lambda: worker in self.pids, f"the event that {worker} is ready")
        return self.pids[worker]

    def texts(self, kind: type[Any]) -> list[str]:
        return [event.text for event in self.events if isinstance(event, kind)]

    def states(self, state: str) -> list[WorkerState]:
        return [event for event in self.events if isinstance(event, WorkerState) and event.state == state]


class Killer(Listener):
    """Kill a worker after each of some steps: ``at`` maps a step to the worker's name. The trainer begins the next step when that is
    done."""

    def __init__(self, folder: Path, at: dict[int, str]) -> None:
        super().__init__()
        self.at, self.killed, self.step = at, list[str](), -1
        self._gates = Gates(folder, *(step + 1 for step in at))
        self.trainer = self._gates.trainer

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if isinstance(event, StepTrained):
            self.step = event.step
        step = next(iter(self.at), 1 << 30)
        if self.step >= step and (pid := self.pids.pop(self.at[step], 0)):
            assert pid != os.getpid(), f"{self.at[step]} is a thread, which cannot be killed"
            os.kill(pid, signal.SIGKILL)
            self.killed.append(self.at.pop(step))
            self._gates.open(step + 1)


def wait_at(gate: Path) -> None:
    """Wait until it is opened, and leave a file that says so."""
    if gate.exists():
        gate.with_name(f"{gate.name} {os.getpid()}").touch()
    while gate.exists():
        time.sleep(0.01)


class _Waits:
    """Begins no step of which there is a file in ``gates``, or else in the folder that the variable GATES names."""

    steps: int

    def __init__(self, model: str = "", *, gates: str = "", **options: Any) -> None:
        super().__init__(model, **options)  # type: ignore[call-arg]
        self._gates = Path(gates or os.environ.get("GATES", "no gates"))

    def train_step(self, batch: Batch) -> StepResult:
        wait_at(self._gates / str(self.steps))
        return super().train_step(batch)  # type: ignore[misc, no-any-return]


class Gated(_Waits, EchoTrain):
    """Keeps notes in its checkpoints: ids and prompts of the rows of each step that its weights have, and their rewards."""

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.notes: list[dict[str, list[Any]]] = []
        self._noted: dict[str, list[Any]] = {}

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._noted = {"rows": [], "prompts": [], "rewards": []}

    def accumulate(self, batch: Batch) -> None:
        super().accumulate(batch)
        self._noted["rows"] += batch.ids.tolist()
        self._noted["prompts"] += [int(row[0]) for row in batch.ragged("prompt_ids")]
        self._noted["rewards"] += batch.array("reward").tolist()

    def end_step(self) -> StepResult:
        result = super().end_step()
        self.notes.append(self._noted)
        return result

    def save(self, path: Path) -> None:
        super().save(path)
        (path / "notes.json").write_text(json.dumps(self.notes))

    def load(self, path: Path) -> None:
        super().load(path)
        self.notes = json.loads((path / "notes.json").read_text())


class GatedRanks(_Waits, EchoRanks):
    pass


class Together(EchoRollout):
    """Answers nothing before as many replicas were asked: each leaves a file in ``met``. Give each a small ``max_rows``, so that none takes
    all the prompts."""

    def __init__(self, model: str = "", *, met: str, together: int = 2, **options: Any) -> None:
        super().__init__(model, **options)
        self._met, self._together = Path(met), together

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        (self._met / f"{os.getpid()}-{id(self)}").touch()
        while len(os.listdir(self._met)) < self._together:
            await asyncio.sleep(0.01)
        async for completion in super().generate(request):
            yield completion
