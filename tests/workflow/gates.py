"""Make the order of a run certain on a machine of any speed: trainers that wait before a step or a part
and note what they trained; replicas that wait for each other; rewards in turn; kills after a step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import functions
from echo_runs import echo_workflow
from waiting import until, wait_at

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoRollout, EchoTrain
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types import Batch
from asyncflow_sdk.types.events import Event, StepTrained, WorkerState

STEPS, ROWS, GROUP = 3, 16, 4
NOTES = "parts.jsonl"
HANGS_S = 900.0
"""Only ends a test that would hang: processes may take minutes to start beside others."""


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


class _Waits:
    """Begins no step, and no part, of which there is a file STEP or STEP.PART in ``gates``, or else in the
    folder that the variable GATES names. Notes the parts there."""

    steps: int

    def __init__(self, model: str = "", *, gates: str = "", **options: Any) -> None:
        super().__init__(model, **options)  # type: ignore[call-arg]
        self._gates = Path(gates or os.environ.get("GATES", "no gates"))

    def train_step(self, batch: Batch) -> StepResult:
        wait_at(self._gates / str(self.steps))
        return super().train_step(batch)  # type: ignore[misc, no-any-return]

    def begin_step(self, step: int) -> None:
        super().begin_step(step)  # type: ignore[misc]
        self._step, self._part = step, 0

    def accumulate(self, batch: Batch) -> None:
        rank = int(os.environ.get("RANK", "0"))
        note = {"pid": os.getpid(), "rank": rank, "step": self._step, "part": self._part, "rows": batch.ids.tolist()}
        if self._gates.is_dir():
            with (self._gates / NOTES).open("a") as notes:
                notes.write(json.dumps(note) + "\n")
        wait_at(self._gates / f"{self._step}.{self._part}")
        self._part += 1
        super().accumulate(batch)  # type: ignore[misc]


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


# ---- steps in parts; the variable RUN names the directory of the run, and GATES the folder of gates and notes


def paced(response_ids: Any, groups: Any) -> Any:
    """The lengths of a group's responses, once no other group waits for the trainer: so each part is one group."""
    with af.connect(os.environ["RUN"], name="pacer") as run:
        held = lambda rows: not (rows.get("ready") or rows.get("selected"))  # noqa: E731
        until(lambda: held(run.queue.status().rows["train"]), "that the trainer holds the groups before", HANGS_S)
    return functions.length(response_ids)


def parts_of(folder: Path) -> list[dict[str, Any]]:
    """The parts that trainers were given, in order: by whom, of which step, and their rows."""
    lines = (folder / NOTES).read_text().splitlines(keepends=True) if (folder / NOTES).exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rows_by_pid(folder: Path, step: int, rank: int = 0) -> list[list[list[int]]]:
    """The rows of the parts of a step, by each process that was given them, in the order of the processes."""
    found: dict[int, list[list[int]]] = {}
    for note in parts_of(folder):
        if (note["step"], note["rank"]) == (step, rank):
            found.setdefault(note["pid"], []).append(note["rows"])
    return list(found.values())


def streamed_workflow(*, processes: bool = False, train: dict[str, Any] | None = None, **changes: Any) -> af.Workflow:
    """``train``: options of the trainer, which trains in parts of one group."""
    place: dict[str, Any] = {} if processes else {"launcher": "thread"}
    train = {"engine": "gates:Gated"} | (train or {})
    options = {"stream": True, "part_rows": GROUP} | ({} if "world_size" in train else place) | train
    reward = af.Stage(paced, task="reward", gives=["reward"], batch=GROUP, **place)
    usual = {"train": af.Train(**options), "batch_size": ROWS, "steps": STEPS, "reward": reward}
    return echo_workflow(processes=processes, **(usual | changes))


def resumable_workflow() -> af.Workflow:
    """All its workers are processes, and its trainer begins anew after each death."""
    return streamed_workflow(
        processes=True, train={"max_restarts": 3}, checkpoint=af.Checkpoint(every=1, history=True)
    )
