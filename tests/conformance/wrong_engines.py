"""Rollout engines that are wrong in one way each, made from the right one of the examples.

Each is a class with what is wrong in its docstring, kept to the few lines that make it so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
from own_engine import Array, NumpyRollout, Row, logprobs_of

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completions
from asyncflow_sdk.types import Ragged, VersionSpan


def arrays(update: af.WeightUpdate) -> dict[str, Array]:
    return {name: np.array(array) for name, array in update.arrays()}


# ---- what it says of itself


class PromisesScores(NumpyRollout):
    logprobs = af.RolloutEngine.logprobs  # type: ignore[assignment]


class FliesUnversioned(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.capabilities = af.Capabilities(swap={"in_flight"}, token_versions=False)


# ---- what it answers


class Changing(NumpyRollout):
    """Every completion goes through ``change``."""

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        async for got in super().generate(request):
            for one in self.change(request, got):
                yield one

    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield got


class YieldsTwice(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield got
        yield got


class NeverYieldsTheLast(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        if got.index < 3:
            yield got


class AlwaysStops(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, got.logprobs, "stop", got.spans)


class DropsTheStopToken(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        kept = len(got.token_ids) - (got.finish_reason == "stop")
        spans = [VersionSpan(v, s, min(e, kept)) for v, s, e in got.spans if s < kept]
        yield af.Completion(got.index, got.token_ids[:kept], got.logprobs[:kept], got.finish_reason, spans)


class IgnoresStops(NumpyRollout):
    def _token(self) -> None:
        for row in self._waiting:
            object.__setattr__(row.request.sampling, "stop_ids", ())
        super()._token()


class FewerLogprobs(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, got.logprobs[1:], got.finish_reason, got.spans)


class Probabilities(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, np.exp(got.logprobs), got.finish_reason, got.spans)


class BaseTwo(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, got.logprobs / np.log(2), got.finish_reason, got.spans)


class ShiftedLogprobs(Changing):
    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        yield af.Completion(got.index, got.token_ids, np.roll(got.logprobs, 1), got.finish_reason, got.spans)


class PacksFewerReasons(NumpyRollout):
    """What ended together comes packed, and lacks something."""

    async def generate(self, request: af.Request) -> AsyncIterator[Any]:
        yield self.packed([got async for got in super().generate(request)])

    def packed(self, ended: Sequence[af.Completion]) -> Completions:
        return Completions(*columns(ended), [got.finish_reason for got in ended[1:]])


class PacksFewerLogprobs(PacksFewerReasons):
    def packed(self, ended: Sequence[af.Completion]) -> Completions:
        index, ids, logprobs = columns(ended)
        short = Ragged.of([row[1:] for row in logprobs], np.float32)
        return Completions(index, ids, short, [got.finish_reason for got in ended], ended[0].spans[0].version)


class PacksLogprobsOfOthers(PacksFewerReasons):
    def packed(self, ended: Sequence[af.Completion]) -> Completions:
        index, ids, logprobs = columns(ended)
        others = Ragged(np.roll(logprobs.values, -int(logprobs.offsets[1])), logprobs.offsets)
        return Completions(index, ids, others, [got.finish_reason for got in ended], ended[0].spans[0].version)


def columns(ended: Sequence[af.Completion]) -> tuple[Array, Ragged, Ragged]:
    return (
        np.array([got.index for got in ended]),
        Ragged.of([got.token_ids for got in ended], np.int32),
        Ragged.of([got.logprobs for got in ended], np.float32),
    )


class SlightlyOff(Changing):
    """By less than one token of weights in lower precision may be, where responses are drawn."""

    def change(self, request: af.Request, got: af.Completion) -> Iterator[af.Completion]:
        off = 0.5 * (request.sampling.temperature > 0)
        yield af.Completion(got.index, got.token_ids, got.logprobs - off, got.finish_reason, got.spans)


class DropsTheFirstToken(NumpyRollout):
    def _read(self, ids: Array) -> Array:
        return super()._read(ids[1:])


class PutsBeginTwice(NumpyRollout):
    """As a tokenizer does that adds its special tokens to ids that have them."""

    def _read(self, ids: Array) -> Array:
        return super()._read(np.concatenate([np.ones(1, np.int32), ids]))


class Padded(NumpyRollout):
    """Prompts read together are padded on the left, and nothing masks it."""

    def _token(self) -> None:
        longest = max(len(row.request.prompt_ids) for row in [*self._running, *self._waiting])
        for row in [*self._running, *self._waiting]:
            if row.state is None:
                pad = np.zeros(longest - len(row.request.prompt_ids), np.int32)
                row.state = self._read(np.concatenate([pad, row.request.prompt_ids]))
        super()._token()


# ---- how it draws


class OtherTemperature(NumpyRollout):
    """Log-probs are at temperature 1, whatever the tokens were drawn at."""

    def _token(self) -> None:
        have = {id(row): row.state for row in self._running}
        before = {id(row): len(row.ids) for row in self._running}
        rows = [*self._running, *self._waiting]
        super()._token()
        for row in rows:
            if len(row.ids) > before.get(id(row), 0):
                state = have.get(id(row))
                state = self._read(row.request.prompt_ids) if state is None else state
                row.logprobs[-1] = float(logprobs_of(self._weights, state[None], np.ones(1))[0, row.ids[-1]])


class CutLogprobs(NumpyRollout):
    """The draw is whole, and log-probs are those of the few likeliest tokens only."""

    def _choose(self, rows: Sequence[Row], logprobs: Array, temperatures: Array) -> Array:
        ids = super()._choose(rows, logprobs, temperatures)
        logprobs -= np.log(np.exp(np.sort(logprobs, 1)[:, -8:]).sum(1, keepdims=True))
        np.minimum(logprobs, 0, out=logprobs)
        return ids


class TopK(NumpyRollout):
    def _choose(self, rows: Sequence[Row], logprobs: Array, temperatures: Array) -> Array:
        cut = np.where(logprobs < np.sort(logprobs, 1)[:, [-20]], -np.inf, logprobs)
        cut -= np.log(np.exp(cut).sum(1, keepdims=True))
        return super()._choose(rows, cut, temperatures)


class Flatter(NumpyRollout):
    """Draws at a higher temperature than it says."""

    def _choose(self, rows: Sequence[Row], logprobs: Array, temperatures: Array) -> Array:
        flat = logprobs / 1.6
        flat -= np.log(np.exp(flat).sum(1, keepdims=True))
        return super()._choose(rows, flat, temperatures)


class OneSeedForAGroup(NumpyRollout):
    def _random(self, request: af.Request, index: int) -> np.random.Generator:
        return super()._random(request, 0)


class OneSeedForAll(NumpyRollout):
    def _random(self, request: af.Request, index: int) -> np.random.Generator:
        return np.random.default_rng(index)


# ---- what it refuses


class AnswersNothing(NumpyRollout):
    """An empty prompt is answered."""

    def _check_request(self, request: af.Request) -> None:
        if len(request.prompt_ids):
            super()._check_request(request)


class RaisesKeyError(NumpyRollout):
    def _check_request(self, request: af.Request) -> None:
        try:
            super()._check_request(request)
        except EngineError as error:
            raise KeyError("prompt") from error


class AssertsPrompts(NumpyRollout):
    def _check_request(self, request: af.Request) -> None:
        try:
            super()._check_request(request)
        except EngineError as error:
            raise AssertionError("a prompt that does not fit") from error


class AssertsWeights(NumpyRollout):
    """Right: a load that does not work out may raise anything."""

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = arrays(update)
        for name in {**new, **self._weights}:
            assert new[name].shape == self._weights[name].shape, name
        self._take(new, update.version)
        return set(new)


class RefusesMore(NumpyRollout):
    """Right: nobody has to take more rows at once than ``max_rows``."""

    _rows = 0

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self._rows += request.n
        try:
            if self._rows > self.capabilities.max_rows:
                raise EngineError(f"{self._rows} rows at once, and {self.capabilities.max_rows} fit")
            async for got in super().generate(request):
                yield got
        finally:
            self._rows -= request.n


class CutsLongPrompts(NumpyRollout):
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        most = 256 - request.sampling.max_tokens
        cut = af.Request(request.prompt_ids[-most:], request.sampling, request.n, request.seed, request.drawn)
        async for got in super().generate(cut):
            yield got


class RefusesTheWholeContext(NumpyRollout):
    def _check_request(self, request: af.Request) -> None:
        super()._check_request(request)
        if len(request.prompt_ids) + request.sampling.max_tokens == 256:
            raise EngineError("too long")


# ---- how long it takes


class Blocks(NumpyRollout):
    async def _decode(self) -> None:
        while self._waiting or self._running:
            self._token()
            time.sleep(0.002)  # noqa: ASYNC251


class TakesLongToMake(NumpyRollout):
    """Right, and made in more time than a check has for steps."""

    MADE: list[str] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.MADE.append(model)
        time.sleep(0.8)


class TakesLongForAll(NumpyRollout):
    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        await asyncio.sleep(0.6)
        async for got in super().generate(request):
            yield got

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        await asyncio.sleep(0.6)
        return await super().load_weights(update)


# ---- aborts


class LosesRoom(NumpyRollout):
    """What is cancelled while it runs goes on holding its room."""

    def _token(self) -> None:
        room = self.capabilities.max_rows - getattr(self, "_lost", 0)
        if len(self._running) >= room and not self._running:
            return
        while self._waiting and len(self._running) < room:
            self._running.append(self._waiting.popleft())
        waiting, self._waiting = self._waiting, type(self._waiting)()
        if self._running:
            super()._token()
        self._waiting = waiting

    def _drop(self, rows: Sequence[Row]) -> None:
        self._lost = getattr(self, "_lost", 0) + sum(row in self._running for row in rows)
        super()._drop(rows)


class AbortsAll(NumpyRollout):
    """Cancelling one ends all that run."""

    def _drop(self, rows: Sequence[Row]) -> None:
        if any(row in self._running for row in rows):
            for row in self._running:
                if row not in rows:
                    row.inbox.put_nowait(EngineError("aborted"))
            rows = list(self._running)
        super()._drop(rows)


class ForgetsNeighbours(NumpyRollout):
    """Cancelling one takes all that run out, and tells nobody."""

    def _drop(self, rows: Sequence[Row]) -> None:
        super()._drop(list(self._running) if any(row in self._running for row in rows) else rows)


class GoesOn(NumpyRollout):
    """What is cancelled is decoded to its end, and its room is not free before."""

    def _drop(self, rows: Sequence[Row]) -> None:
        pass

    async def close(self) -> None:
        self._running, self._waiting = [], type(self._waiting)()
