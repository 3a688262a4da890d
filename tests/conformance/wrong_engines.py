"""Rollout engines that are wrong in one way each, made from the right one of the examples.

Each is a class with what is wrong in its docstring, kept to the few lines that make it so.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from own_engine import HIDDEN, VOCABULARY, Array, NumpyRollout, Row, Weights, logprobs_of

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.types import VersionSpan


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


# ---- the event loop, threads, processes


class Blocks(NumpyRollout):
    async def _decode(self) -> None:
        while self._waiting or self._running:
            self._token()
            time.sleep(0.002)  # noqa: ASYNC251


class LeavesAThread(NumpyRollout):
    END = threading.Event()

    def __init__(self, model: str) -> None:
        super().__init__(model)
        threading.Thread(target=self.END.wait, args=(30,), name="never-joined").start()


class LeavesAProcess(NumpyRollout):
    STARTED: list[subprocess.Popen[bytes]] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.STARTED.append(subprocess.Popen(["sleep", "30"]))


class LeavesAServer(NumpyRollout):
    """It detaches itself, as servers do, so that it is nobody's child any more."""

    PIDS: list[int] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        detached = ["setsid", "sh", "-c", "sleep 31 > /dev/null 2>&1 & echo $!"]
        self.PIDS.append(int(subprocess.run(detached, check=True, capture_output=True).stdout))


class LeavesASegment(NumpyRollout):
    MADE: list[Path] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.MADE.append(path := segment())
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)


class LeavesDescriptors(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


class LeavesADaemonThread(NumpyRollout):
    """It keeps no process alive, and stays as long as one lives."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        threading.Thread(target=LeavesAThread.END.wait, args=(30,), daemon=True).start()


class MadeOnce(NumpyRollout):
    """Right: a process can have one only, and it keeps a descriptor of its own, which is not more and more."""

    made = False

    def __init__(self, model: str) -> None:
        if MadeOnce.made:
            raise RuntimeError("the process group is initialised already")
        MadeOnce.made = True
        super().__init__(model)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


OPEN: list[int] = []
"""Descriptors for tests to close."""


def segment() -> Path:
    """A new file in shared memory, of 64 KB."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="wrong-engine-", delete=False) as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 16)
    return Path(file.name)


# ---- updates


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


class Leaks(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._old: list[Any] = []

    def _take(self, new: Weights, version: int) -> None:
        self._old.append(self._weights)
        super()._take(new, version)


class LeaksSegments(NumpyRollout):
    """One an update, which nobody has open any more."""

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        LeavesASegment.MADE.append(segment())


class LeaksSharedMaps(NumpyRollout):
    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._maps: list[mmap.mmap] = []

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        self._maps.append(mmap.mmap(-1, 1 << 16))


class LeaksDescriptors(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))


class LeaksThreads(NumpyRollout):
    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        threading.Thread(target=LeavesAThread.END.wait, args=(30,), daemon=True).start()


class LeaksInItsWorker(NumpyRollout):
    """The memory is that of a process of its own."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        code = "import sys; kept = [bytearray(b'x' * (1 << 16)) for _ in sys.stdin]"
        self._worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)

    def _take(self, new: Weights, version: int) -> None:
        super()._take(new, version)
        assert self._worker.stdin is not None
        self._worker.stdin.write(b"update\n")
        self._worker.stdin.flush()

    async def close(self) -> None:
        await super().close()
        self._worker.communicate()


# ---- how long it takes


class TakesLongToMake(NumpyRollout):
    """Right, and made in more time than a check has for steps."""

    MADE: list[str] = []  # noqa: RUF012

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self.MADE.append(model)
        time.sleep(0.8)


class TakesLongAndKeepsTheCache(TakesLongToMake, KeepsTheCache):
    pass


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
