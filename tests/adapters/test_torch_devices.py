"""Devices: what "auto" is, and which GPU a rank takes. No GPU is needed: torch's answers about them are replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncflow_sdk.errors import ConfigError
from asyncflow_torch import devices, policy
from asyncflow_torch.rollout import TransformersEngine
from asyncflow_torch.train import TorchEngine


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A torch that says it can use two GPUs. Returns the list of devices that are made current."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return current


def test_auto_is_the_first_gpu_and_for_a_rank_its_own(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.local_device("auto") == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert devices.local_device("auto") == devices.local_device("cuda") == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "2")  # a launcher that shows each rank fewer GPUs than there are ranks
    assert devices.local_device("auto") == "cuda:0"
    assert two_gpus == ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]


def test_a_device_that_is_named_is_taken_as_it_is(two_gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [devices.local_device(name) for name in ("cpu", "cuda:0", "meta")] == ["cpu", "cuda:0", "meta"]
    assert not two_gpus


def test_auto_is_the_cpu_where_torch_can_use_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.device_of("auto") == torch.device("cpu")


@pytest.mark.parametrize("name", ["nonsense", "float32", "nn"])
def test_what_is_no_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' cannot be used here"):
        devices.device_of(name)


@pytest.mark.parametrize("make", [TransformersEngine, TorchEngine])
def test_an_engine_takes_a_gpu_unless_told_otherwise(
    make: Callable[..., Any], tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given engines that stop where they look for their device
    def stop(name: str) -> Any:
        raise LookupError(name)

    monkeypatch.setattr(policy, "device_of", stop)

    # when, then
    with pytest.raises(LookupError, match="^auto$"):
        make(tiny)
    with pytest.raises(LookupError, match="^cpu$"):
        make(tiny, device="cpu")
