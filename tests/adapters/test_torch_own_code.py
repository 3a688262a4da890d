"""Model folders that transformers cannot load by itself: with Python of their own, of an unknown type, of no language model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_torch.policy import load_policy
from asyncflow_torch.reference import tiny_model

OWN = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
TRAIN = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from asyncflow_torch.rollout import TransformersEngine
from asyncflow_torch.train import TorchEngine

folder, out = sys.argv[1:]
TransformersEngine(folder, trust_remote_code=True)
TorchEngine(folder, trust_remote_code=True).export(Path(out))
print(type(AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)).__name__)
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A folder whose model is in ``modeling_own.py``."""
    folder = Path(tiny_model(tmp_path / "own"))
    described = json.loads((folder / "config.json").read_bytes())
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    described |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "modeling_own.py").write_text(OWN)
    return str(folder)


def test_a_folder_with_its_own_python_is_refused_before_anything_starts(own: str) -> None:
    def planned(**options: bool) -> af.Workflow:
        rollout = af.Rollout(
            "transformers",
            model=own,
            prompt="prompt_ids",
            group_size=2,
            sampling=af.Sampling(max_tokens=8),
            **options,
        )
        return af.Workflow(
            prompts={"prompt_ids": [[1], [2]]}, rollout=rollout, train=af.Train("torch", model=own, **options),
            reward=af.Stage(len, task="reward", needs=["response_ids"]), batch_size=2, steps=1,
        )  # fmt: skip

    with pytest.raises(ConfigError, match="trust_remote_code=True of Train or Rollout runs that") as refused:
        planned()
    assert "2 things" in str(refused.value)
    assert planned(trust_remote_code=True).plan.train.options == {"trust_remote_code": True}


def test_a_trusted_folder_is_loaded_trained_and_exported_with_its_python(own: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model of type 'own_llama', and .* trust_remote_code=True of Train"):
        load_policy(own, dtype="auto", device="cpu")

    cache = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, own, str(tmp_path / "out")],
        env=cache,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.stdout.split()[-1:] == ["OwnForCausalLM"], done.stderr


@pytest.mark.parametrize(
    ("kind", "way_out"), [("clip", "save its language model as a folder of its own"), ("no_such_type", "a newer one may")]
)  # fmt: skip
def test_a_model_that_transformers_does_not_have_is_one_line_with_a_way_out(
    tmp_path: Path, kind: str, way_out: str
) -> None:
    folder = Path(tiny_model(tmp_path / "model"))
    described = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(described | {"model_type": kind, "architectures": ["Other"]}))

    with pytest.raises(ConfigError, match=f"type '{kind}'.*{way_out}") as refused:
        load_policy(str(folder), dtype="auto", device="cpu")

    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 500
