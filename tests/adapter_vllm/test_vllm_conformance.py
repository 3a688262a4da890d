"""vLLM keeps to the contract of rollout engines."""

from __future__ import annotations

from typing import Any

from asyncflow_sdk.testing import Conformance

OPTIONS = {"dtype": "float32", "max_rows": 32, "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
kit = Conformance("rollout", "vllm", options=OPTIONS, limit_s=240.0)


@kit.parametrize
def test_contract(check: Any) -> None:
    check()
