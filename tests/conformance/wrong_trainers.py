"""Train engines that are each wrong in one way that engines have been wrong in, by the checks that must see it."""

from __future__ import annotations

import copy
import json
import os
import threading
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from bigram import BigramTrain, log_softmax, weights, write

from asyncflow_sdk.errors import SchemaError
from asyncflow_sdk.interfaces import StepResult, TrainEngine, WeightUpdate
from asyncflow_sdk.types import Batch, Ragged

WRONG: dict[type[BigramTrain], tuple[set[str], bool]] = {}


def fails(*checks: str, more: bool = False) -> Any:
    """These checks must fail, and no others, unless ``more``: then there is nothing that most can ask at all."""

    def register(engine: type[BigramTrain]) -> type[BigramTrain]:
        WRONG[engine] = set(checks), more
        return engine

    return register


# ---- how it is made


@fails("made")
class TakesAnyOption(BigramTrain):
    """A misspelt `learning_rate` is no error."""

    def __init__(self, model: str, *, lr: float = 1.0, algorithm: Any, **more: Any) -> None:
        super().__init__(model, lr=lr, algorithm=algorithm)


@fails("made", "resume", "save_is_whole")
class NeverWaitedFor(BigramTrain):
    async def save(self, path: Path) -> None:  # type: ignore[override]
        super().save(path)


@fails("algorithm")
class IgnoresTheAlgorithm(BigramTrain):
    def __init__(self, model: str, *, algorithm: Any) -> None:
        from asyncflow_sdk.algorithms import GRPO

        super().__init__(model, algorithm=algorithm if type(algorithm) is GRPO else GRPO())


@fails("asked")
class SaysThatItComputes(BigramTrain):
    """And refuses whoever asks for it."""

    computes = ("values",)


# ---- what it learns


@fails("direction", "every_token", "off_policy")
class OtherSign(BigramTrain):
    def advantages(self, batch: Batch) -> Any:
        return -super().advantages(batch)


@fails("every_token", "companions")
class DropsTheLastToken(BigramTrain):
    """Shifts inputs and targets against each other twice: what ends a response is never trained."""

    def kept(self, batch: Batch, tokens: Any) -> Any:
        kept = super().kept(batch, tokens).copy()
        kept[batch.ragged("response_ids").offsets[1:] - 1] = False
        return kept


@fails("every_token")
class DropsTheFirstToken(BigramTrain):
    def kept(self, batch: Batch, tokens: Any) -> Any:
        kept = super().kept(batch, tokens).copy()
        kept[batch.ragged("response_ids").offsets[:-1]] = False
        return kept


@fails("no_gradient")
class RoundsEqualRewards(BigramTrain):
    """The mean of equal rewards is not quite them in float32, and what is left is divided by itself."""

    def advantages(self, batch: Batch) -> Any:
        reward = batch.array("reward")
        advantages = np.zeros(batch.rows, np.float32)
        for group in np.unique(batch.groups):
            own = batch.groups == group
            centred = (reward[own] - reward[own].sum(dtype=np.float32) / np.float32(own.sum())).astype(np.float32)
            advantages[own] = centred / (centred.std() + 1e-9)
        return advantages


@fails("no_gradient")
class FiltersWhatItTrains(BigramTrain):
    def filtered(self, advantages: Any) -> Any:
        return advantages <= 0


@fails("off_policy")
class RecomputesBehaviour(BigramTrain):
    """Takes its own log-probs from before the step for those of the policy that drew the rows."""

    def behaviour(self, batch: Batch, tokens: Any) -> Any:
        return self.scores(tokens)


@fails("token_mean")
class MeanOverRows(BigramTrain):
    def coefficients(self, batch: Batch, tokens: Any, advantages: Any) -> Any:
        kept = np.bincount(tokens.rows, self.kept(batch, tokens), minlength=batch.rows)
        return super().coefficients(batch, tokens, advantages) * kept.mean() / np.maximum(kept, 1)[tokens.rows]


@fails("companions", "loss_mask", "token_mean")
class IgnoresTheLossMask(BigramTrain):
    def kept(self, batch: Batch, tokens: Any) -> Any:
        return np.ones(len(tokens.ids), bool)


@fails("loss_mask", "companions", "token_mean")
class MasksOneTooLate(BigramTrain):
    def kept(self, batch: Batch, tokens: Any) -> Any:
        kept = np.roll(super().kept(batch, tokens), 1)
        kept[batch.ragged("response_ids").offsets[:-1]] = True
        return kept


