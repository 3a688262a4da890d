"""A train engine with one fault, made from the right one of a bigram.

Conformance("train", WrongTrain, options={"fault": "the other sign"})

Each ``match`` lists the faults of one method, by the name that selects them.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bigram import BigramTrain, Tokens, log_softmax, weights, write

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import StepResult, TrainEngine, WeightUpdate
from asyncflow_sdk.types import Batch, Ragged

ENDED = threading.Event()
"""Set by the test, in the end."""
LEFT: list[Any] = []
"""What engines left open."""


class WrongTrain(BigramTrain):
    def __init__(self, model: str, *, algorithm: Any, fault: str, lr: float = 1.0) -> None:
        super().__init__(model, algorithm=algorithm, lr=0.0 if fault == "never moves" else lr)
        self.fault, self._kept = fault, list[Any]()
        if fault == "says that it computes":
            self.computes = ("values",)
        if fault == "leaves descriptors":
            LEFT.append(open(os.devnull))  # noqa: SIM115

    # ---- a step

    def train_step(self, batch: Batch) -> StepResult:
        match self.fault:
            case "leaks":
                self._kept.append(np.ones(1 << 17))
            case "leaks descriptors":
                self._kept.append(open(os.devnull))  # noqa: SIM115
            case "leaves a thread" if not self._kept:
                self._kept.append(threading.Thread(target=ENDED.wait, name="prefetch"))
                self._kept[0].start()
            case "hangs":
                ENDED.wait(60)
            case "reports NaN":
                return StepResult({**super().train_step(batch).metrics, "kl": float("nan")})
        return super().train_step(batch)

    def check(self, batch: Batch) -> None:
        match self.fault:
            case "trains on NaN":
                return self.check_tokens(batch)
            case "raises whatever comes":
                batch.columns["reward"]
        try:
            super().check(batch)
        except SchemaError:
            self.weights["bias"][0] += np.float32(0.001 * (self.fault == "refuses half-way"))
            self.speed["bias"][0] += np.float32(0.1 * (self.fault == "keeps the gradient"))
            raise
        return None

    def check_tokens(self, batch: Batch) -> None:
        if self.fault != "clips tokens":
            super().check_tokens(batch)

    def tokens(self, batch: Batch) -> Tokens:
        tokens = super().tokens(batch)
        if self.fault == "clips tokens":  # one that is not in the vocabulary becomes the nearest that is
            top = len(self.weights["bias"]) - 1
            tokens.before, tokens.ids = tokens.before.clip(0, top), tokens.ids.clip(0, top)
        return tokens

    def advantages(self, batch: Batch) -> Any:
        match self.fault:
            case "the other sign":
                return -super().advantages(batch)
            case "rounds equal rewards":  # their mean is not quite them in float32: what is left is divided by itself
                reward, advantages = batch.array("reward"), np.zeros(batch.rows, np.float32)
                for group in np.unique(batch.groups):
                    own = batch.groups == group
                    mean = reward[own].sum(dtype=np.float32) / np.float32(own.sum())
                    centred = (reward[own] - mean).astype(np.float32)
                    advantages[own] = centred / (centred.std() + 1e-9)
                return advantages
            case "takes groups as they lie":
                _, sizes = np.unique(batch.groups, return_counts=True)
                batch = Batch(batch.ids, np.repeat(np.arange(len(sizes)), sizes), batch.columns)
            case "writes into the batch":
                advantages, stored = super().advantages(batch), batch.columns["reward"].values
                if stored.flags.writeable:
                    stored -= stored.mean()
                return advantages
        return super().advantages(batch)

    def filtered(self, advantages: Any) -> Any:
        return advantages <= 0 if self.fault == "filters what it trains" else super().filtered(advantages)

    def kept(self, batch: Batch, tokens: Tokens) -> Any:
        kept, offsets = super().kept(batch, tokens).copy(), batch.ragged("response_ids").offsets
        match self.fault:
            case "drops the last token":
                kept[offsets[1:] - 1] = False
            case "drops the first token":
                kept[offsets[:-1]] = False
            case "ignores the loss mask":
                kept[:] = True
            case "masks one too late":
                kept = np.roll(kept, 1)
                kept[offsets[:-1]] = True
        return kept

    def coefficients(self, batch: Batch, tokens: Tokens, advantages: Any) -> Any:
        right = super().coefficients(batch, tokens, advantages)
        if self.fault != "mean over rows":
            return right
        kept = np.bincount(tokens.rows, self.kept(batch, tokens), minlength=batch.rows)
        return right * kept.mean() / np.maximum(kept, 1)[tokens.rows]

    def behaviour(self, batch: Batch, tokens: Tokens) -> Any:
        """Recomputed: the log-probs from before the step are taken for those of the policy that drew the rows."""
        return self.scores(tokens) if self.fault == "recomputes behaviour" else super().behaviour(batch, tokens)

    def count(self, tokens: Tokens, kept: Any, advantages: Any) -> Any:
        lengths = np.bincount(tokens.rows)
        return lengths.max() * len(lengths) if self.fault == "mean over padding" else kept.sum()

    def descend(self, tokens: Tokens, coefficients: Any) -> None:
        match self.fault:
            case "trains padding":  # behind each row, token 0 as far as the longest row goes
                lengths = np.bincount(tokens.rows)
                short = np.repeat(np.arange(len(lengths)), lengths.max() - lengths)
                by_row = np.bincount(tokens.rows, coefficients) / lengths
                tokens.before = np.concatenate([tokens.before, tokens.ids[(np.cumsum(lengths) - 1)[short]]])
                tokens.ids = np.concatenate([tokens.ids, np.zeros(len(short), np.int32)])
                coefficients = np.concatenate([coefficients, by_row[short]])
            case "mean of micro-batches":
                second = tokens.rows >= tokens.rows[-1] // 2
                coefficients = coefficients / (2 * np.where(second, second.mean(), 1 - second.mean()))
            case "keeps old masters" if self._kept:
                self.weights = self._kept.pop()
        super().descend(tokens, coefficients)
        if self.fault == "steps in bfloat16":
            for name, array in self.weights.items():
                array[:] = array.astype(self.dtypes[name])

    # ---- what it reports

    def named_weights(self) -> Iterator[tuple[str, Any]]:
        room = np.empty(max(array.nbytes for array in self.weights.values()), np.uint8)
        for name, array in super().named_weights():
            match self.fault:
                case "publishes float32":
                    yield name, self.weights[name]
                case "keeps the wrapper's prefix":
                    yield f"module.{name}", array
                case "gathers into one buffer":
                    gathered = room[: array.nbytes].view(array.dtype).reshape(array.shape)
                    gathered[:] = array
                    yield name, gathered
                case _:
                    yield name, array
            if self.fault == "trains as it is read":
                self.speed[name] = np.float32(0.5) * self.speed[name]
        if self.fault == "gives tied weights twice":
            yield "head.weight", self.weights["table.weight"]

    def logprobs(self, batch: Batch) -> Ragged:
        right = super().logprobs(batch)
        match self.fault:
            case "caches log-probs":  # computes them from a copy of the weights, made once
                self._kept = self._kept or [{name: array.copy() for name, array in self.weights.items()}]
                tokens = self.tokens(batch)
                scores = log_softmax(self._kept[0], tokens.before)[np.arange(len(tokens.ids)), tokens.ids]
                return Ragged(scores.astype(np.float32), right.offsets)
            case "pads log-probs":
                return Ragged.of(list(right.padded()))
            case "log-probs of the token beside":
                return Ragged(np.roll(right.values, 1), right.offsets)
            case "log-probs by the longest row":
                drift = 0.01 * np.repeat(right.lengths.max() - right.lengths, right.lengths)
                return Ragged((right.values - drift).astype(np.float32), right.offsets)
        return right

    # ---- what it keeps

    def save(self, path: Path) -> Any:
        match self.fault:
            case "keeps the first save" if (path / "state.npz").exists():
                return None
            case "keeps its state in memory":  # as good as a checkpoint, until the process dies
                LEFT.append(copy.deepcopy((self.weights, self.speed)))
                return (path / "number").write_text(f"{os.getpid()} {len(LEFT) - 1}")
            case "writes down its folder":
                (path / "latest").write_text(str(path))
        return super().save(path)

    def load(self, path: Path) -> None:
        match self.fault:
            case "loads nothing":
                return
            case "starts anew without a checkpoint" if not (path / "state.npz").exists():
                return
            case "keeps its state in memory":
                pid, number = (path / "number").read_text().split()
                if pid != str(os.getpid()):
                    raise KeyError(pid)
                self.weights, self.speed = copy.deepcopy(LEFT[int(number)])
                return
            case "writes down its folder":
                path = Path((path / "latest").read_text())
        super().load(path)
        if self.fault == "forgets the optimizer":
            self.speed = {name: np.zeros_like(array) for name, array in self.weights.items()}

    def load_weights(self, update: WeightUpdate) -> None:
        before, speed = self.weights, self.speed
        with contextlib.suppress(*([Exception] if self.fault == "loads whatever comes" else [])):
            super().load_weights(update)
        match self.fault:
            case "loads half":
                self.weights |= dict(list(before.items())[len(before) // 2 :])
            case "keeps old masters":  # until the next step
                self._kept.append(before)
            case "keeps its momentum":
                self.speed = speed
            case "keeps the update's memory":
                self.weights = dict(update.arrays())
            case "loads whatever comes":
                fits = {n: a for n, a in update.arrays() if n in before and a.shape == before[n].shape}
                self.weights = before | {name: array.astype(np.float32) for name, array in fits.items()}

    def export(self, path: Path) -> None:
        match self.fault:
            case "cannot export":
                TrainEngine.export(self, path)
            case "exports float32":
                write(path, self.weights)
            case "exports half precision":
                write(path, {n: a.astype(np.float16).astype(np.float32) for n, a in self.weights.items()})
            case "exports what it began with":
                write(path, weights(0))
            case _:
                super().export(path)


class TakesAnyOption(BigramTrain):
    """A misspelt `learning_rate` is no error."""

    def __init__(self, model: str, *, algorithm: Any, lr: float = 1.0, **more: Any) -> None:
        super().__init__(model, lr=lr, algorithm=algorithm)


class IgnoresTheAlgorithm(BigramTrain):
    def __init__(self, model: str, *, algorithm: Any) -> None:
        from asyncflow_sdk.algorithms import GRPO

        super().__init__(model, algorithm=algorithm if type(algorithm) is GRPO else GRPO())


class NeverAwaited(BigramTrain):
    async def save(self, path: Path) -> None:  # type: ignore[override]
        super().save(path)
