"""The feeder of a run that goes on after very many prompts."""

from pathlib import Path

import numpy as np

import asyncflow_sdk as af


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
