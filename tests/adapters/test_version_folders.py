"""A version's directory of transport ``file`` is a Hugging Face model folder, however many ranks wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_runs import odd_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

import asyncflow_sdk as af


@pytest.mark.parametrize(("engine", "ranks"), [("torch", {}), ("fsdp", {"world_size": 2})], ids=["torch", "fsdp-2"])
def test_a_version_is_loaded_by_transformers(engine: str, ranks: dict[str, int], tiny: str, tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    workflow = af.Workflow(
        prompts={"prompt_ids": [[3 + n, 4 + n, 14] for n in range(8)]},
        rollout=af.Rollout(
            "transformers", model=tiny, prompt="prompt_ids", group_size=4, sampling=af.Sampling(max_tokens=6), threads=1
        ),
        reward=odd_tokens, train=af.Train(engine, model=tiny, lr=1e-2, threads=1, **ranks), batch_size=16, steps=2,
        weights=af.Weights(transport="file", options={"path": str(versions)}),
    )  # fmt: skip

    workflow.run(tmp_path / "run")

    newest = versions / "version-00000002"
    assert sorted(each.name for each in versions.iterdir() if each.is_dir()) == ["version-00000001", newest.name]
    loaded, exported = (AutoModelForCausalLM.from_pretrained(each) for each in (newest, tmp_path / "run" / "model"))
    assert loaded.state_dict().keys() == exported.state_dict().keys()
    for name, wanted in exported.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], wanted), name
    ids = [5, 9, 12]
    assert AutoTokenizer.from_pretrained(newest).decode(ids) == AutoTokenizer.from_pretrained(tiny).decode(ids)
    with torch.no_grad():
        logits = loaded(input_ids=torch.tensor([ids])).logits
    assert torch.isfinite(logits).all()
