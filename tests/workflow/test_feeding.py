"""Feeding a run: what is dropped is replaced so that steps fill (DAPO's dynamic sampling), and a feeder goes on where another was."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af
from asyncflow_sdk.errors import Ended
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.workflow.data import Feeder, Selection, prompt_source

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


class Script:
    """A queue that gives a feeder these answers; puts and their prompts are in ``puts``. An answer ``Ended`` refuses the
    next put."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [cmd.LastPut(), *answers]
        self.more: list[bool] = []
        self.puts: list[tuple[str, list[str]]] = []
        self.ends = 0

    def send(self, command: Any) -> Any:
        if isinstance(command, cmd.AwaitRowsWanted):
            self.more.append(command.more)
        return self.answers.pop(0)

    def put(self, columns: Any, *, group_size: int, key: str, timeout_s: float) -> None:
        if self.answers[0] is Ended:
            self.answers.pop(0)
            raise Ended("every step is filled")
        self.puts.append((key, columns["prompt"]))

    def end(self, partition: str | None) -> None:
        self.ends += 1


class OpenFile:
    """A stream that reads one open file: a second reader moves the first one."""

    def __init__(self, lines: list[str]) -> None:
        self.file = io.StringIO("".join(f"{line}\n" for line in lines))

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        while line := self.file.readline():
            yield line.strip()


@pytest.mark.parametrize("kind", ["memory", "function", "open file"])
def test_a_feeder_repeats_refused_and_lost_puts_and_goes_on_where_it_was(kind: str) -> None:
    texts = PROMPTS[:5]
    prompts = {"memory": texts, "function": lambda: iter(texts), "open file": OpenFile(texts)}[kind]
    more, over, first = (
        cmd.RowsWanted(count=4),
        cmd.RowsWanted(count=0),
        cmd.RowsWanted(count=0, lost={"prompts-0": 2}),
    )
    lost = cmd.RowsWanted(count=0, lost={"prompts-4": 1, "prompts-2": 2})
    queue = Script(more, Ended, more, more, first, more, lost, more, lost, over)
    # when a put is refused once, and others are lost, also after the last prompt
    source, failures = prompt_source(prompts, Selection()), list[BaseException]()
    feeder = Feeder(queue, source, group_size=2, chunk=2, seed=0, on_failure=failures.append, epochs=1)  # type: ignore[arg-type]
    feeder.start()
    feeder.join(60)
    # then each put has the same prompts as before
    assert (failures, queue.answers) == ([], [])
    numbers = [int(key.removeprefix("prompts-")) for key, _ in queue.puts]
    assert numbers == [0, 2, 0, 4, 2, 4, 2, 4]
    first_time = dict(queue.puts[at] for at in (0, 1, 3))
    assert queue.puts == [(key, first_time[key]) for key, _ in queue.puts]
    assert sorted(text for put in first_time.values() for text in put) == texts
    assert feeder.fed == 5
    # and it ends the stream once nothing can be lost
    assert queue.more == [True] * 7 + [False] * 2
    assert queue.ends == 1


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
