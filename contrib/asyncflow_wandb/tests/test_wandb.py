"""Runs are recorded by the real wandb, offline, and read from its files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TrackedRun
from asyncflow_sdk.testing import Conformance

kit = Conformance("tracker", "wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


HEADER, BLOCK = 7, 32 * 1024
FULL, FIRST, MIDDLE, LAST = range(1, 5)


def records(directory: Path) -> list[wandb_internal_pb2.Record]:
    """Return what wandb wrote into a run's directory. Its files have LevelDB's log format: blocks of 32
    KiB, each a sequence of checksum (4 bytes), length (2), type (1) and data."""
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        content, at, data = path.read_bytes(), HEADER, b""
        while at + HEADER <= len(content):
            if BLOCK - at % BLOCK < HEADER:  # too short for a record
                at += BLOCK - at % BLOCK
                continue
            _, length, kind = struct.unpack_from("<IHB", content, at)
            data = (b"" if kind in (FULL, FIRST) else data) + content[at + HEADER : at + HEADER + length]
            at += HEADER + length
            if kind in (FULL, LAST):
                found.append(wandb_internal_pb2.Record.FromString(data))
    return found


def workflow(**tracker: Any) -> af.Workflow:
    return af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"), reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"), batch_size=8, steps=4, track=[("wandb", tracker)],
    )  # fmt: skip


@pytest.mark.starts("tracker wandb")
def test_the_steps_of_a_run_its_samples_and_configuration(tmp_path: Path) -> None:
    workflow(project="mine", sample_every=2).run(tmp_path / "run")

    found = records(tmp_path / "run")
    (run,) = {(r.run.project, r.run.display_name) for r in found if r.WhichOneof("record_type") == "run"}
    assert run == ("mine", "run")
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in found
        if r.WhichOneof("record_type") == "history"
    ]
    steps = [row for row in history if "train/reward" in row]
    assert [(row["train/step"], row["train/reward"], row["train/version"]) for row in steps] == [
        (step, 0.5, step) for step in range(4)
    ]
    assert "train/staleness_mean" in steps[0]
    assert [row["train/step"] for row in history if any("samples" in name for name in row)] == [0, 2]
    tables = list((tmp_path / "run").glob("wandb/offline-run-*/files/media/table/train/samples*.table.json"))
    assert len(tables) == 2
    assert {"group", "reward", "response_ids"} <= set(json.loads(tables[0].read_text())["columns"])
    keys = {key for r in found for key in [i.key for i in r.run.config.update]}
    assert {"batch_size", "steps"} <= keys


def test_a_resumed_run_has_the_same_id(tmp_path: Path) -> None:
    from asyncflow_wandb.tracker import WandbTracker

    ids = set()
    for again in (False, True):
        tracker = WandbTracker()
        tracker.open(TrackedRun(directory=tmp_path, description={}, resumed=again))
        tracker.log(0, 0, {"reward": 0.5})
        tracker.close()
        ids.add((tmp_path / "wandb-run-id").read_text())

    assert len(ids) == 1
