"""CTranslate2 keeps to the contract, alone and in a run with a trainer that knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import asyncflow_sdk as af
from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.types.events import Loaded
from asyncflow_torch.reference import tiny_model

kit = Conformance("rollout", "ctranslate2", options={"intra_threads": 1})


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


@pytest.mark.starts("rollout ctranslate2")
def test_a_run_in_which_it_generates_and_torch_trains(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", ends=True)
    events: list[Any] = []
    probe = af.Probe(((5, 6, 7), (8, 9)), ((10, 11, 12), (13, 14)))
    workflow = af.Workflow(
        prompts={"prompt_ids": af.Ragged.of([[5, 6, 7], [8, 9], [10, 11, 12, 13]])},
        rollout=af.Rollout(
            "ctranslate2", model=model, group_size=4, prompt="prompt_ids", intra_threads=1,
            sampling=af.Sampling(max_tokens=8),
        ),
        reward=lambda response_ids: [float(sum(token > 20 for token in row)) / len(row) for row in response_ids],
        train=af.Train("torch", model=model, learning_rate=3e-3, threads=1),
        batch_size=12, steps=6, staleness=af.Staleness(max_staleness=1),
        weights=af.Weights(probe=probe, verify=["probe"]),
    )  # fmt: skip

    result = workflow.run(tmp_path / "run", on_event=events.append)

    assert result.summary["balanced"]
    assert result.summary["steps"] == 6
    assert max(event.version for event in events if isinstance(event, Loaded)) >= 3  # each proven by its log-probs
