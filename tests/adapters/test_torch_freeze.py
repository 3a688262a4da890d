"""Frozen weights: neither trained nor published, in exports as in the folder, and named by patterns over the folder."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_folders import family_folder, same, tensors_in
from safetensors.torch import load_file

from asyncflow_fsdp.engine import FsdpEngine
from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing.kit.ranks import RankProcesses
from asyncflow_sdk.types import Batch
from asyncflow_sdk.types.dtypes import to_torch
from asyncflow_torch.train import TorchEngine

FROZEN = ("*vision_tower*", "*multi_modal_projector*", "*layers.0.mlp*", "*embed_tokens*")


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Any]:
    made = RankProcesses(FsdpEngine, 2)
    yield made
    made.close()


def held(engine: Any) -> dict[str, Any]:
    """The published tensors; those of two ranks are arrays."""
    found = dict(engine.named_weights())
    return {each: to_torch(t) if isinstance(t, np.ndarray) else t.clone() for each, t in found.items()}


@pytest.mark.parametrize("name", ["torch", "fsdp", "two_ranks"])
def test_frozen_weights_are_not_trained_not_published_and_exported_as_they_are(
    name: str, batch: Batch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    make: Any = {"torch": TorchEngine, "fsdp": FsdpEngine}.get(name) or request.getfixturevalue(name)
    folder = family_folder("gemma3", tmp_path / "model")
    given = tensors_in(folder)
    frozen = {each for pattern in FROZEN for each in fnmatch.filter(given, pattern)}

    engine = make(model=folder, algorithm=GRPO(), device="cpu", threads=1, learning_rate=0.01, freeze=FROZEN)
    published = held(engine)
    engine.train_step(batch)
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "out")
    trained = held(engine)
    engine.close()

    assert same(published, {each: tensor for each, tensor in given.items() if each not in frozen})
    assert sum(t.nbytes for t in published.values()) == sum(t.nbytes for t in given.values()) - sum(
        given[each].nbytes for each in frozen
    )
    assert all(not torch.equal(trained[each], published[each]) for each in published if each.endswith("proj.weight"))
    assert same(tensors_in(tmp_path / "out"), {**given, **trained})
    moments = [each for each in load_file(tmp_path / "state" / "optimizer.safetensors") if "exp_avg/" in each]
    assert moments and not [each for each in moments if "vision" in each or "layers.0.mlp" in each]
    other = TorchEngine(folder, freeze=FROZEN)
    other.load(tmp_path / "state")
    assert set(other.untrained) == frozen
    assert same(held(other), trained)


WORKFLOW = """\
steps = 2
batch_size = 4
reward = "rewards:length"
prompts = { prompt_ids = [[1, 2], [3, 4]] }
rollout = { engine = "transformers", model = "base", prompt = "prompt_ids", group_size = 2, sampling = { max_tokens = 4, seed = 1 } }
train = { engine = "torch", model = "base", learning_rate = 0.01, freeze = ["*embed_tokens*"], drift_limit = 0.01 }
weights = { probe = false }
"""


def test_a_file_names_what_is_frozen(tmp_path: Path) -> None:
    given = tensors_in(family_folder("mixtral", tmp_path / "base"))
    (tmp_path / "rewards.py").write_text("def length(response_ids):\n    return [sum(r) % 7 for r in response_ids]\n")
    (tmp_path / "run.toml").write_text(WORKFLOW)

    said = subprocess.run(
        [sys.executable, "-m", "asyncflow_sdk.cli", "run", "run.toml", "out"], cwd=tmp_path, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip

    assert said.returncode == 0, said.stdout
    trained = tensors_in(tmp_path / "out" / "model")
    assert {name for name in given if torch.equal(trained[name], given[name])} == {"model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("freeze", "says"),
    [
        (["*.expert.*"], r"freeze='\*.expert.\*' matches no tensor .*near: model.layers.0.mlp.experts.0"),
        (["*.experts.1.*"], r"leaves out parts of weights that are one in the model; match these, too:\n.*experts.0"),
        (["*"], "leaves no weight to train"),
        ("*.mlp.*", r"say freeze=\['\*.mlp.\*'\]"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(freeze: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        TorchEngine(family_folder("qwen3_moe", tmp_path), freeze=freeze)
