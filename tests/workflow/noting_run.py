"""A run that proves by itself what it was trained with: its trainer keeps notes of that in its checkpoints, beside the weights.

The reward of a response is how many steps the weights that drew it had been trained: it rises only by training, and not by
steps that were lost.
"""

import asyncio
import json
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


class Noting(Gated):
    """Notes of each step that its weights have: ids and prompts of its rows, and their rewards."""

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.notes: Notes = []

    def train_step(self, batch: Batch) -> StepResult:
        result = super().train_step(batch)
        prompts = [int(row[0]) for row in batch.ragged("prompt_ids")]
        self.notes.append({"rows": batch.ids.tolist(), "prompts": prompts, "rewards": batch.array("reward").tolist()})
        return result

    def save(self, path: Path) -> None:
        super().save(path)
        (path / "notes.json").write_text(json.dumps(self.notes))

    def load(self, path: Path) -> None:
        super().load(path)
        self.notes = json.loads((path / "notes.json").read_text())


class Uneven(EchoRollout):
    """Every seventh prompt takes long, and three of them longer than any step: policy ``drop`` has something to give up."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        if request.prompt_ids[0] % 7 == 0:
            await asyncio.sleep(0.1 if request.prompt_ids[0] % 49 else 0.5)
        async for completion in super().generate(request):
            yield completion


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
