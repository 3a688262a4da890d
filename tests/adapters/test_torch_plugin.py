"""The plugin: found through its entry point, light until an engine is made, and true of its engine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from asyncflow_sdk.plugins import registry


def test_all_are_found_and_load() -> None:
    for kind, name, factory in (
        ("rollout", "transformers", "TransformersEngine"),
        ("train", "torch", "TorchEngine"),
        ("transport", "dist", "DistTransport"),
        ("transport", "cuda-ipc", "CudaTransport"),
    ):
        adapter = registry().get(kind, name)  # type: ignore[arg-type]
        assert adapter.missing == []
        assert adapter.install_command == "pip install 'asyncflow-sdk[torch]'"
        assert adapter.load().__name__ == factory  # type: ignore[attr-defined]


def test_listing_the_plugin_and_the_demo_task_import_no_torch() -> None:
    code = (
        "import sys, asyncflow_torch.plugin as p, asyncflow_torch.demo.task as t;"
        "assert len(p.asyncflow_adapters()) == 4 and t.prompts(1, 0);"
        "heavy = {'torch', 'transformers', 'numpy'} & sys.modules.keys(); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)


def test_the_engine_on_transformers_can_what_its_adapter_declares(tiny: str, rollout: Any) -> None:
    declared, has = registry().get("rollout", "transformers").spec, rollout(tiny).capabilities
    assert set(declared.declared("swap") or ()) == has.swap
    assert set(declared.declared("has") or ()) == {
        flag
        for flag in ("token_versions", "logprobs", "held_weights", "stop_texts", "sampling_mask")
        if getattr(has, flag)
    }


@pytest.mark.parametrize("name", ["torch", "fsdp"])
def test_train_engines_take_steps_in_parts_as_their_adapters_declare(name: str) -> None:
    adapter = registry().get("train", name)
    assert ("parts" in (adapter.spec.declared("steps") or ())) is adapter.load().streams  # type: ignore[attr-defined]
