"""With which options DeepSpeed is made in tests, and engines of two ranks."""

from __future__ import annotations

from typing import Any

from asyncflow_sdk.plugins import registry
from asyncflow_sdk.testing.kit.ranks import RankProcesses


def options(stage: int, **more: Any) -> dict[str, Any]:
    """Of the small models of tests every parameter is parted: DeepSpeed keeps those of less than 100,000 elements whole."""
    config: dict[str, Any] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    return {"stage": stage, "device": "cpu", "threads": 1, "learning_rate": 1e-3, "config": config} | more


def engine_of(**given: Any) -> Any:
    make: Any = registry().get("train", "deepspeed").load()
    return make(**given)


RANKS = RankProcesses(engine_of, 2)
"""Two processes, for all tests: each takes ten seconds to start."""
