"""Memory of rows that goes while a run goes on costs these rows, and nobody else."""

import os
from pathlib import Path

from echo_runs import echo_workflow, trained_rows

import asyncflow_sdk as af


def test_workers_of_a_run_go_on_past_rows_that_cannot_be_read(tmp_path: Path) -> None:
    # given a rollout worker that takes few prompts of many, and removes the memory they lie in
    rollout = af.Rollout(
        "lossy_engines:RemovesRows", pattern=f"asyncflow-{os.getuid()}-{os.getpid()}-*", group_size=4,
        prompt="prompt_ids", max_rows=8,
    )  # fmt: skip
    # when
    result = echo_workflow(rollout=rollout, steps=4).run(tmp_path / "run")
    # then the lost rows are counted, others are made in their place, and no worker has failed
    rows = result.summary["rows"]
    assert result.summary["status"] == "completed"
    assert result.summary["balanced"]
    assert rows["failed"] >= 4
    assert set(result.summary["reasons"]) == {"failed: payload lost"}
    assert rows["consumed"] == 4 * 16
    assert len(trained_rows(tmp_path / "run")) == 4 * 16
    assert result.summary["warnings"] == []
