"""A train engine with one fault, made from the right one of a bigram.

Conformance("train", WrongTrain, options={"fault": "the other sign"})
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bigram import VOCABULARY, BigramTrain, write
from faults import Fault, before, event, leave_thread, refuses, with_fault

from asyncflow_sdk.algorithms import GRPO
from asyncflow_sdk.interfaces import StepResult, TrainEngine
from asyncflow_sdk.testing.kit.train.lab import changed, masked
from asyncflow_sdk.types import Batch, Ragged, loss_mask


class WrongTrain(BigramTrain):
    def __init__(self, model: str, *, algorithm: Any, fault: str, learning_rate: float = 1.0, **more: Any) -> None:
        if fault == "ignores the algorithm":
            algorithm = GRPO()
        known = {} if fault == "takes any option" else more
        super().__init__(model, algorithm=algorithm, learning_rate=learning_rate, **known)
        self.computes = ("values",) if fault == "says that it computes" else ()
        self.held: list[Any] = []
        with_fault(self, FAULTS.get(fault, {}))


def trains(change: Callable[[Any, Batch], Batch]) -> Fault:
    """Train on something else than the batch."""
    return {"accumulate": lambda self, right, batch: right(change(self, batch))}


def drops(places: Callable[[Ragged], Any]) -> Fault:
    """Leave out the tokens at these places of all responses."""

    def without(self: Any, batch: Batch) -> Batch:
        responses = batch.ragged("response_ids")
        return masked(batch, ~np.isin(np.arange(len(responses.values)), places(responses)))

    return trains(without)


def leaves(name: str) -> Fault:
    """Change weights, or the optimizer's state, and change them back where nothing is refused."""

    def check(self: Any, right: Any, batch: Batch) -> None:
        getattr(self, name)["bias"][0] += np.float32(0.1)
        right(batch)
        getattr(self, name)["bias"][0] -= np.float32(0.1)

    return {"check": check}


def clips(above: str, below: str) -> Fault:
    """Clip by these options."""

    def beyond(self: Any, right: Any, ratio: Any, worth: Any) -> Any:
        high, low = 1 + getattr(self.algorithm, above), 1 - getattr(self.algorithm, below)
        return np.where(worth > 0, ratio > high, ratio < low)

    return {"beyond": beyond}


def gather(self: Any, right: Any) -> Any:
    """Give each tensor in the same memory."""
    room = np.empty(VOCABULARY**2, np.float32)
    for name, array in right():
        gathered = room[: array.size].reshape(array.shape)
        gathered[:] = array
        yield name, gathered


def divide_each_part(self: Any, right: Any) -> StepResult:
    """Add means of parts."""
    each = [BigramTrain.gradient(self, part) for part in self.parts]
    self.gradient = lambda *_: {name: sum(part[name] for part in each) for name in self.weights}
    return right()  # type: ignore[no-any-return]


async def never_awaited(self: Any, right: Any, path: Path) -> None:
    right(path)


FAULTS: dict[str, Fault] = {
    "never moves": {"descend": lambda *_: None},
    "leaves a thread": {"check": before(lambda *_: leave_thread(name="prefetch"))},
    # ---- a step
    "leaks": {"check": before(lambda self, _: self.held.append(np.ones(1 << 17)))},
    "hangs": {"check": before(lambda *_: event().wait(60))},
    "reports NaN": {"train_step": lambda self, right, batch: StepResult({**right(batch).metrics, "kl": np.nan})},
    "trains on NaN": {"check": lambda self, right, batch: self.check_tokens(batch)},
    "clips tokens": trains(lambda self, batch: changed(  # one that is not in the vocabulary becomes the nearest that is
        batch, response_ids=Ragged((ids := batch.ragged("response_ids")).values.clip(0, VOCABULARY - 1), ids.offsets)
    )),
    "raises whatever comes": {"check": before(lambda self, batch: batch.columns["reward"])},
    "refuses half-way": leaves("weights"),
    "keeps the gradient": leaves("speed"),
    "the other sign": {"advantages": lambda self, right, batch: -right(batch)},
    "trains equal rewards": {"advantages": lambda self, right, batch: np.where(a := right(batch), a, np.float32(1))},
    "takes groups as they lie": trains(lambda self, batch: Batch(batch.ids, np.sort(batch.groups), batch.columns)),
    "writes into the batch": {
        "check": before(lambda self, batch: np.negative(rewards := batch.columns["reward"].values, out=rewards))
    },
    "filters what it trains": {
        "train_step": lambda self, right, batch: StepResult(right(batch).metrics, np.ones(batch.rows, bool))
    },
    "drops the first token": drops(lambda responses: responses.offsets[:-1]),
    "drops the last token": drops(  # of responses of several
        lambda responses: responses.offsets[1:][responses.lengths > 1] - 1
    ),
    "ignores the loss mask": trains(lambda self, batch: changed(batch, loss_mask=None)),
    "mean over rows": {"advantages": lambda self, right, batch: right(batch) / [
        max(np.count_nonzero(row), 1) for row in loss_mask(batch) or batch.ragged("logprobs")
    ]},
    "mean over padding": {
        "advantages": lambda self, right, batch: right(batch) / batch.ragged("response_ids").lengths.max()
    },
    "recomputes behaviour": trains(lambda self, batch: changed(batch, logprobs=self.logprobs(batch))),
    "clips above by clip_low": clips("clip_low", "clip_low"),
    "clips below by clip_high": clips("clip_high", "clip_high"),
    "swaps the clips": clips("clip_low", "clip_high"),
    "clips on both sides": {"beyond": lambda self, right, ratio, worth: right(ratio, 1) | right(ratio, -1)},
    "steps in bfloat16": {"descend": lambda self, right, gradient: (right(gradient), vars(self).update(
        weights={name: array.astype(np.float32) for name, array in self.named_weights()}
    ))},
    # ---- a step in parts
    "divides parts by their own tokens": {"end_step": divide_each_part},
    "steps at each part": {"accumulate": before(lambda self, batch: self.descend(self.gradient(batch)))},
    "filters the last part": {"end_step": lambda self, right: (
        rows := self.parts[-1].rows, result := right(), StepResult(result.metrics, result.filtered[-rows:])
    )[-1]},
    "reports the last part": {"end_step": lambda self, right: (
        last := self.parts[-1].array("reward"), StepResult({"reward": float(last.mean())}, right().filtered)
    )[-1]},
    "keeps aborted parts": {
        "abort_step": lambda *_: None, "begin_step": lambda self, right, step: vars(self).update(parts=self.parts or []),
    },
    "begins twice": {"begin_step": lambda self, right, step: vars(self).update(parts=[])},
    "ends without rows": {"end_step": lambda self, right: right() if self.parts else StepResult({})},
    "keeps a refused step": {"accumulate": before(lambda self, batch: self.check(batch))},
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
    "keeps its state in memory": {  # as good as a checkpoint, until the process dies
        "save": before(lambda self, path: (path / "process").write_text(str(os.getpid()))),
        "load": refuses(lambda self, path: (path / "process").read_text() != str(os.getpid()), KeyError),
    },
    "writes down its folder": {
        "save": before(lambda self, path: (path / "latest").write_text(str(path))),
        "load": lambda self, right, path: right(Path((path / "latest").read_text())),
    },
    "starts anew without a checkpoint": {"load": lambda self, right, path: (path / "state.npz").exists() and right(path)},
    "forgets the optimizer": {"load": lambda self, right, path: (right(path), self.rest())},
    "loads half": {"load_weights": lambda self, right, update: (
        bias := self.weights["bias"], right(update), self.weights.update(bias=bias)
    )},
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
