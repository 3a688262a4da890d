"""A train engine with one fault, made from the right one of a bigram.

Conformance("train", WrongTrain, options={"fault": "the other sign"})
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from bigram import VOCABULARY, BigramTrain, Part, Tokens, write
from faults import Fault, before, event, leave_descriptor, leave_thread, replace_methods

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import StepResult, TrainEngine
from asyncflow_sdk.types import Batch, Ragged

SAVED: dict[str, Any] = {}
"""What engines saved in memory."""


class WrongTrain(BigramTrain):
    def __init__(self, model: str, *, algorithm: Any, fault: str, learning_rate: float = 1.0, **more: Any) -> None:
        if more and fault != "takes any option":
            raise TypeError(f"no such options: {more}")
        super().__init__(
            model, algorithm=GRPO() if fault == "ignores the algorithm" else algorithm, learning_rate=learning_rate
        )
        self.held: list[Any] = []
        replace_methods(self, FAULTS.get(fault, {}))
        self.made()

    def made(self) -> None:
        """A fault does here what it does once."""


def change_when_refusing(name: str) -> Fault:
    """Change weights, or the optimizer's state, by a batch that is refused."""

    def check(self: WrongTrain, right: Any, batch: Batch) -> None:
        try:
            right(batch)
        except SchemaError:
            getattr(self, name)["bias"][0] += np.float32(0.1)
            raise

    return {"check": check}


def gather(self: WrongTrain, right: Any) -> Any:
    """Give each tensor in the same memory."""
    room = np.empty(VOCABULARY**2, np.float32)
    for name, array in right():
        gathered = room[: array.size].reshape(array.shape)
        gathered[:] = array
        yield name, gathered


def round_weights(self: WrongTrain, right: Any, *args: Any) -> None:
    right(*args)
    self.weights = {name: a.astype(self.dtypes[name]).astype(np.float32) for name, a in self.weights.items()}


def keep_bias(self: WrongTrain, right: Any, update: Any) -> None:
    bias = self.weights["bias"]
    right(update)
    self.weights["bias"] = bias


def save_in_memory(self: WrongTrain, right: Any, path: Path) -> None:
    """As good as a checkpoint, until the process dies."""
    key = f"{os.getpid()} {len(SAVED)}"
    SAVED[key] = copy.deepcopy((self.weights, self.speed))
    (path / "key").write_text(key)


def load_from_memory(self: WrongTrain, right: Any, path: Path) -> None:
    self.weights, self.speed = copy.deepcopy(SAVED[(path / "key").read_text()])


async def never_awaited(self: WrongTrain, right: Any, path: Path) -> None:
    right(path)


