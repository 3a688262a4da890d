"""Evaluations of a real model: greedy, token for token what plain transformers generates from the folder of the same version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_generation import check_evaluations, generated
from safetensors.numpy import load_file
from typer.testing import CliRunner

import asyncflow_sdk as af
from asyncflow_sdk.cli.app import app
from asyncflow_sdk.workflow.loops.record_files import read_batch

HELD_OUT = {"prompt_ids": [[5, 6, 7], [8, 9], [10, 11, 12, 13]]}
TOKENS = 8


def odd(response_ids: Any) -> list[float]:
    return [float(np.mean(np.asarray(row) % 2)) for row in response_ids]


@pytest.fixture(scope="module")
def evaluated(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> af.Result:
    """A run that evaluates every version and writes the folder of each."""
    scored = af.Stage(odd, task="reward", launcher="thread")
    return af.Workflow(
        prompts={"prompt_ids": [[5, 9], [4, 6, 8]]},
        rollout=af.Rollout(
            "transformers", model=tiny, prompt="prompt_ids", group_size=4, sampling=af.Sampling(max_tokens=TOKENS, seed=1),
            launcher="thread",
        ),
        reward=scored, train=af.Train("torch", model=tiny, learning_rate=1e-2, launcher="thread", gradient_checkpointing=True),
        evaluate=af.Evaluation(prompts=HELD_OUT, every=1, reward=scored),
        batch_size=8, steps=3, save_steps=1, save_total_limit=2, staleness=af.Staleness(max_staleness=0),
        checkpoint=af.Checkpoint(every=1, keep=3),
    ).run(tmp_path_factory.mktemp("evaluated") / "run")  # fmt: skip


def test_an_evaluation_equals_plain_transformers_on_the_folder_of_its_version(evaluated: af.Result) -> None:
    assert check_evaluations(evaluated, HELD_OUT["prompt_ids"], TOKENS) >= {3}
    for each in evaluated.evaluations:
        batch = read_batch(evaluated.directory / "evaluations" / f"{each.version:06d}.safetensors")
        assert each.score == pytest.approx(np.mean(odd(batch["response_ids"])))


def test_the_best_folder_is_the_published_version_bit_for_bit(evaluated: af.Result) -> None:
    best = evaluated.best
    assert best is not None
    held = load_file(evaluated.directory / "best" / "model.safetensors")
    batch = read_batch(evaluated.directory / "evaluations" / f"{best.version:06d}.safetensors")

    assert (
        generated(evaluated.directory / "best", batch["prompt_ids"][0].tolist(), TOKENS)
        == batch["response_ids"][0].tolist()
    )
    assert (evaluated.directory / "best" / "generation_config.json").is_file()
    last = load_file(evaluated.directory / "model" / "model.safetensors")
    step = load_file(evaluated.directory / "models" / "step-000003" / "model.safetensors")
    assert held.keys() == last.keys() == step.keys()
    assert all(np.array_equal(last[name], step[name]) for name in last)
    if best.version == 3:
        assert all(np.array_equal(held[name], last[name]) for name in last)


def test_export_writes_the_folder_of_a_step_also_from_its_checkpoint(evaluated: af.Result, tmp_path: Path) -> None:
    def exported(*options: str) -> dict[str, Any]:
        out = tmp_path / "-".join(["out", *options])
        done = CliRunner().invoke(app, ["export", str(evaluated.directory), str(out), *options])
        assert done.exit_code == 0, done.output
        return load_file(out / "model.safetensors")

    def same(one: dict[str, Any], folder: str) -> bool:
        other = load_file(evaluated.directory / folder / "model.safetensors")
        return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)

    assert same(exported(), "model")
    assert same(exported("--best"), "best")
    assert same(exported("--step", "3"), "models/step-000003")
    exported("--step", "1")  # whose folder was removed, as save_total_limit says
    first = read_batch(evaluated.directory / "evaluations" / "000001.safetensors")
    rows = [generated(tmp_path / "out---step-1", prompt.tolist(), TOKENS) for prompt in first["prompt_ids"]]
    assert rows == [row.tolist() for row in first["response_ids"]]

    wanted = ["export", str(evaluated.directory), str(tmp_path / "none"), "--step", "9"]
    refused = CliRunner().invoke(app, wanted, env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"})
    assert "has no models/step-000009; it has: model, best" in refused.output
    assert not (tmp_path / "none").exists()
