"""Feeding a run: what is dropped is replaced so that steps fill (DAPO's dynamic sampling), and a feeder goes on where another was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af

pytestmark = pytest.mark.fast

PROMPTS = [f"prompt {number}" for number in range(20)]


def generate(run: af.Run, keep: int) -> None:
    """Groups whose first id is a multiple of ``keep`` groups carry signal; the others are filtered."""
    with run.queue.get("rollout", count=100) as batch:
        dull = (batch.groups // 4) % keep != 0
        batch.complete({"response": [text.upper() for text in batch.texts("prompt")]}, filtered=dull)


def declare(run: af.Run) -> None:
    run.queue.declare("rollout", needs=["prompt"], gives=["response"])
    run.queue.declare("train", needs=["response"], batch_rows=16)


def test_dropped_groups_are_replaced_by_as_many_prompts() -> None:
    with af.serve(steps=3) as run:
        declare(run)
        feeder = run.feed(PROMPTS, group_size=4, chunk=5)

        for step in range(3):
            while run.queue.status().step <= step:
                generate(run, keep=3)
            with run.queue.get("train") as batch:
                assert batch.index == step
                assert len(set(batch.groups // 4 % 3)) == 1
                batch.ack()
        feeder.join(60)

        audit = run.audit()
        assert audit.balanced
        assert audit.consumed == 48
        assert audit.filtered >= 2 * (48 - 4)  # two of three groups were dropped, and made up for
        assert feeder.fed * 4 == audit.put


def test_the_stream_ends_after_the_epochs() -> None:
    with af.serve() as run:
        declare(run)
        run.feed(PROMPTS[:8], group_size=4, epochs=2, chunk=3)

        trained = 0
        seen: list[str] = []
        for batch in run.queue.stream("rollout", count=8):
            seen += batch.texts("prompt")
            batch.complete({"response": batch.texts("prompt")})
            while run.queue.status().step > trained:
                run.queue.get("train").ack()
                trained += 1

        assert sorted(seen) == sorted(PROMPTS[:8] * 4 * 2)


def test_data_without_the_column_and_a_key_used_twice_are_refused_at_once() -> None:
    with af.serve(steps=2) as run:
        with pytest.raises(af.ConfigError, match="no column 'prompt'"):
            run.feed([{"question": "?"}], group_size=2)
        declare(run)
        run.feed(PROMPTS, group_size=4, key="mine")
        with pytest.raises(af.ConfigError, match="a feeder with key 'mine' was started already"):
            run.feed(PROMPTS, group_size=4, key="mine")
        run.feed(PROMPTS, group_size=4, key="yours")


def test_a_feeder_goes_on_behind_what_was_put_under_its_keys_before() -> None:
    with af.serve(steps=2) as run:
        declare(run)
        # given a put of a feeder before a restart, of fewer groups than are wanted now
        run.queue.put({"prompt": PROMPTS[:2]}, group_size=4, key="prompts-0")
        # when
        feeder = run.feed(PROMPTS, group_size=4, chunk=5)
        while run.queue.status().step < 2:
            generate(run, keep=1)
        # then nothing was counted that is not there, and nothing is there twice
        until(lambda: feeder.fed * 4 == run.audit().put, "the count of what was put last")
        steps = [run.queue.get("train"), run.queue.get("train")]
        assert len({text for batch in steps for text in batch.texts("response")}) == 8


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


def test_two_feeders_with_the_same_key_put_every_prompt_once(tmp_path: Path) -> None:
    """As when one process goes on feeding and another takes its place."""
    prompts, seed = [f"{number}" for number in range(40)], 7
    order = np.random.default_rng([seed, 0]).permutation(40).tolist()
    with af.serve(tmp_path / "run", steps=10) as run, af.connect(run.address) as other:
        run.queue.declare("train", needs=["prompt"], batch_rows=4)
        feeders = [each.feed(prompts, group_size=1, chunk=3, seed=seed) for each in (run, other)]
        texts: list[str] = []
        for step in run.consumer("train", timeout_s=60):
            texts += step.texts("prompt")
            step.ack()
        for feeder in feeders:
            feeder.join(60)
    assert texts == [prompts[at] for at in order]