@fails("companions", "token_mean")
class MeanOverPadding(BigramTrain):
    """The loss is the mean over a padded matrix: a long row makes all the others' gradients small."""

    def count(self, tokens: Any, kept: Any, advantages: Any) -> Any:
        lengths = np.bincount(tokens.rows)
        return lengths.max() * len(lengths)


@fails("companions")
class TrainsPadding(BigramTrain):
    """Behind each row, token 0 is trained as far as the longest row goes."""

    def descend(self, tokens: Any, coefficients: Any) -> None:
        lengths = np.bincount(tokens.rows)
        by_row = np.bincount(tokens.rows, coefficients) / lengths
        last = np.cumsum(lengths) - 1
        short = np.repeat(np.arange(len(lengths)), lengths.max() - lengths)
        tokens.before = np.concatenate([tokens.before, tokens.ids[last[short]]])
        tokens.ids = np.concatenate([tokens.ids, np.zeros(len(short), np.int32)])
        super().descend(tokens, np.concatenate([coefficients, by_row[short]]))


@fails("row_order")
class TakesGroupsAsTheyLie(BigramTrain):
    """Rows beside each other, as many as there are in the first group's number, are taken for a group."""

    def advantages(self, batch: Batch) -> Any:
        _, sizes = np.unique(batch.groups, return_counts=True)
        groups = np.repeat(np.arange(len(sizes)), sizes)
        return super().advantages(Batch(batch.ids, groups, batch.columns))


@fails("row_order", "companions", "token_mean")
class MeanOfMicroBatches(BigramTrain):
    """Two passes, each with the mean of its own tokens."""

    def descend(self, tokens: Any, coefficients: Any) -> None:
        second = tokens.rows >= tokens.rows[-1] // 2
        share = np.where(second, second.mean(), 1 - second.mean())
        super().descend(tokens, coefficients / (2 * share))


@fails("step", more=True)
class NeverMoves(BigramTrain):
    """Its schedule begins at a learning rate of 0, and never gets on."""

    def __init__(self, model: str, *, algorithm: Any) -> None:
        super().__init__(model, algorithm=algorithm, lr=0.0)


@fails("small_updates")
class StepsInBfloat16(BigramTrain):
    """Steps on the weights in the checkpoint's dtype: what is smaller than a rounding is lost each time."""

    def descend(self, tokens: Any, coefficients: Any) -> None:
        super().descend(tokens, coefficients)
        for name, array in self.weights.items():
            array[:] = array.astype(self.dtypes[name])


@fails("small_updates")
class PublishesFloat32(BigramTrain):
    """Gives its masters, whatever the checkpoint's dtype is."""

    def named_weights(self) -> Any:
        return self.weights.items()


@fails("small_updates")
class ExportsFloat32(BigramTrain):
    """Publishes in the checkpoint's dtype, and leaves a folder twice as large."""

    def export(self, path: Path) -> None:
        write(path, self.weights)


# ---- what it refuses


@fails("bad_batches")
class TrainsOnNaN(BigramTrain):
    def check(self, batch: Batch) -> None:
        self.check_tokens(batch)
        if (batch.ragged("logprobs").lengths != batch.ragged("response_ids").lengths).any():
            raise SchemaError("a response has not as many log-probs as tokens")


@fails("bad_batches")
class ClipsTokens(BigramTrain):
    """A token that is not in the vocabulary becomes the nearest that is."""

    def check_tokens(self, batch: Batch) -> None:
        pass

    def tokens(self, batch: Batch) -> Any:
        tokens = super().tokens(batch)
        top = len(self.weights["bias"]) - 1
        tokens.before, tokens.ids = tokens.before.clip(0, top), tokens.ids.clip(0, top)
        return tokens


@fails("bad_batches")
class RefusesHalfWay(BigramTrain):
    """Has trained on the rows before the bad one."""

    def check(self, batch: Batch) -> None:
        try:
            super().check(batch)
        except SchemaError:
            self.weights["bias"][0] += np.float32(0.001)
            raise


@fails("bad_batches")
class KeepsTheGradient(BigramTrain):
    """What was computed before the refusal goes into the next step."""

    def check(self, batch: Batch) -> None:
        try:
            super().check(batch)
        except SchemaError:
            self.speed["bias"][0] += np.float32(0.1)
            raise


