"""Memory of rows that goes while a run goes on costs these rows, and nobody else."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from echo_runs import check_whole, echo_workflow

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoRollout

pytestmark = pytest.mark.fast


def remove(pattern: str) -> None:
    for path in Path("/dev/shm").glob(f"{pattern}/s[0-9]*"):
        path.unlink()


class RemovesRows(EchoRollout):
    """At its first request, removes every segment of rows in the directories that ``pattern`` names."""

    def __init__(self, model: str = "", *, pattern: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._pattern = pattern

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        pattern, self._pattern = self._pattern, ""
        if pattern:
            remove(pattern)
        async for completion in super().generate(request):
            yield completion


def test_workers_of_a_run_go_on_past_rows_that_cannot_be_read(tmp_path: Path) -> None:
    # given a rollout worker that takes few prompts of many, and removes the memory they lie in
    rollout = af.Rollout(
        "test_payload_lost_in_a_run:RemovesRows", pattern=f"asyncflow-{os.getuid()}-{os.getpid()}-*", group_size=4,
        prompt="prompt_ids", max_rows=8, launcher="thread",
    )  # fmt: skip
    # when
    result = echo_workflow(rollout=rollout, steps=4).run(tmp_path / "run")
    # then the lost rows are counted, others are made in their place, and no worker has failed
    check_whole(result, 4)
    assert result.summary["rows"]["failed"] >= 4
    assert set(result.summary["reasons"]) == {"failed: payload lost"}
    assert result.summary["warnings"] == []
