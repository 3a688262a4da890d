"""What an adapter declares of a rollout engine, for a run that is checked where the engine is not, is what the engine says itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncflow_sdk.plugins import registry


def test_the_engine_on_transformers_can_what_its_adapter_declares(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from asyncflow_torch.reference import tiny_model
    from asyncflow_torch.rollout import TransformersEngine

    engine = TransformersEngine(tiny_model(tmp_path))
    asyncio.run(engine.close())

    declared, has = registry().get("rollout", "transformers").spec, engine.capabilities
    assert set(declared.said("swap") or ()) == has.swap
    assert set(declared.said("has") or ()) == {
        flag for flag in ("token_versions", "logprobs", "held_weights") if getattr(has, flag)
    }
