"""A run that proves by itself what it was trained with: its trainer keeps notes of that in its checkpoints, beside the weights.

The reward of a response is how many steps the weights that drew it had been trained: it rises only by training, and not by
steps that were lost.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from echo_runs import echo_workflow
from gates import Gated

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.testing import EchoRollout
from asyncflow_sdk.types import Batch

STEPS, ROWS, GROUP = 36, 16, 4
PROMPTS = [[n, n + 1, n + 2] for n in range(STEPS * ROWS // GROUP)]
"""As many as the steps have groups: each is trained once, where none is replaced."""
Notes = list[dict[str, Any]]
OUTLASTED = os.environ.get("OUTLASTED", "")
"""A folder in which the trainer names its steps, for engines that wait for some."""


class Noting(Gated):
    """Notes of each step that its weights have: ids and prompts of its rows, and their rewards."""

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.notes: Notes = []

    def train_step(self, batch: Batch) -> StepResult:
        result = super().train_step(batch)
        prompts = [int(row[0]) for row in batch.ragged("prompt_ids")]
        self.notes.append({"rows": batch.ids.tolist(), "prompts": prompts, "rewards": batch.array("reward").tolist()})
        if OUTLASTED:
            (Path(OUTLASTED) / f"step-{len(self.notes)}").touch()
        return result

    def save(self, path: Path) -> None:
        super().save(path)
        (path / "notes.json").write_text(json.dumps(self.notes))

    def load(self, path: Path) -> None:
        super().load(path)
        self.notes = json.loads((path / "notes.json").read_text())


class Uneven(EchoRollout):
    """Every seventh prompt takes long. With OUTLASTED three of them take three steps when they are first drawn: policy ``drop`` has
    something to give up."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        first = int(request.prompt_ids[0])
        if OUTLASTED and first % 49 == 0:
            await _outlast(Path(OUTLASTED), first)
        elif first % 7 == 0:
            await asyncio.sleep(0.1)
        async for completion in super().generate(request):
            yield completion


async def _outlast(folder: Path, prompt: int) -> None:
    """Return when three more steps were trained; at once for a prompt that was drawn before."""
    try:
        (folder / f"prompt-{prompt}").touch(exist_ok=False)
    except FileExistsError:
        return
    trained = _steps_named(folder)
    while _steps_named(folder) < trained + 3:
        await asyncio.sleep(0.01)


def _steps_named(folder: Path) -> int:
    return len(list(folder.glob("step-*")))


def steps_had(logprobs: af.Ragged) -> list[float]:
    """How many steps the weights had had that drew each response."""
    return [-float(row[0]) for row in logprobs]


def workflow(**changes: Any) -> af.Workflow:
    arguments: dict[str, Any] = {
        "prompts": {"prompt_ids": af.Ragged.of(PROMPTS)},
        "rollout": af.Rollout(
            "noting_run:Uneven", group_size=GROUP, prompt="prompt_ids", replicas=2, max_rows=8, delay_s=0.01, spread=1.0,
            max_restarts=1000,
        ),
        "reward": steps_had,
        "train": af.Train("noting_run:Noting", delay_s=0.03, max_restarts=1),
        "batch_size": ROWS,
        "steps": STEPS,
        "checkpoint": af.Checkpoint(every=5, history=True),
    }  # fmt: skip
    return echo_workflow(**(arguments | changes))


def notes_of(directory: Path) -> Notes:
    """Of the weights that the run ended with."""
    found: Notes = json.loads((directory / "model" / "notes.json").read_text())
    return found
