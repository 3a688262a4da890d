"""A run that learns nothing says so by its third step, once, wherever people look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_runs import echo_workflow, events_of

import asyncflow_sdk as af
from asyncflow_sdk.cli.report.page import write_report
from asyncflow_sdk.cli.report.summary import facts
from asyncflow_sdk.workflow.loops.record_files import lasting_notes
from asyncflow_sdk.workflow.loops.recorder import NOTHING, FirstSteps, Recorder


def never_right(response_ids: Any) -> list[float]:
    return [0.0] * len(response_ids)


def test_rewards_that_are_all_zero_are_one_warning_with_an_example(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"

    result = echo_workflow(reward=never_right, steps=5).run(directory)

    (said,) = result.summary["warnings"]
    assert said.startswith(f"{NOTHING}: all rewards of the first 3 steps are 0.")
    ((_, batch), *_) = [each for each in af.read_steps(directory) if each[0] == 2]
    assert f"prompt_ids {batch['prompt_ids'][0].tolist()}, response_ids {batch['response_ids'][0].tolist()}" in said
    assert sum(said in line for line in caplog.messages) == 1
    assert [note["text"] for note in events_of(directory, "note") if note.get("level") == "warning"] == [said]
    assert NOTHING in write_report(directory).read_text()
    assert dict(facts(result.summary))["warnings"] == said
    # what `top` reads, a part at a time
    texts, end = lasting_notes(directory / "events.jsonl", 0)
    assert (texts, lasting_notes(directory / "events.jsonl", end)) == ([said], ([], end))
    # and a process that continues the run
    again = Recorder(directory, again=True)
    again.close()
    assert again.errors == [said]


def warned(metrics: dict[str, float], *rewards: list[float], tokens: int = 3) -> list[str]:
    """What is said of steps with these rewards, of groups of two rows."""
    first = FirstSteps()
    said = []
    for step, each in enumerate(rewards):
        ids = [[7] * tokens for _ in each]
        columns = {
            "prompt": ["2+3="] * len(each), "response": ["\x00five"] * len(each), "response_ids": ids, "reward": each,
            "finish_reason": ["length"] * len(each),
        }  # fmt: skip
        first.trained(step, {"reward": float(np.mean(each)), "rows_used": 4.0, "truncated_fraction": 0.5} | metrics)
        said.append(first.add(step, af.Batch.of(columns, groups=np.arange(len(each)) // 2)))
    return said


def test_each_sign_is_named_by_the_third_step() -> None:
    flat, varied = [0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.5, 1.0]

    assert warned({}, [1.0] * 4, [1.0] * 4)[-1] == ""
    nothing, none, idle, later = warned({"rows_used": 0.0}, flat, flat, flat, flat)
    assert (nothing, none, later) == ("", "", "")
    assert "in no group of the first 3 steps do rewards differ" in idle
    assert r"prompt '2+3=', response '\x00five', finish_reason 'length', reward 0.0" in idle
    assert "cut every response of the first 3 steps" in warned({"truncated_fraction": 1.0}, varied, varied, varied)[2]


@pytest.mark.parametrize(
    ("metrics", "rewards", "tokens"),
    [
        ({}, [[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 1.0]], 3),
        ({}, [[0.0, 0.0, 1.0, 1.0]] * 3, 3),
        ({"reward": 0.1}, [[0.0] * 4] * 3, 3),
        ({"truncated_fraction": 1.0}, [[0.0, 1.0]] * 3, 1),
    ],
    ids=["one reward", "trained by a critic", "other rows of a sampled step", "a token is asked for"],
)
def test_a_run_that_learns_is_not_warned(metrics: dict[str, float], rewards: list[list[float]], tokens: int) -> None:
    assert warned(metrics, *rewards, tokens=tokens) == [""] * 3