FAULTS: dict[str, Fault] = {
    "never moves": {"made": lambda self, _: setattr(self, "learning_rate", 0.0)},
    "says that it computes": {"made": lambda self, _: setattr(self, "computes", ("values",))},
    "leaves descriptors": {"made": lambda *_: leave_descriptor()},
    "leaves a thread": {"made": lambda *_: leave_thread(name="prefetch")},
    # ---- a step
    "leaks": {"train_step": before(lambda self, _: self.held.append(np.ones(1 << 17)))},
    "leaks descriptors": {"train_step": before(lambda *_: leave_descriptor())},
    "hangs": {"tokens": before(lambda *_: event().wait(60))},
    "reports NaN": {"train_step": lambda self, right, batch: StepResult({**right(batch).metrics, "kl": np.nan})},
    "trains on NaN": {"check": lambda self, right, batch: self.check_tokens(batch)},
    "clips tokens": {  # one that is not in the vocabulary becomes the nearest that is
        "check_tokens": lambda *_: None,
        "tokens": lambda self, right, batch: Tokens(
            (got := right(batch)).before.clip(0, VOCABULARY - 1), got.ids.clip(0, VOCABULARY - 1), got.rows
        ),
    },
    "raises whatever comes": {"check": before(lambda self, batch: batch.columns["reward"])},
    "refuses half-way": change_when_refusing("weights"),
    "keeps the gradient": change_when_refusing("speed"),
    "the other sign": {"advantages": lambda self, right, batch: -right(batch)},
    "trains equal rewards": {"advantages": lambda self, right, batch: np.where(a := right(batch), a, np.float32(1))},
    "takes groups as they lie": {"advantages": lambda self, right, batch: right(
        Batch(batch.ids, np.sort(batch.groups), batch.columns)
    )},
    "writes into the batch": {"filtered": lambda self, right, advantages: None, "advantages": before(
        lambda self, batch: np.negative(rewards := batch.columns["reward"].values, out=rewards)
    )},
    "filters what it trains": {"filtered": lambda self, right, advantages: advantages <= 0},
    "drops the first token": {"kept": lambda self, right, batch, tokens: np.diff(tokens.rows, prepend=-1) == 0},
    "drops the last token": {"kept": lambda self, right, batch, tokens: (  # of responses of several
        np.diff(tokens.rows, append=-1) == 0) | (np.bincount(tokens.rows)[tokens.rows] == 1
    )},
    "ignores the loss mask": {"kept": lambda self, right, batch, tokens: np.ones(len(tokens.ids), bool)},
    "mean over rows": {"coefficients": lambda self, right, batch, tokens, advantages: (
        right(batch, tokens, advantages) / np.bincount(tokens.rows, self.kept(batch, tokens))[tokens.rows]
    )},
    "mean over padding": {"count": lambda self, right, tokens, kept: np.bincount(tokens.rows).max() * tokens.rows[-1]},
    "recomputes behaviour": {"behaviour": lambda self, right, batch, tokens: self.scores(tokens)},
    "steps in bfloat16": {"descend": round_weights},
    # ---- a step in parts
    "divides parts by their own tokens": {"part": lambda self, right, batch: (
        part := right(batch),
        Part({n: a / max(part.count, 1) for n, a in part.gradient.items()}, 1.0, part.rewards, part.filtered),
    )[-1]},
    "steps at each part": {"accumulate": lambda self, right, batch: (
        right(batch), self.parts and self.descend(self.parts[-1].gradient)
    )},
    "filters the last part": {"end_step": lambda self, right: (
        rows := len(self.parts[-1].rewards) if self.parts else 0, result := right(),
        StepResult(result.metrics, None if result.filtered is None else result.filtered[-rows:]),
    )[-1]},
    "reports the last part": {"end_step": lambda self, right: (
        last := self.parts[-1].rewards if self.parts else None, StepResult({"reward": float(last.mean())}, right().filtered)
    )[-1]},
    "keeps aborted parts": {
        "abort_step": lambda *_: None, "begin_step": lambda self, right, step: vars(self).update(parts=self.parts or []),
    },
    "begins twice": {"begin_step": lambda self, right, step: vars(self).update(parts=[])},
    "ends without rows": {"end_step": lambda self, right: right() if self.parts else StepResult({})},
    "keeps a refused step": {"accumulate": lambda self, right, batch: (self.check(batch), right(batch))},
    # ---- what it reports
    "publishes float32": {"named_weights": lambda self, right: self.weights.items()},
    "keeps the wrapper's prefix": {"named_weights": lambda self, right: [(f"module.{n}", a) for n, a in right()]},
    "gives tied weights twice": {
        "named_weights": lambda self, right: [*right(), ("head.weight", self.weights["table.weight"])]
    },
    "gathers into one buffer": {"named_weights": gather},
    "trains as it is read": {"named_weights": before(lambda self: self.rest())},
    "caches log-probs": {
        "logprobs": lambda self, right, batch: (self.held.append(right(batch)), self.held[0])[1]
    },
    "pads log-probs": {"logprobs": lambda self, right, batch: Ragged.of(list(right(batch).padded()))},
    "log-probs of the token beside": {
        "logprobs": lambda self, right, batch: Ragged(np.roll((got := right(batch)).values, 1), got.offsets)
    },
    # ---- what it keeps
    "is never awaited": {"save": never_awaited},
    "keeps the first save": {"save": lambda self, right, path: (path / "state.npz").exists() or right(path)},
    "keeps its state in memory": {"save": save_in_memory, "load": load_from_memory},
    "writes down its folder": {
        "save": before(lambda self, path: (path / "latest").write_text(str(path))),
        "load": lambda self, right, path: right(Path((path / "latest").read_text())),
    },
    "starts anew without a checkpoint": {"load": lambda self, right, path: (path / "state.npz").exists() and right(path)},
    "forgets the optimizer": {"load": lambda self, right, path: (right(path), self.rest())},
    "loads half": {"load_weights": keep_bias},
    "keeps its momentum": {"rest": lambda *_: None},
    "keeps the update's memory": {"load_weights": lambda self, right, update: (
        right(update), vars(self).update(weights=dict(update.arrays()))
    )},
    "loads whatever comes": {"load_weights": lambda self, right, update: self.start_from(
        {**self.weights, **{n: a for n, a in update.arrays() if np.shape(self.weights.get(n)) == a.shape}}.items()
    )},
    "cannot export": {"export": lambda self, right, path: TrainEngine.export(self, path)},
    "exports float32": {"export": lambda self, right, path: write(path, self.weights.items())},
    "exports half precision": {"export": lambda self, right, path: write(
        path, [(name, array.astype(np.float16).astype(np.float32)) for name, array in self.weights.items()]
    )},
}  # fmt: skip
"""Each with the methods that it replaces."""
