"""Accelerate passes the conformance kit, and trains in a run with an engine that knows nothing of
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import asyncflow_sdk as af
from asyncflow_accelerate.engine import AccelerateEngine
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types.events import Event, StepTrained
from asyncflow_torch.reference import tiny_model
from asyncflow_torch.train import TorchEngine

kit = Conformance("train", "accelerate", options={"learning_rate": 1e-3, "device": "cpu", "micro_batch_tokens": 60})


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


def weights_of(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.timeout(400)
@pytest.mark.starts("train accelerate")
def test_a_run_with_another_rollout_engine_and_the_options_of_torch(tmp_path: Path) -> None:
    model, events = tiny_model(tmp_path / "model", ends=True), list[Event]()
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "transformers", model=model, group_size=4, prompt="prompt_ids", dtype="bfloat16", launcher="thread",
            sampling=af.Sampling(max_tokens=8),
        ),
        reward=lambda response_ids: [float(sum(token > 20 for token in row)) / len(row) for row in response_ids],
        train=af.Train(
            "accelerate", model=model, learning_rate=4e-3, device="cpu", dtype="bfloat16", lr_scheduler_type="linear",
            warmup_steps=2, weight_decay=0.01, max_grad_norm=0.5, gradient_checkpointing=True,
        ),
        weights=af.Weights(transport="file", options={"path": str(tmp_path / "versions")}),
        batch_size=12, steps=6, save_steps=3, save_total_limit=1, staleness=af.Staleness(max_staleness=1),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run", on_event=events.append)

    assert result.summary["balanced"]
    rates = [event.metrics["learning_rate"] for event in events if isinstance(event, StepTrained)]
    assert rates == pytest.approx([2e-3, 4e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    (folder,) = (tmp_path / "run" / "models").iterdir()
    assert folder.name == "step-000006"
    assert {"config.json", "generation_config.json"} <= {file.name for file in folder.iterdir()}
    version = max(path for path in (tmp_path / "versions").iterdir() if path.is_dir())
    published = weights_of(version)
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    assert same(published, weights_of(folder))
    assert same(published, weights_of(tmp_path / "run" / "model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in published.items())


def test_it_continues_from_a_checkpoint_of_torch_and_torch_from_its_own(tmp_path: Path) -> None:
    first, second = (tiny_model(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    engines = [make(second, device="cpu") for make in (AccelerateEngine, TorchEngine)]
    saving = TorchEngine(first, device="cpu")
    for number, (saves, loads) in enumerate(zip([saving, *engines], engines, strict=False)):
        saves.save(tmp_path / f"state-{number}")
        loads.load(tmp_path / f"state-{number}")

    assert all(same(dict(saving.named_weights()), dict(each.named_weights())) for each in engines)
    for each in (saving, *engines):
        each.close()


def test_a_folder_in_two_dtypes_is_published_and_exported_as_it_is_and_its_frozen_part_is_not_trained(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "model", dtype="bfloat16")
    given = {
        name: tensor.float() * 1.0001 if "norm" in name else tensor
        for name, tensor in weights_of(Path(model)).items()
    }
    save_file(given, Path(model, "model.safetensors"), metadata={"format": "pt"})
    kept = {name: tensor for name, tensor in given.items() if ".layers.0." not in name}

    engine = AccelerateEngine(model, device="cpu", learning_rate=1e-2, freeze=["*.layers.0.*"])

    assert same(dict(engine.named_weights()), kept)
    assert {*engine.untrained} == given.keys() - kept.keys()
    ids = [[5, 6], [5, 6]]
    engine.train_step(
        af.Batch.of(
            {
                "prompt_ids": ids,
                "response_ids": [[7, 8], [9]],
                "logprobs": [[-1.0, -1.0], [-1.0]],
                "reward": [0.0, 1.0],
            },
            groups=[0, 0],
        )
    )
    trained = {name: tensor.clone() for name, tensor in engine.named_weights()}
    assert not any(torch.equal(trained[name], kept[name]) for name in kept)
    engine.export(tmp_path / "out")
    assert same(weights_of(tmp_path / "out"), {**given, **trained})
    engine.close()
