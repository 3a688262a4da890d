"""A run that proves by itself what it was trained with: its trainer keeps notes of that in its checkpoints, beside the weights.

The reward of a response is how many steps the weights that drew it had been trained: it rises only by training, and not by
steps that were lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echo_runs import echo_workflow
from gates import Gated

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import StepResult
from asyncflow_sdk.types import Batch

STEPS, ROWS, GROUP = 18, 16, 4
PROMPTS = [[n, n + 1, n + 2] for n in range(STEPS * ROWS // GROUP)]
"""As many as the steps have groups: each is trained once."""


class Noting(Gated):
    """Notes of each step that its weights have: ids and prompts of its rows, and their rewards."""

    def __init__(self, model: str = "", **options: Any) -> None:
        super().__init__(model, **options)
        self.notes: list[dict[str, Any]] = []

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


def steps_had(logprobs: af.Ragged) -> list[float]:
    """How many steps the weights had had that drew each response."""
    return [-float(row[0]) for row in logprobs]


def workflow() -> af.Workflow:
    rollout = af.Rollout(
        "echo", group_size=GROUP, prompt="prompt_ids", replicas=2, max_rows=8, delay_s=0.005, spread=1.0,
        max_restarts=1000,
    )  # fmt: skip
    return echo_workflow(
        prompts={"prompt_ids": af.Ragged.of(PROMPTS)}, rollout=rollout,
        reward=af.Stage(steps_had, task="reward", gives=["reward"], launcher="thread"),
        train=af.Train("noting_run:Noting", max_restarts=1), batch_size=ROWS, steps=STEPS,
        checkpoint=af.Checkpoint(every=4, history=True),
    )  # fmt: skip
