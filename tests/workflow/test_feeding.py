"""The feeder of a run that goes on after very many prompts."""

from pathlib import Path

import numpy as np
import pytest

import asyncflow_sdk as af
from asyncflow_sdk.workflow.data import Feeder


def test_a_feeder_goes_on_where_a_long_run_was_without_drawing_all_of_it_again(tmp_path: Path) -> None:
    # given a run that had put its few prompts very often
    prompts, fed, seed = ["a", "b", "c"], 3_000_000_001, 7
    with af.serve(tmp_path / "run", steps=1) as run:
        run.queue.declare("train", needs=["prompt"], batch_rows=4)
        run.queue.put({"prompt": ["last"]}, key=f"prompts-{fed - 1}")
        # when
        run.feed(prompts, group_size=1, chunk=3, seed=seed)
        # then the next ones are those of the same order
        step = run.queue.get("train", timeout_s=30)
        order = np.random.default_rng([seed, fed // 3]).permutation(3).tolist()
        after = np.random.default_rng([seed, fed // 3 + 1]).permutation(3).tolist()
        assert step.texts("prompt") == ["last", *(prompts[at] for at in [*order[1:], *after][:3])]
        step.ack()


def test_a_feeder_goes_on_after_what_another_put_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a feeder that looked for what was put before, and another one's put of fewer rows that came after that
    prompts, seed = ["a", "b", "c", "d"], 7
    order = np.random.default_rng([seed, 0]).permutation(4).tolist()
    look, looks = Feeder._go_on, 0

    def late(feeder: Feeder) -> None:
        nonlocal looks
        looks += 1
        if looks > 1:
            look(feeder)

    monkeypatch.setattr(Feeder, "_go_on", late)
    with af.serve(tmp_path / "run", steps=1) as run:
        run.queue.declare("train", needs=["prompt"], batch_rows=4)
        run.queue.put({"prompt": [prompts[order[0]]]}, group_size=1, key="prompts-0")
        # when
        run.feed(prompts, group_size=1, chunk=3, seed=seed)
        # then no prompt is left out and none comes twice
        step = run.queue.get("train", timeout_s=30)
        assert step.texts("prompt") == [prompts[at] for at in order]
        step.ack()
    assert looks == 2
