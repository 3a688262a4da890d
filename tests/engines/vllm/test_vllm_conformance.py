"""vLLM keeps to the contract of rollout engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_vllm import OPTIONS

from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import checks_of
from asyncflow_sdk.testing.kit.rollout import chaos
from asyncflow_torch.families import family

# All of one engine; a check that closes it comes by itself.
OF_ONE = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") and each.name != "closes"]
kit = Conformance("rollout", "vllm", options=OPTIONS, only=[*OF_ONE, "killed"], limit_s=500.0)
closing = Conformance("rollout", "vllm", options=OPTIONS, only=["closes"], limit_s=240.0)


@kit.parametrize
def test_contract(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "KILLED_AT", {2: 0, 4: 1})  # each replica once
    check()


@closing.parametrize
def test_an_engine_that_is_closed_leaves_nothing(check: Any) -> None:
    check()


def test_experts_compute_with_the_loaded_version(tmp_path: Path) -> None:
    model = family("qwen3_moe", tmp_path)

    report = Conformance("rollout", "vllm", model=model, options=OPTIONS, limit_s=240.0, only=["update"]).run()

    assert [(each.outcome, each.detail) for each in report.results if each.outcome != "passed"] == []
