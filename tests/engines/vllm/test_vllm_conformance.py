"""vLLM keeps to the contract of rollout engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from one_vllm import OPTIONS

from asyncflow_sdk.testing import Conformance
from asyncflow_torch.families import family

kit = Conformance("rollout", "vllm", options=OPTIONS, limit_s=240.0)
chaos = Conformance("rollout", "vllm", options=OPTIONS, only=["killed"], limit_s=500.0)


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


@chaos.parametrize
def test_contract_where_replicas_are_killed(check: Any) -> None:
    check()


def test_experts_compute_with_the_loaded_version(tmp_path: Path) -> None:
    model = family("qwen3_moe", tmp_path)

    report = Conformance("rollout", "vllm", model=model, options=OPTIONS, limit_s=240.0, only=["update"]).run()

    assert [(each.outcome, each.detail) for each in report.results if each.outcome != "passed"] == []
