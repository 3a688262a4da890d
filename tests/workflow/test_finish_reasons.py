"""The reasons why responses end: a column for functions, and a share in the metrics, the live view and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echo_runs import echo_workflow

import asyncflow_sdk as af
from asyncflow_sdk.cli.live_view import run_screen
from asyncflow_sdk.cli.report.page import write_report
from asyncflow_sdk.cli.report.run_record import read_record


def in_time(response_ids: Any, finish_reason: list[str]) -> list[float]:
    return [float(reason == "stop") + len(ids) / 8 for ids, reason in zip(response_ids, finish_reason, strict=True)]


def test_a_reward_reads_the_finish_reason_of_each_row(tmp_path: Path) -> None:
    # given prompts of 1 to 4 tokens, whose copies are cut after 2
    flow = echo_workflow(rollout={"sampling": af.Sampling(max_tokens=2)}, reward=in_time, steps=1)

    result = flow.run(tmp_path / "run")

    # then
    ((_, batch),) = af.read_steps(result.directory)
    cut = [len(ids) > 2 for ids in batch.ragged("prompt_ids")]
    assert batch["finish_reason"] == ["length" if each else "stop" for each in cut]
    assert [reward >= 1 for reward in batch["reward"].tolist()] == [not each for each in cut]
    record = read_record(result.directory)
    assert record.metric("truncated_fraction") == [0.5]
    screen = run_screen(record.figures, title="", now_s=0.0, width=100, height=30)
    assert any("50% of the responses truncated" in line.plain for line in screen)
    assert "truncated responses" in write_report(result.directory).read_text()
