"""What the tests of runs share: a workflow of echo engines, and looking at what runs leave."""

import os
from pathlib import Path
from typing import Any

from functions import length

import asyncflow_sdk as af


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def segments(pid: int) -> set[str]:
    """Directories of runs in shared memory that a process made."""
    return {path.name for path in Path("/dev/shm").glob(f"asyncflow-{os.getuid()}-{pid}-*")}


def echo_workflow(**changes: Any) -> af.Workflow:
    """A workflow of echo engines; ``rollout``, ``train`` are options of theirs, or what is meant instead."""
    rollout = {"group_size": 4, "prompt": "prompt_ids", "delay_s": 0.002, "spread": 1.0}
    if isinstance(changes.get("rollout"), dict):
        rollout |= changes.pop("rollout")
    train = changes.pop("train") if isinstance(changes.get("train"), dict) else {}
    arguments: dict[str, Any] = {
        "prompts": {"prompt_ids": af.Ragged.of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]])},
        "rollout": af.Rollout("echo", **rollout),
        "reward": length,
        "train": af.Train("echo", **train),
        "batch_size": 16,
        "steps": 12,
    }
    return af.Workflow(**(arguments | changes))


def trained_rows(directory: Path) -> list[int]:
    """Ids of all rows of all recorded steps."""
    return [row for _, batch in af.read_steps(directory) for row in batch.ids.tolist()]
