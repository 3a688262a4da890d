"""vLLM keeps to the contract of rollout engines."""

from __future__ import annotations

from typing import Any

from one_vllm import OPTIONS

from asyncflow_sdk.testing import Conformance

kit = Conformance("rollout", "vllm", options=OPTIONS, limit_s=240.0)
chaos = Conformance("rollout", "vllm", options=OPTIONS, only=["killed"], limit_s=500.0)


@kit.parametrize
def test_contract(check: Any) -> None:
    check()


@chaos.parametrize
def test_contract_where_replicas_are_killed(check: Any) -> None:
    check()
