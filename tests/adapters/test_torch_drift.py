"""Engines that compute with other weights, or over other tokens, than the trainer's: the first step says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import asyncflow_sdk as af
from asyncflow_sdk.plugins import registry
from asyncflow_torch.families import family

TransformersEngine: Any = registry().get("rollout", "transformers").load()
TorchEngine: Any = registry().get("train", "torch").load()


class Packing(TorchEngine):  # type: ignore[misc]
    """Packs rows of any model into one sequence."""

    def __init__(self, model: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._packed = True


class DrawsWithEmbedding(TransformersEngine):  # type: ignore[misc]
    """Computes with the embedding in the place of an lm_head of its own."""

    async def load_weights(self, update: Any) -> set[str]:
        names = await super().load_weights(update)
        with torch.no_grad():
            self._model.lm_head.weight.copy_(self._model.get_input_embeddings().weight)
        return names


def scored(response: list[str]) -> list[float]:
    return [len(text) % 3 / 3 for text in response]


@pytest.mark.parametrize(
    ("name", "rollout", "train", "warns"),
    [
        ("gpt_oss", "transformers", "torch", False),
        ("gpt_oss", "transformers", Packing, True),
        ("llama", DrawsWithEmbedding, "torch", True),
    ],
)
def test_the_first_step_warns_of_log_probs_that_are_not_the_trainers(
    tmp_path: Path, warm: None, name: str, rollout: Any, train: Any, warns: bool
) -> None:
    model = family(name, tmp_path / "model")
    sampling = af.Sampling(max_tokens=8)

    result = af.Workflow(
        prompts=["abc", "cab", "hgb", "fdd"], reward=scored, batch_size=16, steps=1,
        rollout=af.Rollout(rollout, model=model, group_size=4, sampling=sampling),
        train=af.Train(train, model=model),
    ).run(tmp_path / "run")  # fmt: skip

    assert [
        text.startswith("the log-probs of rollout and trainer differ") and "in step 0" in text
        for text in result.summary["warnings"]
    ] == [True] * warns
