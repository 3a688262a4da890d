"""The work of a number of replicas. Each adds as much: its slots, its rows of a step, and its share of the training device."""

from __future__ import annotations

from functools import cached_property

from asyncflow_sdk.testing import RolloutLatency

from ..overlap.plan import Plan, StagePlan, Work

SIZES = (32, 64, 128, 256, 512, 1024)
PAPER = {"paper, 7B": 0.65, "paper, 32B": 0.88}
"""Throughput of 1,024 devices, as a part of 32 times that of 32 devices (arXiv 2507.01663)."""


class ScalePlan(Plan, frozen=True, kw_only=True):
    """In flight, ``wait``: the slots are always full, and training takes half of a step's time, so the replicas are the bound.

    A replica has 8 slots and makes about one row a second of the model's, of about 320 tokens. A step has two waves of rows.
    """

    mode: str = "in flight"  # type: ignore[assignment]
    max_staleness: int = 4
    replicas: int = 32
    ratio: float = 2.0
    warm: int = 3
    steps: int = 9
    time_scale: float = 1.0

    @property
    def rows(self) -> int:
        return 16 * self.replicas

    @property
    def max_rows(self) -> int:
        return 8

    @cached_property
    def rollout(self) -> RolloutLatency:
        return RolloutLatency(
            step_s=0.016, step_row_s=0.001, prefill_s=1e-4, load_s=0.1, median=256, sigma=0.7, longest=1024, seed=self.seed
        )  # fmt: skip

    @property
    def copy_s(self) -> float:
        return 0.1

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        return (StagePlan(task="reward", needs=("response_ids",), gives="reward", work=Work(), rows=64),)

    @property
    def step_work(self) -> Work:
        return self.train

    def slowest(self) -> tuple[str, float]:
        return "rollout", self.rollout_s


def plan_of(replicas: int, *, quick: bool = False) -> ScalePlan:
    """``quick``: only to see that it runs."""
    if quick:
        return ScalePlan(replicas=replicas, warm=1, steps=2, time_scale=20.0)
    return ScalePlan(replicas=replicas)
