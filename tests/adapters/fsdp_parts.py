"""Engines and algorithms that tests of FSDP have in their ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rank_runs import hold
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import PackedTokens
from asyncflow_sdk.plugins import registry
from asyncflow_sdk.types import Shard

FsdpEngine: Any = registry().get("train", "fsdp").load()


def peak_bytes(prof: Any) -> int:
    """The most memory that torch had beyond that of the beginning."""
    held = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class Counting(FsdpEngine):  # type: ignore[misc]
    """`export` notes into the folder what each way of giving weights away takes, and whether ranks were asked. The metrics of a step
    say how many modules are in shards of their own."""

    def export(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        said: dict[str, Any] = {"given": 0}

        def give() -> None:
            for _, tensor in self.named_weights():
                piece = tensor.tensor if isinstance(tensor, Shard) else tensor
                said["given"] += piece.numel() * piece.element_size()
                del tensor, piece  # as a publisher does

        for name, call in (
            ("named_weights", give),
            ("export", lambda: super(Counting, self).export(path / "model")),
            ("save", lambda: self.save(path / "state")),
            ("load", lambda: self.load(path / "state")),
        ):
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                call()
            collectives = [e.key for e in prof.key_averages() if "gloo" in e.key or "c10d" in e.key]
            said[name] = {"peak": peak_bytes(prof), "collectives": collectives}
        (path / f"{os.environ['RANK']}.json").write_text(json.dumps(said))

    def train_step(self, batch: Any) -> Any:
        wrapped: set[int] = set()
        hook = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, _: wrapped.add(id(module)) if isinstance(module, FSDPModule) else None
        )
        result = super().train_step(batch)
        hook.remove()
        return replace(result, metrics={**result.metrics, "wrapped": float(len(wrapped))})


@dataclass(frozen=True, kw_only=True)
class Infinite(GRPO):
    """Its gradient is not finite on ranks that have a row of the highest reward, or it ``raises`` there."""

    raises: bool = False

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        if self.raises and tokens.advantages.max() > 1.4:
            raise KeyError("a column that is not there")
        return loss * torch.where(tokens.advantages.max() > 1.4, float("inf"), 1.0), metrics


class Held(FsdpEngine):  # type: ignore[misc]
    """Of which a rank may wait in a backward pass."""

    def __init__(self, model: str, *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        hold(self, gates)
