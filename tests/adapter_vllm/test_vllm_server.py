"""vLLM behind its HTTP server keeps to the contract of rollout engines, and a server that cannot is refused with the reasons."""

from __future__ import annotations

from typing import Any

import one_vllm

from asyncflow_sdk.testing import Conformance
from asyncflow_sdk.testing.kit.conformance import checks_of

# The shared server is there after an engine that used it.
SHARED = [each.name for each in checks_of("rollout") if each.tier in ("basic", "full") and each.name != "closes"]
kit = Conformance("rollout", one_vllm.attached, only=SHARED, limit_s=240.0)


@kit.parametrize
def test_an_attached_engine_conforms(check: Any) -> None:
    check()
