"""A trainer with real weights that goes on from a checkpoint: every later step gives the very same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncflow_sdk as af
from asyncflow_sdk.interfaces import TRAIN_COLUMNS
from asyncflow_sdk.types import Ragged, one_version

STEPS, ROWS, SIZE = 5, 8, 4
Weights = dict[str, Any]


def serve_rows(directory: Path) -> af.Run:
    """A run whose steps are full: the same rows each time."""
    rng = np.random.default_rng(0)
    run = af.serve(directory, checkpoints=True)
    run.queue.declare("rollout", needs=["prompt_ids"], gives=TRAIN_COLUMNS[1:])
    run.queue.declare("train", needs=TRAIN_COLUMNS, batch_rows=ROWS)
    prompts = Ragged.of([rng.integers(3, 43, 5) for _ in range(STEPS * ROWS // SIZE)], np.int32)
    run.queue.put({"prompt_ids": prompts}, group_size=SIZE)
    run.queue.end()
    with run.queue.get("rollout", STEPS * ROWS) as rows:
        lengths = rng.integers(2, 9, rows.rows)
        total = int(lengths.sum())
        rows.complete(
            {
                "response_ids": Ragged.from_lengths(rng.integers(3, 43, total).astype(np.int32), lengths),
                "logprobs": Ragged.from_lengths(-rng.random(total, np.float32) - 3, lengths),
                "version_spans": one_version(0, lengths),
                "reward": rng.random(rows.rows, np.float32),
            }
        )
    return run


def train(run: af.Run, engine: Any, seen: dict[int, Weights], most: int = STEPS) -> int:
    """Where it went on. ``seen``: the weights after each step."""
    point = run.resume()
    if point.path is not None:
        engine.load(point.path)
    for step in run.consumer("train"):
        result = engine.train_step(step)
        step.ack(filtered=result.filtered)
        seen[step.index] = {name: tensor.clone() for name, tensor in engine.named_weights()}
        if step.index % 2 == 1:
            run.checkpoint(engine.save)
        if step.index == most:
            break
    return point.step


def test_steps_after_a_checkpoint_give_the_same_weights_to_the_bit(trainer: Any, tmp_path: Path) -> None:
    # given what an uninterrupted trainer comes to
    whole: dict[int, Weights] = {}
    with serve_rows(tmp_path / "whole") as run:
        assert train(run, trainer(learning_rate=1e-2), whole) == 0
    # when another one dies after step 2, and a third goes on
    died: dict[int, Weights] = {}
    went_on: dict[int, Weights] = {}
    with serve_rows(tmp_path / "died") as run:
        train(run, trainer(learning_rate=1e-2), died, most=2)
        torch.manual_seed(99)
        assert train(run, trainer(learning_rate=1e-2), went_on) == 2
        assert run.audit().balanced
    # then
    assert sorted(went_on) == [2, 3, 4]
    for step, weights in went_on.items():
        assert weights.keys() == whole[step].keys()
        assert all(torch.equal(tensor, whole[step][name]) for name, tensor in weights.items()), f"step {step}"
    assert not all(torch.equal(tensor, whole[1][name]) for name, tensor in went_on[2].items())
