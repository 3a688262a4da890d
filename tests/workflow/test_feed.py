"""Feeding one's own loop: what is dropped is replaced, so that steps fill (DAPO's dynamic sampling)."""

from __future__ import annotations

import pytest

import asyncflow_sdk as af

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
        feeder.join(10)

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


def test_data_without_the_column_is_refused_at_once() -> None:

    with af.serve() as run, pytest.raises(af.ConfigError, match="no column 'prompt'"):
        run.feed([{"question": "?"}], group_size=2)


def test_two_feeders_have_keys_of_their_own() -> None:
    with af.serve(steps=2) as run:
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
        assert feeder.fed * 4 == run.audit().put
        keys = {
            text for batch in [run.queue.get("train"), run.queue.get("train")] for text in batch.texts("response")
        }
        assert len(keys) == 8
