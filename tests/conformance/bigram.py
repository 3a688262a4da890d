"""A softmax bigram: the smallest policy that learns, and a train engine of it in numpy that is right in every way.

A token's log-prob depends on the one before it: log softmax(table[before] + bias). The engine trains by GRPO with momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import ConfigError, EngineError, SchemaError, WeightMismatch
from asyncflow_sdk.interfaces import StepResult, TrainEngine, WeightUpdate
from asyncflow_sdk.testing import Policy
from asyncflow_sdk.types import Batch, Ragged, loss_mask
from asyncflow_sdk.types.batch import concat
from asyncflow_sdk.types.dtypes import carrier

VOCABULARY, CONTEXT = 24, 256


def log_softmax(tensors: Mapping[str, Any], before: Any) -> Any:
    """Of every token after each of ``before``: float64 (len(before), vocabulary)."""
    logits = tensors["table.weight"][before].astype(np.float64) + tensors["bias"]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclass(eq=False)
class BigramPolicy(Policy):
    """``folder``: "" for weights as they are; "float32" and "bfloat16": rounded to bfloat16 and stored so."""

    folder: str = ""
    vocabulary, context = VOCABULARY, CONTEXT

    def rounded(self, dtype: str) -> BigramPolicy:
        return BigramPolicy(dtype)

    def tensors(self, version: int) -> dict[str, Any]:
        random, shapes = np.random.default_rng([version, 7]), {"table.weight": (VOCABULARY,) * 2, "bias": VOCABULARY}
        tensors = {name: random.normal(0, 1, shape).astype(np.float32) for name, shape in shapes.items()}
        if version or not self.folder:
            return tensors
        return {name: a.astype(ml_dtypes.bfloat16).astype(carrier(self.folder)) for name, a in tensors.items()}

    def logprobs(self, version: int, prompt: Any, response: Any, temperature: float = 1.0) -> Any:
        return self.logprobs_of(self.tensors(version), prompt, response)

    def logprobs_of(self, tensors: Mapping[str, Any], prompt: Any, response: Any) -> Any:
        before = np.concatenate([prompt[-1:], response[:-1]])
        return log_softmax(tensors, before)[np.arange(len(response)), response]

    def greedy(self, version: int, prompt: Any, max_tokens: int) -> Any:
        raise NotImplementedError("no check of train engines asks for it")

    def read(self, folder: Path) -> dict[str, Any]:
        with np.load(folder / "model.npz") as file:  # numpy's files know no bfloat16: it comes as bytes
            return {name: file[name].view(array.dtype) for name, array in self.tensors(0).items()}


def write(folder: Path, tensors: Iterable[tuple[str, Any]]) -> None:
    """As a model folder."""
    folder.mkdir(parents=True)
    np.savez(folder / "model.npz", **dict(tensors))


class BigramTrain(TrainEngine):
    conformance_policy = "bigram:BigramPolicy"
    restores = streams = True

    def __init__(self, model: str, *, algorithm: Any, learning_rate: float = 1.0) -> None:
        if type(algorithm) is not GRPO:
            raise ConfigError(f"this engine trains by GRPO only, not by {algorithm!r}")
        self.algorithm, self.learning_rate = algorithm, learning_rate
        self.parts: list[Batch] | None = None
        first = BigramPolicy(model).tensors(0)
        self.dtypes = {name: array.dtype for name, array in first.items()}
        self.start_from(first.items())

    def start_from(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.weights = {name: array.astype(np.float32) for name, array in tensors}
        self.rest()

    def rest(self) -> None:
        self.speed = {name: np.zeros_like(array) for name, array in self.weights.items()}

    # ---- a step, in parts that wrong engines do otherwise

    def train_step(self, batch: Batch) -> StepResult:
        self.begin_step(0)
        self.accumulate(batch)
        return self.end_step()

    def begin_step(self, step: int) -> None:
        if self.parts is not None:
            raise EngineError("a step is open")
        self.parts = []

    def accumulate(self, batch: Batch) -> None:
        """Keep a copy: all is computed in the end."""
        if self.parts is None:
            raise EngineError("no step is open")
        try:
            self.check(batch)
        except Exception:
            self.abort_step()
            raise
        self.parts.append(batch.take(np.arange(batch.rows)))

    def end_step(self) -> StepResult:
        parts, self.parts = self.parts, None
        if not parts:
            raise EngineError("no step with rows is open")
        columns = {name: concat([part.columns[name] for part in parts]) for name in parts[0].columns}
        batch = Batch(np.concatenate([p.ids for p in parts]), np.concatenate([p.groups for p in parts]), columns)
        advantages, rewards = self.advantages(batch), batch.array("reward")
        self.descend(self.gradient(batch))
        reward, rows = self.summed(np.array([rewards.sum(), len(rewards)], np.float64))
        return StepResult({"reward": reward / rows}, None if advantages.all() else advantages == 0)

    def abort_step(self) -> None:
        self.parts = None

    def check(self, batch: Batch) -> None:
        self.check_tokens(batch)
        rewards, logprobs = batch.array("reward"), batch.ragged("logprobs")
        if not np.isfinite(rewards).all() or not np.isfinite(logprobs.values).all():
            raise SchemaError("a reward or a log-prob is not finite")
        if (logprobs.lengths != batch.ragged("response_ids").lengths).any():
            raise SchemaError("a response has not as many log-probs as tokens")

    def check_tokens(self, batch: Batch) -> None:
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        if not np.isin(np.concatenate([prompts.values, responses.values]), range(VOCABULARY)).all():
            raise SchemaError("a token is not in the vocabulary")
        if (prompts.lengths + responses.lengths > CONTEXT).any():
            raise SchemaError("a row is longer than the context")

    def advantages(self, batch: Batch) -> Any:
        return self.algorithm.advantages(batch)

    def gradient(self, batch: Batch) -> dict[str, Any]:
        """Of the mean loss of this rank's tokens, by weight; its sign is that of the reward."""
        responses, mask = batch.ragged("response_ids"), loss_mask(batch)
        each, scores = np.arange(len(responses.values)), log_softmax(self.weights, before(batch))
        worth = np.repeat(self.advantages(batch), responses.lengths)
        trained = (worth != 0) & (True if mask is None else mask.values)
        ratio = np.exp(scores[each, responses.values] - batch.ragged("logprobs").values)
        count = self.summed(np.array(trained.sum(), np.float64))
        coefficients = np.where(trained & ~self.beyond(ratio, worth), ratio * worth, 0.0) / max(count, 1.0)
        by_logit = -np.exp(scores) * coefficients[:, None]
        by_logit[each, responses.values] += coefficients
        table = np.zeros((VOCABULARY, VOCABULARY))
        np.add.at(table, before(batch), by_logit)
        return {"table.weight": table, "bias": by_logit.sum(0)}

    def beyond(self, ratio: Any, worth: Any) -> Any:
        """True for tokens that are clipped."""
        return np.where(worth > 0, ratio > 1 + self.algorithm.clip_high, ratio < 1 - self.algorithm.clip_low)

    def descend(self, gradient: dict[str, Any]) -> None:
        for name, array in self.weights.items():
            self.speed[name] = (0.9 * self.speed[name] + self.summed(gradient[name])).astype(np.float32)
            array += np.float32(self.learning_rate) * self.speed[name]

    def summed(self, array: Any) -> Any:
        """Over all ranks: there is one."""
        return array

    # ---- the rest of the interface

    def logprobs(self, batch: Batch) -> Ragged:
        self.check_tokens(batch)
        responses = batch.ragged("response_ids")
        scores = log_softmax(self.weights, before(batch))[np.arange(len(responses.values)), responses.values]
        return Ragged(scores.astype(np.float32), responses.offsets)

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        return [(name, array.astype(self.dtypes[name], copy=False)) for name, array in self.weights.items()]

    def save(self, path: Path) -> None:
        np.savez(path / "state.npz", **self.weights, **{f"speed/{name}": array for name, array in self.speed.items()})

    def load(self, path: Path) -> None:
        with np.load(path / "state.npz") as stored:
            self.start_from((name, stored[name]) for name in self.weights)
            self.speed = {name: stored[f"speed/{name}"] for name in self.weights}

    def load_weights(self, update: WeightUpdate) -> None:
        shapes = {name: array.shape for name, array in self.weights.items()}
        if {name: shape for name, (_, shape) in update.tensors.items()} != shapes:
            raise WeightMismatch(f"version {update.version} is no bigram's")
        self.start_from(update.arrays())

    def export(self, path: Path) -> None:
        write(path, BigramTrain.named_weights(self))


def before(batch: Batch) -> Any:
    """The token before each response token."""
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    tokens = np.roll(responses.values, 1)
    tokens[responses.offsets[:-1]] = prompts.values[prompts.offsets[1:] - 1]
    return tokens
