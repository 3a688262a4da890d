"""Rollout engines that are wrong in how they take versions, what they say of them, and how they go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from own_engine import HIDDEN, VOCABULARY, Array, NumpyRollout, Row, Weights
from wrong_engines import Changing, TakesLongToMake, arrays

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.types import VersionSpan

# ---- what they take


class IgnoresUpdates(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        self._version = version


class TakesAllButOne(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take({**new, "mix.bias": self._weights["mix.bias"]}, version)


class SwallowsTheUnknown(NumpyRollout):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = arrays(update)
        self._take({name: new[name] for name in self._weights}, update.version)
        return set(new)


class NeverMissesAny(NumpyRollout):
    """What does not come stays as it was."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = arrays(update)
        for name, array in new.items():
            if name not in self._weights or array.shape != self._weights[name].shape:
                raise EngineError(f"{name} has no place")
        self._take({**self._weights, **new}, update.version)
        return set(new)


class Reshapes(NumpyRollout):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = arrays(update)
        self._take({name: np.resize(new[name], old.shape) for name, old in self._weights.items()}, update.version)
        return set(new)


class KeepsTheCache(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        self._weights, self._version = new, version
        for row in self._running:
            row.state = None


class WritesAsItReads(NumpyRollout):
    """And when it breaks off goes on with what is written."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        for name, array in update.arrays():
            self._take({**self._weights, name: array.copy()}, self._version)
        self._version = update.version
        return set(self._weights)


class HidesThatItBroke(WritesAsItReads):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        try:
            return await super().load_weights(update)
        except OSError:
            return set(update.tensors)


class KeepsViews(NumpyRollout):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = dict(update.arrays())
        self._take(new, update.version)
        return set(new)


class StopsFollowing(NumpyRollout):
    """Takes two updates, and no more."""

    taken = 0

    def _take(self, new: Weights, version: int) -> None:
        self.taken += 1
        super()._take(new if self.taken < 3 else self._weights, version)


class NeverGoesBack(NumpyRollout):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        if update.version < self._version:
            raise EngineError("an older version")
        return await super().load_weights(update)


class TakesLongAndKeepsTheCache(TakesLongToMake, KeepsTheCache):
    pass


# ---- versions, updates in flight, interruptions


class NamesTheNext(NumpyRollout):
    """Spans name a version that is announced, not the one that is held."""

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version + 1)


class NamesTheFirst(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, 0)


class OneSpan(Changing):
    """A response is said to be of the version it ended under."""

    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        spans = [VersionSpan(got.spans[-1].version, 0, len(got.token_ids))] if got.spans else []
        yield af.Completion(got.index, got.token_ids, got.logprobs, got.finish_reason, spans)


class WaitsForTheEnd(NumpyRollout):
    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        while self._running or self._waiting:
            await asyncio.sleep(0.001)
        return await super().load_weights(update)


class KeepsStates(NumpyRollout):
    """Rows that run go on from what was read under the old weights."""

    def _take(self, new: Weights, version: int) -> None:
        self._weights, self._version = new, version
        self._prefixes.clear()


class AnswersAsItWrites(NumpyRollout):
    """Requests that come between two tensors are answered from what is written."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        for name, array in arrays(update).items():
            self._take({**self._weights, name: array}, self._version)
            await asyncio.sleep(0.002)
        self._version = update.version
        return set(update.tensors)


class WritesInAThread(Changing):
    """As one that is drained first, and thinks that nobody asks it anything then."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.capabilities = af.Capabilities(swap={"drain"}, token_versions=False, max_rows=16, context=256)

    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, got.logprobs, got.finish_reason)

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        await asyncio.to_thread(self._write, update)
        return set(update.tensors)

    def _write(self, update: af.WeightUpdate) -> None:
        for name, array in update.arrays():
            self._weights = {**self._weights, name: np.array(array)}
            self._prefixes.clear()


class CachesWhileItLoads(NumpyRollout):
    """The cache is emptied when a load begins, and what comes meanwhile is read by the old weights into it."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        self._prefixes.clear()
        self._weights = await asyncio.to_thread(arrays, update)
        self._version = update.version
        for row in self._running:
            row.state = None
        return set(self._weights)


class RefusesDuringLoads(NumpyRollout):
    """Though it says that requests may run then."""

    _loading = False

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        self._loading = True
        try:
            self._take(await asyncio.to_thread(arrays, update), update.version)
        finally:
            self._loading = False
        return set(update.tensors)

    def _check_request(self, request: af.Request) -> None:
        super()._check_request(request)
        if self._loading:
            raise EngineError("it loads")


class ThrowsAway(NumpyRollout):
    async def interrupt(self) -> None:
        for row in self._running:
            row.ids, row.logprobs, row.versions = [], [], []
        await super().interrupt()


class NeverInterrupts(NumpyRollout):
    async def interrupt(self) -> None:
        while self._running or self._waiting:
            await asyncio.sleep(0.001)


class NumbersNew(NumpyRollout):
    """A response that goes on is read without what it had drawn."""

    def _read_row(self, row: Row) -> Array:
        prompt = row.request.prompt_ids
        return self._read(prompt[: len(prompt) - row.request.drawn])


# ---- proofs


class ScoresACopy(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._copy = {name: array.copy() for name, array in self._weights.items()}

    def _score(self, prompt: Array, response: Array) -> list[float]:
        held, self._weights = self._weights, self._copy
        self._prefixes.clear()
        try:
            return super()._score(prompt, response)
        finally:
            self._weights = held
            self._prefixes.clear()


class HoldsACopy(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._copy = {name: array.copy() for name, array in self._weights.items()}

    def held_weights(self) -> Iterator[tuple[str, Array]]:
        return iter(self._copy.items())


class HoldsFused(NumpyRollout):
    def held_weights(self) -> Iterator[tuple[str, Array]]:
        yield "mix.weight", np.zeros((HIDDEN, VOCABULARY), np.float32)
