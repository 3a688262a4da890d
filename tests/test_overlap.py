"""The simulation of ``make bench-overlap`` gives what is computed by hand."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import pytest

from asyncflow_sdk.testing import RolloutLatency
from benchmarks.overlap.plan import GROUP, Plan, StagePlan, Work
from benchmarks.overlap.simulation import simulate

pytestmark = pytest.mark.fast


class Handy(Plan, frozen=True, kw_only=True):
    """A step is two groups; a token takes 1 s, loading 1 s, each row of a stage 0.5 s. ``tokens``: of the groups' responses in turn."""

    replicas: int = 1
    steps: int = 3
    tokens: tuple[int, ...] = (10,)
    train_row_s: float = 0.5
    load_s: float = 1.0
    copy: float = 0.0
    held: bool = False

    rows = 2 * GROUP
    copy_s = property(lambda self: self.copy)  # type: ignore[assignment]

    @property
    def max_rows(self) -> int:
        return self.rows // self.replicas

    @cached_property
    def rollout(self) -> RolloutLatency:
        return RolloutLatency(step_s=1.0, load_s=self.load_s)

    @cached_property
    def lengths(self) -> Any:
        return np.repeat(np.resize(np.array(self.tokens), self.prompts), GROUP)

    @property
    def stages(self) -> tuple[StagePlan, ...]:
        whole = self.mode == "synchronous"
        a_call = {"work": Work(row_s=0.5), "rows": self.rows if whole else GROUP, "whole": whole}
        stages = [
            StagePlan(task="reward", needs=("response_ids",), gives="reward", **a_call),
            StagePlan(task="reference", needs=("reward",), gives="ref_logprobs", **a_call),
        ]
        return tuple(stages) if self.held else tuple(stages[:1])

    @property
    def train_needs(self) -> tuple[str, ...]:
        return tuple(stage.gives for stage in self.stages)

    @property
    def train(self) -> Work:
        return Work(call_s=1.0, row_s=self.train_row_s)


def test_synchronous_steps_are_sums() -> None:
    # 10 of generation, 4 + 4 of two stages, 1 + 8 · 0.75 of training, 1 of copying; then 2 of loading before each later step
    plan = Handy(
        mode="synchronous", max_staleness=0, tokens=(5, 10), held=True, train_row_s=0.75, copy=1.0, load_s=2.0
    )
    assert simulate(plan).trained_s == [26.0, 54.0, 82.0]


def test_streaming_hides_what_is_done_before_the_last_response() -> None:
    # The first group, at 5: reward to 7, reference to 9, its part of the step to 12. The second, at 10: to 12, to 14, to 17.
    # The end of the step and the copy take 1 each.
    plan = Handy(mode="streaming", max_staleness=0, tokens=(5, 10), held=True, train_row_s=0.75, copy=1.0, load_s=2.0)
    assert simulate(plan).trained_s == [19.0, 40.0, 61.0]


def test_delayed_updates_generate_the_next_step_meanwhile() -> None:
    # rows at 10, rewards to 12 and 14, training 5: 19. Those of step 1 began at 10 by version 0, end at 20, and so does the
    # wait for version 1: it is loaded to 21. So a step takes 11, of which generation is 10.
    assert simulate(Handy(mode="asynchronous", steps=4)).trained_s == [19.0, 29.0, 40.0, 51.0]


def test_in_flight_a_load_holds_up_what_runs() -> None:
    # as above, but version 1 comes at 19 and holds up what runs, which ends at 21
    outcome = simulate(Handy(mode="in flight", steps=4))
    assert outcome.trained_s == [19.0, 30.0, 41.0, 52.0]
    assert outcome.staleness == [0.0, 1.0, 1.0, 1.0]


def test_training_that_takes_longer_is_the_bound() -> None:
    # 0.5 + 8 · 2.5 a step, whatever else happens
    outcome = simulate(Handy(mode="in flight", max_staleness=4, steps=6, train_row_s=2.5, copy=0.5))
    assert np.diff(outcome.trained_s).tolist() == [21.5] * 5


def test_staggered_replicas_without_prompts_load_together() -> None:
    # Two replicas of a group each. Version 1 comes at 19; the first drains to 20, loads to 25, and generates to 35. The second,
    # done at 20, is given nothing for step 2 by version 0, and does the same. Rewards to 37 and 39, training to 44.
    plan = Handy(mode="staggered", replicas=2, steps=3, load_s=5.0)
    outcome = simulate(plan)
    assert outcome.trained_s == [19.0, 29.0, 44.0]
    assert outcome.slots.get("waiting", 0.0) == 0.0


def test_the_time_of_every_slot_has_one_use() -> None:
    # One replica of 8 slots. It generates from 0 to 10 and to 20, when version 1 is there, loads to 21, generates to 31; version
    # 2 comes at 29: loads to 32, generates to 42. The third step is trained from 35 to 40.
    slots = simulate(Handy(mode="staggered", steps=3)).slots
    assert slots["generating"] == pytest.approx(38 / 40)
    assert slots["loading"] == pytest.approx(2 / 40)


def test_count_admits_by_number_and_wait_by_age() -> None:
    # one group of every four takes 100: with wait, nothing is generated past the step that it may be trained in
    long = {"mode": "in flight", "max_staleness": 1, "steps": 6, "tokens": (100, 10, 10, 10)}
    waits, counts = (simulate(Handy(policy=policy, **long)) for policy in ("wait", "count"))
    assert counts.trained_s[-1] < waits.trained_s[-1]
    assert max(waits.staleness) <= 1
