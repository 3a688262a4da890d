"""What is run: a shape of model and machine, a mode of the workflow, and how long everything takes.

Times are the model's seconds. The same plan is run for real (``drive``) and simulated (``simulation``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from asyncflow_sdk.testing import RolloutLatency
from asyncflow_sdk.types.config import SwapPolicy

GROUP = 4
PROMPT_TOKENS = 256
MICRO_BATCHES = 8
"""Calls that a stage needs for the rows of a step, where it is not held until all are there."""

Mode = Literal["synchronous", "streaming", "asynchronous", "streaming and asynchronous", "staggered", "in flight"]
SWAPS: dict[str, SwapPolicy] = {
    "synchronous": "drain", "streaming": "drain", "asynchronous": "boundary", "streaming and asynchronous": "boundary",
    "staggered": "drain", "in flight": "in_flight",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model on a machine. ``rollout``: of a replica of 32 rows. ``copy_s``: of reading the trainer's weights."""

    rollout: RolloutLatency
    copy_s: float


SHAPES = {
    "7B": Shape(
        rollout=RolloutLatency(
            step_s=0.016, step_row_s=0.0005, prefill_s=1e-4, load_s=0.6, median=700, sigma=0.7, longest=3072
        ),
        copy_s=0.4,
    ),
    "32B": Shape(
        rollout=RolloutLatency(
            step_s=0.035, step_row_s=0.001, prefill_s=4e-4, load_s=2.5, median=1100, sigma=0.8, longest=8192
        ),
        copy_s=1.5,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call of a stage, or a step, takes: ``call_s + row_s * rows + token_s * tokens``, of prompts and responses."""

    call_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0

    def seconds(self, rows: int, tokens: float) -> float:
        return self.call_s + self.row_s * rows + self.token_s * tokens


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage on a device of its own. ``rows``: of a call; with ``whole`` it waits for so many."""

    task: str
    needs: tuple[str, ...]
    gives: str
    work: Work
    rows: int
    whole: bool = False


class Plan(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One run. ``ratio``: device seconds of rollout over those of training, of a step. ``warm``: steps that are not measured."""

    shape: str = "7B"
    mode: Mode = "in flight"
    policy: str = "wait"
    max_staleness: int = 1
    replicas: int = 8
    ratio: float = 1.0
    steps: int = 12
    warm: int = 3
    seed: int = 0
    time_scale: float = 20.0

    @property
    def name(self) -> str:
        return f"{self.shape} {self.ratio:.2g} {self.replicas} {self.mode} {self.policy} {self.max_staleness}"

    @property
    def rows(self) -> int:
        """Of a step."""
        return max(256, 32 * self.replicas)

    @property
    def max_rows(self) -> int:
        """That a replica generates at once: a step is two waves."""
        return self.rows // (2 * self.replicas)

    @property
    def prompts(self) -> int:
        """That are put: enough for the steps and all that may be generated ahead of the last."""
        return (self.steps + self.max_staleness + 2) * self.rows // GROUP

    @property
    def swap(self) -> SwapPolicy:
        return SWAPS[self.mode]

    @property
    def max_swapping(self) -> int:
        return max(1, self.replicas // 4) if self.mode == "staggered" else 0

    @cached_property
    def rollout(self) -> RolloutLatency:
        usual = SHAPES[self.shape].rollout
        a_row = usual.step_row_s * 32 / self.max_rows  # of fewer, larger devices would not be the same machine
        return dataclasses.replace(usual, step_row_s=a_row, seed=self.seed)

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Of all responses, in the order in which their prompts are put."""
        return np.concatenate([self.rollout.lengths(prompt, GROUP) for prompt in range(self.prompts)])

    @property
    def step_tokens(self) -> float:
        """Of prompts and responses of a step, on average."""
        return self.rows * (PROMPT_TOKENS + float(self.lengths.mean()))

    @property
    def rollout_s(self) -> float:
        """What a step takes of the rollout devices, side by side and always full."""
        row_s = self.rollout.row_s(self.max_rows, float(self.lengths.mean()), PROMPT_TOKENS / GROUP)
        return self.rows * row_s / self.replicas

    @property
    def train_s(self) -> float:
        return self.rollout_s / self.ratio

    @property
    def copy_s(self) -> float:
        return SHAPES[self.shape].copy_s

    @property
    def train(self) -> Work:
        """Of a step; ``call_s`` is that of its end."""
        return Work(call_s=0.1 * self.train_s, token_s=0.9 * self.train_s / self.step_tokens)

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        """Reward, then log-probs of a reference."""
        whole = self.mode == "synchronous"
        rows = self.rows if whole else self.rows // MICRO_BATCHES
        reward = Work(row_s=0.1 * self.rollout_s / self.rows)
        reference = Work(token_s=self.train.token_s / 3)
        return (
            StagePlan(task="reward", needs=("response_ids",), gives="reward", work=reward, rows=rows, whole=whole),
            StagePlan(
                task="reference", needs=("prompt_ids", "response_ids", "reward"), gives="ref_logprobs", work=reference,
                rows=rows, whole=whole,
            ),
        )  # fmt: skip

    @property
    def part_rows(self) -> int:
        """Least rows of a part of a step: a group; 0: steps are trained whole."""
        return GROUP if self.mode.startswith("streaming") else 0

    @property
    def train_needs(self) -> tuple[str, ...]:
        return tuple(stage.gives for stage in self.stages[1:])

    def slowest(self) -> tuple[str, float]:
        """(a): the resource that a step takes longest of, and how long, in the model's seconds.

        rollout:    rows · (mean length · (step_s / max_rows + step_row_s) + prompt tokens / group · prefill_s) / replicas
        training:   0.1·T + 0.9·T·(tokens / mean tokens) + copy_s, with T = rollout / ratio
        reward:     0.1 · rollout;  reference: a third of training's tokens
        """
        tokens = self.step_tokens
        taken = {"rollout": self.rollout_s, "training": self.train.seconds(self.rows, tokens) + self.copy_s}
        for stage in self.stages:
            taken[stage.task] = stage.work.seconds(self.rows, tokens)
        return max(taken.items(), key=lambda item: item[1])

    def options(self) -> dict[str, Any]:
        """Of the timed rollout engine."""
        return dataclasses.asdict(self.rollout) | {"max_rows": self.max_rows, "time_scale": self.time_scale}