@fails("bad_batches")
class RaisesWhateverComes(BigramTrain):
    def check(self, batch: Batch) -> None:
        batch.columns["reward"]
        super().check(batch)


@fails("step")
class WritesIntoTheBatch(BigramTrain):
    """Centres the rewards in place, where other consumers read them too."""

    def advantages(self, batch: Batch) -> Any:
        advantages = super().advantages(batch)
        stored = batch.columns["reward"].values
        if stored.flags.writeable:
            stored -= stored.mean()
        return advantages


@fails("step")
class TellsNaN(BigramTrain):
    def train_step(self, batch: Batch) -> StepResult:
        return StepResult({**super().train_step(batch).metrics, "kl": float("nan")})


# ---- what it tells


@fails("names", "small_updates", "load_weights")
class GivesTiedWeightsTwice(BigramTrain):
    def named_weights(self) -> Any:
        yield from super().named_weights()
        yield "head.weight", self.weights["table.weight"]


@fails("names", more=True)
class KeepsTheWrappersPrefix(BigramTrain):
    def named_weights(self) -> Any:
        return [(f"module.{name}", array) for name, array in self.weights.items()]


@fails("live_views")
class ReusesABuffer(BigramTrain):
    """Each tensor is gathered into the same memory, as an engine does that has shards of it."""

    def named_weights(self) -> Any:
        room = np.empty(max(array.nbytes for array in self.weights.values()), np.uint8)
        for name, array in super().named_weights():
            gathered = room[: array.nbytes].view(array.dtype).reshape(array.shape)
            gathered[:] = array
            yield name, gathered


@fails("live_views")
class ReadingTrains(BigramTrain):
    """Gathering the weights touches what the optimizer has."""

    def named_weights(self) -> Any:
        for name, array in super().named_weights():
            yield name, array
            self.speed[name] = np.float32(0.5) * self.speed[name]


@fails("fresh_logprobs", "resume")
class CachesLogprobs(BigramTrain):
    """Computes log-probs from a copy of the weights that is made once."""

    first: Any = None

    def logprobs(self, batch: Batch) -> Ragged:
        self.first = self.first or {name: array.copy() for name, array in self.weights.items()}
        self.check_tokens(batch)
        tokens = self.tokens(batch)
        scores = log_softmax(self.first, tokens.before)[np.arange(len(tokens.ids)), tokens.ids]
        return Ragged(scores.astype(np.float32), batch.ragged("response_ids").offsets)


@fails("logprobs", "fresh_logprobs", "resume")
class PaddedLogprobs(BigramTrain):
    def logprobs(self, batch: Batch) -> Ragged:
        padded = super().logprobs(batch).padded()
        return Ragged.of(list(padded))


@fails("logprobs", "fresh_logprobs", "resume")
class LogprobsBesideTheToken(BigramTrain):
    """Reads the logits where the token stands, not where it is predicted."""

    def logprobs(self, batch: Batch) -> Ragged:
        right = super().logprobs(batch)
        return Ragged(np.roll(right.values, 1), right.offsets)


@fails("logprobs", "fresh_logprobs", "resume")
class LogprobsByLongRows(BigramTrain):
    """What a row is given depends on the longest one beside it."""

    def logprobs(self, batch: Batch) -> Ragged:
        right = super().logprobs(batch)
        drift = 0.01 * np.repeat(right.lengths.max() - right.lengths, right.lengths)
        return Ragged((right.values - drift).astype(np.float32), right.offsets)


# ---- what it keeps


@fails("resume")
class ForgetsTheOptimizer(BigramTrain):
    def load(self, path: Path) -> None:
        super().load(path)
        self.speed = {name: np.zeros_like(array) for name, array in self.weights.items()}


@fails("resume", "save_is_whole")
class LoadsNothing(BigramTrain):
    def load(self, path: Path) -> None:
        pass


@fails("save_is_whole")
class StartsAnewWithoutACheckpoint(BigramTrain):
    def load(self, path: Path) -> None:
        if (path / "state.npz").exists():
            super().load(path)


@fails("save_is_whole")
class KeepsTheFirstSave(BigramTrain):
    def save(self, path: Path) -> None:
        if not (path / "state.npz").exists():
            super().save(path)


@fails("save_is_whole")
class WritesDownItsPlace(BigramTrain):
    def save(self, path: Path) -> None:
        super().save(path)
        (path / "latest").write_text(json.dumps(str(path)))

    def load(self, path: Path) -> None:
        super().load(Path(json.loads((path / "latest").read_text())))


