"""Devices: which GPU an engine takes. No GPU is needed: torch's answers about them are replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.plugins import registry

ENGINES: list[Any] = [registry().get("rollout", "transformers").load(), registry().get("train", "torch").load()]


@pytest.mark.parametrize("make", ENGINES)
def test_a_gpu_is_taken_unless_another_device_is_named_and_by_a_rank_its_own(
    make: Any, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a torch that says it can use two GPUs, and cannot
    current: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def taken(**options: str) -> list[str]:
        current.clear()
        with pytest.raises(ConfigError, match="cannot be used here"):
            make(tiny, **options)
        return sorted(set(current))

    assert taken() == taken(device="auto") == ["cuda:0"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert taken() == taken(device="cuda") == ["cuda:1"]
    assert taken(device="cuda:0") == []
    monkeypatch.setenv("LOCAL_RANK", "2")  # a launcher that shows each rank fewer GPUs than there are ranks
    assert taken() == ["cuda:0"]
    make(tiny, device="cpu")
    assert current == ["cuda:0"] * len(current)


@pytest.mark.parametrize("name", ["nonsense", "float32", "nn"])
def test_what_is_no_device_is_refused_by_name(name: str, tiny: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' cannot be used here"):
        ENGINES[0](tiny, device=name)


def test_auto_is_the_cpu_where_torch_can_use_no_gpu(rollout: Any, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {tensor.device.type for _, tensor in rollout(tiny).held_weights()} == {"cpu"}
