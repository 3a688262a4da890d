"""Engines and algorithms that tests of FSDP have in their ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rank_runs import hold
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from asyncflow_fsdp.engine import FsdpEngine
from asyncflow_fsdp.shards import local
from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import PackedTokens
from asyncflow_sdk.types import Shard


def peak_bytes(prof: Any) -> int:
    """The most that torch had more than at the beginning, of all memory that it has got and given back since."""
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class Counting(FsdpEngine):
    """`export` does nothing but note into the folder what each way of giving weights away takes, and whether ranks were asked."""

    def export(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        said: dict[str, Any] = {"shards": sum(self._local(p) for p in self._model.parameters())}
        said["largest"] = max(p.numel() * p.element_size() for p in self._model.parameters())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            given = 0
            for _, tensor in self.named_weights():
                piece = tensor.tensor if isinstance(tensor, Shard) else tensor
                given += piece.numel() * piece.element_size()
                del tensor, piece  # as a publisher does
        said |= {"given": given, "named_weights": peak_bytes(prof), "asked": self._collectives(prof)}
        for name, call in (("export", super().export), ("save", self.save), ("load", self.load)):
            place = path / ("model" if name == "export" else "state")
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                call(place)
            said[name] = peak_bytes(prof)
        said["agreed"] = self._collectives(prof)
        (path / f"{self._ranks.rank}.json").write_text(json.dumps(said))

    def _local(self, parameter: Any) -> int:
        mine = local(parameter, self._ranks.rank)
        return 0 if mine is None else mine.tensor.numel() * mine.tensor.element_size()

    @staticmethod
    def _collectives(prof: Any) -> list[str]:
        return [e.key for e in prof.key_averages() if "gloo" in e.key or "c10d" in e.key]


class DiesInStep(FsdpEngine):
    """Rank 1 ends in its backward pass. The others write down what they then raise."""

    def __init__(self, model: str, *, notes: str, **options: Any) -> None:
        super().__init__(model, **options)
        self._notes = Path(notes)

    def train_step(self, batch: Any) -> Any:
        try:
            return super().train_step(batch)
        except Exception as error:
            (self._notes / f"{self._ranks.rank}.txt").write_text(f"{type(error).__name__}: {error}")
            raise

    def backward(self, loss: Any, *, last: bool) -> None:
        if self._ranks.rank == 1:
            os._exit(7)
        super().backward(loss, last=last)


class Wrapped(FsdpEngine):
    """Its metrics say how many modules are in shards of their own."""

    def optimizer_step(self) -> dict[str, float]:
        wrapped = sum(isinstance(module, FSDPModule) for module in self._model.modules())
        return super().optimizer_step() | {"wrapped": float(wrapped)}


@dataclass(frozen=True, kw_only=True)
class Infinite(GRPO):
    """Its gradient is not finite on ranks that have a row of the highest reward."""

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        loss, metrics = super().loss(tokens)
        return loss * torch.where(tokens.advantages.max() > 1.4, float("inf"), 1.0), metrics


@dataclass(frozen=True, kw_only=True)
class FailsOnce(GRPO):
    """Raises in the middle of a step, on ranks that have a row of the highest reward."""

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        if tokens.advantages.max() > 1.4:
            raise KeyError("a column that is not there")
        return super().loss(tokens)


class Held(FsdpEngine):
    """Of which a rank may wait in a backward pass."""

    def __init__(self, model: str, *, gates: str, **options: Any) -> None:
        super().__init__(model, **options)
        hold(self, gates)
