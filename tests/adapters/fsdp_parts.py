"""Engines that tests of FSDP have in their ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rank_runs import count_giving, hold
from torch.distributed.fsdp import FSDPModule

from asyncflow_sdk.plugins import registry

FsdpEngine: Any = registry().get("train", "fsdp").load()


class Counting(FsdpEngine):  # type: ignore[misc]
    """`export` only counts. The metrics of a step say how many modules are in shards of their own."""

    def export(self, path: Path) -> None:
        count_giving(self, path)

    def train_step(self, batch: Any) -> Any:
        wrapped: set[int] = set()
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: wrapped.add(id(module)) if isinstance(module, FSDPModule) else None
        )
        result = super().train_step(batch)
        hook.remove()
        return replace(result, metrics={**result.metrics, "wrapped": float(len(wrapped))})


class Held(FsdpEngine):  # type: ignore[misc]
    """Of which a rank may wait in a backward pass."""

    def __init__(self, model: str, *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        hold(self, gates)