@fails("load_weights")
class LoadsHalf(BigramTrain):
    """Takes the tensors that lie in the first chunk, and says nothing."""

    def load_weights(self, update: WeightUpdate) -> None:
        kept = dict(list(self.weights.items())[len(self.weights) // 2 :])
        super().load_weights(update)
        self.weights |= kept


@fails("load_weights")
class KeepsOldMasters(BigramTrain):
    """Computes with the loaded weights, and steps from the masters that it had: they come back with the next step."""

    masters: Any = None

    def load_weights(self, update: WeightUpdate) -> None:
        masters = self.weights
        super().load_weights(update)
        self.masters = masters

    def descend(self, tokens: Any, coefficients: Any) -> None:
        self.weights, self.masters = self.masters or self.weights, None
        super().descend(tokens, coefficients)


@fails("load_weights")
class KeepsItsMomentum(BigramTrain):
    """The optimizer still goes where the weights given up went."""

    def load_weights(self, update: WeightUpdate) -> None:
        speed = self.speed
        super().load_weights(update)
        self.speed = speed


@fails("load_weights")
class KeepsTheUpdatesMemory(BigramTrain):
    """Views of tensors that are another version's when this one is released."""

    def load_weights(self, update: WeightUpdate) -> None:
        super().load_weights(update)
        self.weights = dict(update.arrays())


@fails("load_weights")
class LoadsWhateverComes(BigramTrain):
    """A version that lacks a weight is another model's, or half of one."""

    def load_weights(self, update: WeightUpdate) -> None:
        for name, array in update.arrays():
            if name in self.weights and array.shape == self.weights[name].shape:
                self.weights[name] = array.astype(np.float32)
        self.speed = {name: np.zeros_like(array) for name, array in self.weights.items()}


@fails("export", "small_updates")
class ExportsHalfPrecision(BigramTrain):
    def export(self, path: Path) -> None:
        write(path, {n: a.astype(np.float16).astype(np.float32) for n, a in self.weights.items()})


@fails("export", "small_updates")
class ExportsWhatItBeganWith(BigramTrain):
    def export(self, path: Path) -> None:
        write(path, weights(0))


@fails("memory")
class Leaks(BigramTrain):
    """A megabyte of every step is kept."""

    def train_step(self, batch: Batch) -> StepResult:
        self.kept_for_ever = [*getattr(self, "kept_for_ever", []), np.ones(1 << 17)]
        return super().train_step(batch)


@fails("memory")
class LeaksDescriptors(BigramTrain):
    """As one does that opens a file for each step."""

    def train_step(self, batch: Batch) -> StepResult:
        self.files = [*getattr(self, "files", []), open(os.devnull)]  # noqa: SIM115
        return super().train_step(batch)


@fails("closes")
class LeavesDescriptors(BigramTrain):
    files: ClassVar[list[Any]] = []

    def __init__(self, model: str, *, lr: float = 1.0, algorithm: Any) -> None:
        super().__init__(model, lr=lr, algorithm=algorithm)
        self.files.append(open(os.devnull))  # noqa: SIM115


@fails("closes")
class LeavesAThread(BigramTrain):
    ended: Any = None

    def train_step(self, batch: Batch) -> StepResult:
        if self.ended is None:
            self.ended = ENDED
            threading.Thread(target=self.ended.wait, name="prefetch").start()
        return super().train_step(batch)


ENDED = threading.Event()
"""Set by the test, in the end."""


class KeepsStateInMemory(BigramTrain):
    """What it saves is a word for what this process has: as good as a checkpoint, until the process dies."""

    states: ClassVar[dict[str, Any]] = {}

    def save(self, path: Path) -> None:
        word = f"{os.getpid()}-{len(self.states)}"
        self.states[word] = copy.deepcopy((self.weights, self.speed))
        (path / "word").write_text(word)

    def load(self, path: Path) -> None:
        self.weights, self.speed = copy.deepcopy(self.states[(path / "word").read_text()])


class CannotExport(BigramTrain):
    def export(self, path: Path) -> None:
        TrainEngine.export(self, path)


class Hangs(BigramTrain):
    """Waits in its step for a rank that is gone."""

    def train_step(self, batch: Batch) -> StepResult:
        ENDED.wait(60)
        raise AssertionError
