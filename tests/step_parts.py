"""A step trained whole and in parts, the gradient of each, and algorithms for ranks, some of which fail:
by gradients that are not finite, or in the middle of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.torch import load_file

import asyncflow_sdk as af
from asyncflow_sdk.algorithms import GRPO, PPO
from asyncflow_sdk.interfaces import PackedTokens, StepResult
from asyncflow_sdk.types import Batch, Ragged

INFINITE = float("inf")
STEP = 9
"""The number of the step: rows of it were drawn by versions 7 and 10."""


@dataclass(frozen=True)
class OfGroups(af.Algorithm):
    """A user's own: a mean over groups, and metrics of each kind. ``factor``: of the advantages."""

    factor: float = 1.0
    normaliser = "groups"
    metric_normalisers = MappingProxyType({"per_row": "rows", "per_group": "groups", "rows": "constant"})

    def advantages(self, batch: Batch) -> Any:
        return (batch.array("reward") - 0.25) * self.factor

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        gain = (tokens.logprobs - tokens.behaviour).clamp(-20, 20).exp() * tokens.advantages
        loss = -gain.sum() / tokens.total_groups
        each = gain.detach().sum()
        metrics = {"per_token": each / tokens.total_tokens, "per_row": each / tokens.total_rows}
        return loss, metrics | {"per_group": each / tokens.total_groups, "rows": float(tokens.row_count)}


@dataclass(frozen=True)
class OfConstant(OfGroups):
    normaliser = "constant"

    def loss(self, tokens: af.PackedTokens) -> tuple[Any, dict[str, Any]]:
        gain = (tokens.logprobs - tokens.behaviour).clamp(-20, 20).exp() * tokens.advantages
        return -gain.sum() / 100, {}


@dataclass(frozen=True, kw_only=True)
class Faulty(GRPO):
    """At these ``calls`` of its loss, counted from 1, the gradient is infinite, or the loss ``raises``; and wherever a row has an advantage
    ``above`` a number, which is so on one of several ranks."""

    normaliser = "tokens"
    calls: tuple[int, ...] = ()
    above: float = INFINITE
    raises: bool = False
    more: set[int] = field(default_factory=set, compare=False)
    made: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        self.made.append(len(self.made) + 1)
        loss, metrics = super().loss(tokens)
        fails = self.made[-1] in {*self.calls, *self.more} or bool(tokens.advantages.max() > self.above)
        if fails and self.raises:
            raise KeyError("told to fail")
        return loss * (INFINITE if fails else 1.0), metrics


@dataclass(frozen=True, kw_only=True)
class FaultyPPO(PPO):
    """At these ``calls``, or at all, the gradient of the "policy" or of the "critic" alone is infinite."""

    infinite: str = "critic"
    calls: tuple[int, ...] = (1,)
    made: list[int] = field(default_factory=list, compare=False)

    def loss(self, tokens: PackedTokens) -> tuple[Any, dict[str, Any]]:
        self.made.append(len(self.made) + 1)
        loss, metrics = super().loss(tokens)
        given = tokens.logprobs if self.infinite == "policy" else tokens.values
        if not self.calls or self.made[-1] in self.calls:
            loss = loss + (given - given.detach()).sum() * INFINITE
        return loss, metrics


def step_rows(batch: Batch) -> Batch:
    """Rows of a step that older weights drew, with a reference's log-probs; a third of the tokens was observed."""
    random, logprobs = np.random.default_rng(2), batch.ragged("logprobs")
    count, lengths = len(logprobs.values), logprobs.lengths
    drawn = random.random(count) < 0.7
    drawn[logprobs.offsets[:-1]] = True
    spans = [np.array([[7, 0, 1], [10, 1, n]] if n > 1 else [[10, 0, 1]], np.int64) for n in lengths]
    near, far = (logprobs.values + random.normal(0, 0.2, (2, count))).astype(np.float32)
    columns = {"logprobs": Ragged(near, logprobs.offsets), "ref_logprobs": Ragged(far, logprobs.offsets)}
    columns |= {"loss_mask": Ragged(drawn, logprobs.offsets), "version_spans": Ragged.of(spans)}
    return of_step(Batch.of({name: batch[name] for name in batch} | columns, groups=batch.groups))


def of_step(batch: Batch) -> Batch:
    """The same rows, as rows of a step of a run."""
    batch.version_step_offsets = ((0, 0), (8, 2))
    batch.index = STEP  # type: ignore[attr-defined]
    return batch


def groups_of(batch: Batch, groups: Sequence[int]) -> Batch:
    """Some groups of a step, one after the other."""
    rows = [np.flatnonzero(batch.groups == group) for group in groups]
    return of_step(batch.take(np.concatenate([*rows, np.zeros(0, np.int64)]).astype(np.int64)))


def in_parts(engine: Any, batch: Batch, parts: Sequence[Sequence[int]]) -> StepResult:
    engine.begin_step(STEP)
    for groups in parts:
        engine.accumulate(groups_of(batch, groups))
    result: StepResult = engine.end_step()
    return result


def state(engine: Any, path: Path) -> dict[str, Any]:
    """Weights, optimizer and random state, the critic's too, as arrays by name."""
    engine.save(path)
    return {
        f"{file.relative_to(path)}/{name}": tensor.double().numpy()
        for file in sorted(path.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def gradients(saved: dict[str, Any]) -> Any:
    """The clipped gradients of the first step of all models: Adam's first moments are a tenth of them."""
    return np.concatenate([array.ravel() for name, array in sorted(saved.items()) if "/exp_avg/" in name]) / 0.1


def weights(saved: dict[str, Any]) -> Any:
    return np.concatenate([array.ravel() for name, array in sorted(saved.items()) if "weights.safetensors/" in name])


def apart(one: Any, other: Any) -> float:
    """The distance, as a part of the size."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))
