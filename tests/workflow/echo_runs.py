"""A workflow of echo engines, and the reading of what runs leave behind.

Its workers are threads of the test's process; ``processes=True`` starts each in a process of its own, for tests of processes and their ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import functions

import asyncflow_sdk as af
from asyncflow_sdk.testing import EchoTrain

PROMPTS = {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]])}
TOML = """\
steps = 1
batch_size = 4
reward = "functions:length"
prompts = { prompt_ids = [[1], [2]] }
rollout = { engine = "echo", prompt = "prompt_ids", group_size = 4 }
train = { engine = "echo" }
"""


def echo_workflow(*, processes: bool = False, **changes: Any) -> af.Workflow:
    """``rollout``, ``train``: options of the echo engines, or other specs in their place."""
    place: dict[str, Any] = {} if processes else {"launcher": "thread"}
    rollout, train = changes.pop("rollout", {}), changes.pop("train", {})
    if isinstance(rollout, dict):
        echo = {"group_size": 4, "prompt": "prompt_ids", "delay_s": 0.002, "spread": 1.0}
        rollout = af.Rollout("echo", **(echo | ({} if "python" in rollout else place) | rollout))
    if isinstance(train, dict):
        train = af.Train("echo", **(({} if {"python", "world_size"} & train.keys() else place) | train))
    arguments: dict[str, Any] = {
        "prompts": PROMPTS,
        "rollout": rollout,
        "train": train,
        "reward": af.Stage(functions.length, task="reward", **place),
        "batch_size": 16,
        "steps": 3,
    }
    return af.Workflow(**(arguments | changes))


def echo_weights(steps: int) -> dict[str, Any]:
    """The weights of the echo engines after so many steps."""
    engine = EchoTrain()
    engine.steps = steps
    return dict(engine.named_weights())


def declare_rollout(run: af.Run) -> None:
    """The task of a producer in one's own loop."""
    gives = ["response_ids", "logprobs", "version_spans"]
    run.queue.declare("rollout", needs=["prompt_ids"], gives=gives, admits=True)


def trained_rows(directory: Path) -> list[int]:
    """The ids of all rows of all recorded steps."""
    return [row for _, batch in af.read_steps(directory) for row in batch.ids.tolist()]


def column(directory: Path, name: str) -> list[Any]:
    """The values of a column in all recorded steps."""
    return [value for _, batch in af.read_steps(directory) for value in batch[name].tolist()]


def check_whole(result: af.Result, steps: int, rows: int = 16) -> None:
    """Every step was trained on rows of its own, and every row ended in one state."""
    trained = trained_rows(result.directory)
    assert len(trained) == len(set(trained)) == steps * rows
    assert (result.summary["status"], result.summary["steps"], result.summary["balanced"]) == (
        "completed",
        steps,
        True,
    )
    assert result.summary["rows"]["consumed"] == steps * rows


def events_of(directory: Path, kind: str) -> list[dict[str, Any]]:
    """The recorded events of one kind."""
    events = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


def alive(pid: int) -> bool:
    """True if a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def segments(pid: int) -> set[str]:
    """Directories of runs in shared memory that a process made."""
    return {path.name for path in Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{pid}-*")}
