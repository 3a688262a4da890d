"""A run that proves by itself what it was trained with: its trainer keeps notes of that in its checkpoints, beside the weights.

The reward of a response is how many steps the weights that drew it had been trained: it rises only by training, and not by
steps that were lost.
"""

from __future__ import annotations

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

STEPS, ROWS, GROUP = 18, 16, 4
PROMPTS = [[n, n + 1, n + 2] for n in range(STEPS * ROWS // GROUP)]
"""As many as the steps have groups: each is trained once, where none is replaced."""
OUTLASTED = os.environ.get("OUTLASTED", "")
"""A folder in which the trainer names its steps, for engines that wait for some."""


class Noting(Gated):
    """Notes of each step that its weights have: ids and prompts of its rows, and their rewards."""

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.notes: list[dict[str, Any]] = []

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
    """With OUTLASTED three prompts take three steps when they are first drawn: policy ``drop`` has something to give up."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        first = int(request.prompt_ids[0])
        if OUTLASTED and first % 25 == 0:
            try:
                (Path(OUTLASTED) / f"prompt-{first}").touch(exist_ok=False)
            except FileExistsError:  # drawn before
                pass
            else:
                trained = _steps_named()
                while _steps_named() < trained + 3:
                    await asyncio.sleep(0.01)
        async for completion in super().generate(request):
            yield completion


def _steps_named() -> int:
    return len(list(Path(OUTLASTED).glob("step-*")))


def steps_had(logprobs: af.Ragged) -> list[float]:
    """How many steps the weights had had that drew each response."""
    return [-float(row[0]) for row in logprobs]


def workflow(policy: str = "wait") -> af.Workflow:
    rollout = af.Rollout(
        "noting_run:Uneven", group_size=GROUP, prompt="prompt_ids", replicas=2, max_rows=8, delay_s=0.005, spread=1.0,
        max_restarts=1000,
    )  # fmt: skip
    return echo_workflow(
        prompts={"prompt_ids": af.Ragged.of(PROMPTS)}, rollout=rollout,
        reward=af.Stage(steps_had, task="reward", gives=["reward"], launcher="thread"),
        train=af.Train("noting_run:Noting", max_restarts=1), batch_size=ROWS, steps=STEPS,
        checkpoint=af.Checkpoint(every=4, history=True), staleness=af.Staleness(policy=policy),
    )  # fmt: skip
