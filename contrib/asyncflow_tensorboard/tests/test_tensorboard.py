"""What a run measures is what TensorBoard reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TrackedRun
from asyncflow_sdk.testing import Conformance
from asyncflow_tensorboard.tracker import TensorBoardTracker

kit = Conformance("tracker", "tensorboard")


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def read(directory: Path) -> EventAccumulator:
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


@pytest.mark.starts("tracker tensorboard")
def test_the_steps_of_a_run(tmp_path: Path) -> None:
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[1, 2, 3]] * 8)},
        rollout=af.Rollout("echo", group_size=4, prompt="prompt_ids"), reward=lambda response_ids: [0.5] * len(response_ids),
        train=af.Train("echo"), batch_size=8, steps=4, track=[("tensorboard", {"sample_every": 2})],
    )  # fmt: skip

    workflow.run(tmp_path / "run")

    events = read(tmp_path / "run" / "tensorboard")
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(step, 0.5) for step in range(4)]
    assert [e.value for e in events.Scalars("version")] == [0, 1, 2, 3]
    assert "run/text_summary" in events.Tags()["tensors"]
    samples = events.Tensors("samples/text_summary")
    assert [each.step for each in samples] == [0, 2]
    table = samples[0].tensor_proto.string_val[0].decode().splitlines()
    assert table[0].startswith("|group|")
    assert len(table) == 2 + 8


def test_a_step_trained_again_replaces_what_was_shown(tmp_path: Path) -> None:
    first = TensorBoardTracker()
    first.open(TrackedRun(directory=tmp_path, description={}))
    for step in range(4):
        first.log(step, step, {"reward": 0.1})
    first.close()

    again = TensorBoardTracker()
    again.open(TrackedRun(directory=tmp_path, description={}, resumed=True))
    again.log(2, 2, {"reward": 0.9})
    again.close()

    shown = [(e.step, pytest.approx(e.value)) for e in read(tmp_path / "tensorboard").Scalars("train/reward")]
    assert shown == [(0, 0.1), (1, 0.1), (2, 0.9)]


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(af.ConfigError, match="flush_s must be above 0"):
        TensorBoardTracker(flush_s=0)
