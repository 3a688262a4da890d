"""A disk that is full where a run lies: what ended the run is told, and nothing that was written before is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from echo_runs import echo_workflow
from small_disk import SmallDisk, small_disk

import asyncflow_sdk as af
from asyncflow_sdk.errors import MemoryFull, SchemaError, WorkerFailed
from asyncflow_sdk.testing import EchoTrain

FULL = "/dev/full"


def given_no_room_for(path: Path) -> None:
    """Writing there is refused by the kernel, as on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(FULL)


def summary_part(directory: Path) -> Path:
    return directory / f".summary.json-{os.getpid()}"


def test_a_summary_that_cannot_be_written_is_told_with_how_the_run_ended(tmp_path: Path) -> None:
    given_no_room_for(summary_part(tmp_path / "run"))

    with pytest.raises(MemoryFull, match=r"no summary.json: .*No space left.*; the run completed, 2 of 2 steps"):
        echo_workflow(steps=2).run(tmp_path / "run")

    assert not os.path.lexists(summary_part(tmp_path / "run"))
    assert len(list((tmp_path / "run" / "steps").iterdir())) == 2


def test_why_a_run_failed_is_told_also_where_nothing_can_be_written(tmp_path: Path) -> None:
    given_no_room_for(summary_part(tmp_path / "run"))
    given_no_room_for(tmp_path / "run" / "logs" / "train-0.log")

    with pytest.raises(WorkerFailed, match="told to fail at step 1"):
        echo_workflow(train={"fail_at": 1, "launcher": "process"}).run(tmp_path / "run")


def uses_up_the_journal(response_ids: Any) -> list[float]:
    """A function that meets a full disk in a call of its own, once."""
    while disks:
        disk = disks.pop()
        disk.fill()
        with af.connect(disk.path / "run") as run:
            while True:
                with pytest.raises(SchemaError, match="no put with key"):
                    run.queue.cancel(key=300_000 * "k")
    return [1.0] * len(response_ids)


disks: list[SmallDisk] = []


def test_a_function_that_meets_a_full_disk_ends_the_run_and_blames_no_row(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        disks[:] = [disk]
        reward = af.Stage(uses_up_the_journal, task="reward", gives=["reward"], launcher="thread")

        with pytest.raises(
            WorkerFailed, match=r"(?s)MemoryFull: the journal .* has no room .*free space there"
        ) as ended:
            echo_workflow(reward=reward, checkpoint=af.Checkpoint(every=2)).run(disk.path / "run")

        disk.free()
        assert (ended.value.worker, "restart" in str(ended.value)) == ("reward-0", False)
        # and the same run goes on where there is room
        summary = af.resume(disk.path / "run").summary
        assert (summary["status"], summary["rows"]["failed"]) == ("completed", 0)


class FullExport(EchoTrain):
    """There is room for its export once the list is empty."""

    def __init__(self, model: str = "", *, algorithm: Any = None) -> None:
        super().__init__(model)

    def export(self, path: Path) -> None:
        (path / "steps").write_text(str(self.steps))
        if full:
            raise OSError(errno.ENOSPC, full.pop())


full: list[str] = []


def test_an_export_without_room_is_made_by_a_resume_and_costs_no_summary(tmp_path: Path) -> None:
    # given a run whose export fails after its last step
    full[:] = ["No space left on device"]
    flow = echo_workflow(
        train=af.Train("test_run_on_a_full_disk:FullExport", launcher="thread"), checkpoint=af.Checkpoint(every=2)
    )
    with pytest.raises(WorkerFailed, match="No space left on device"):
        flow.run(tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["balanced"]) == ("failed", 3, True)
    assert not (tmp_path / "run" / "model").exists()
    # when it is resumed, then the weights of its last step are exported
    result = af.resume(tmp_path / "run")
    assert (result.summary["status"], result.summary["steps"]) == ("completed", 3)
    assert (tmp_path / "run" / "model" / "steps").read_text() == "3"


def test_the_page_of_a_run_that_cannot_be_written_costs_neither_its_summary_nor_its_status(tmp_path: Path) -> None:
    # given a run that is shown when it has ended, and no room for its page
    (tmp_path / "rewards.py").write_text(
        "def length(response_ids):\n    return [float(len(r)) for r in response_ids]\n"
    )
    (tmp_path / "run.toml").write_text(
        'steps = 2\nbatch_size = 8\nprompts = { prompt_ids = [[1], [2]] }\nreward = { work = "rewards:length", gives = ["reward"], launcher = "thread" }\n'
        'rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4, launcher = "thread" }\n'
        'train = { engine = "echo", launcher = "thread" }\n'
    )
    (tmp_path / "out" / "report.html").mkdir(parents=True)

    command = [sys.executable, "-m", "asyncflow_sdk.cli", "run", "run.toml", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert "no report page: " in done.stdout
    assert '"status": "completed"' in (tmp_path / "out" / "summary.json").read_text()
