"""Steps in parts, whose order is certain: a reward that gives a group only when the trainer holds all that were given before, so that
each part is one group; and trainers that note the parts that they were given, and wait at some of them.

The variable RUN names the directory of the run, and GATES the folder of the notes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import functions
from echo_runs import echo_workflow
from gates import Gated, wait_at
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.testing.echo_ranks import EchoRanks
from asyncflow_sdk.types import Batch

STEPS, ROWS, GROUP = 3, 16, 4
NOTES = "parts.jsonl"
HANGS_S = 900.0
"""Only ends a test that would hang: processes may take minutes to start beside others."""


def paced(response_ids: Any, groups: Any) -> Any:
    """The lengths of a group's responses, once no other group waits for the trainer."""
    with af.connect(os.environ["RUN"], name="pacer") as run:
        until(lambda: not {"ready", "selected"} & _states(run), "that the trainer holds the groups before", HANGS_S)
    return functions.length(response_ids)


def _states(run: af.Run) -> set[str]:
    """The states of rows in the trainer's task."""
    return {state for state, rows in run.queue.status().rows["train"].items() if rows}


def parts_of(folder: Path) -> list[dict[str, Any]]:
    """The parts that trainers were given, in order: by whom, of which step, and their rows."""
    try:
        lines = (folder / NOTES).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rows_by_pid(folder: Path, step: int, rank: int = 0) -> list[list[list[int]]]:
    """The rows of the parts of a step, by each process that was given them, in the order of the processes."""
    found: dict[int, list[list[int]]] = {}
    for note in parts_of(folder):
        if (note["step"], note["rank"]) == (step, rank):
            found.setdefault(note["pid"], []).append(note["rows"])
    return list(found.values())


def joined(parts: list[list[int]]) -> list[int]:
    """The rows of some parts."""
    return [row for part in parts for row in part]


class _Noted:
    """Notes each part, and begins none of which there is a file STEP.PART in the folder."""

    def begin_step(self, step: int) -> None:
        super().begin_step(step)  # type: ignore[misc]
        self._step, self._part = step, 0

    def accumulate(self, batch: Batch) -> None:
        folder, rank = Path(os.environ["GATES"]), int(os.environ.get("RANK", "0"))
        note = {"pid": os.getpid(), "rank": rank, "step": self._step, "part": self._part, "rows": batch.ids.tolist()}
        with (folder / NOTES).open("a") as notes:
            notes.write(json.dumps(note) + "\n")
        wait_at(folder / f"{self._step}.{self._part}")
        self._part += 1
        super().accumulate(batch)  # type: ignore[misc]


class NotedParts(_Noted, Gated):
    pass


class NotedRanks(_Noted, EchoRanks):
    pass


def streamed_workflow(*, processes: bool = False, train: dict[str, Any] | None = None, **changes: Any) -> af.Workflow:
    """``train``: options of the trainer, which trains in parts of one group."""
    place: dict[str, Any] = {} if processes else {"launcher": "thread"}
    options = (
        {"stream": True, "part_rows": GROUP} | (place if "world_size" not in (train or {}) else {}) | (train or {})
    )
    engine = options.pop("engine", "streamed_runs:NotedParts")
    return echo_workflow(
        processes=processes, train=af.Train(engine, **options), batch_size=ROWS,
        **({"steps": STEPS, "reward": af.Stage(paced, task="reward", gives=["reward"], batch=GROUP, **place)} | changes),
    )  # fmt: skip


def resumable_workflow() -> af.Workflow:
    """All its workers are processes, and its trainer begins anew after each death."""
    return streamed_workflow(
        processes=True, train={"max_restarts": 3}, checkpoint=af.Checkpoint(every=1, history=True)
    )
