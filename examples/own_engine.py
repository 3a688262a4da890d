"""An inference engine of one's own, whole in one file, over nothing but numpy; and the kit that says whether it is right.

python examples/own_engine.py

The model is a small recurrent network. Its state after some tokens is what keys and values are to a transformer: read
once for all responses to a prompt, cached by prefix, and worth nothing under new weights. Rows are batched continuously;
weights may come between any two tokens.
"""

import asyncio
import functools
import itertools
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError, WeightMismatch
from asyncflow_sdk.testing import Conformance, Policy
from asyncflow_sdk.types import VersionSpan

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]
VOCABULARY, HIDDEN, CONTEXT = 64, 48, 256
BLOCK = 8  # states are cached after every so many tokens


def advance(weights: Weights, states: Array, ids: Array) -> Array:
    """States (rows, HIDDEN) after one more token of each row."""
    return np.tanh(states @ weights["mix.weight"].T + weights["mix.bias"] + weights["embed.weight"][ids])


def logprobs_of(weights: Weights, states: Array, temperatures: Array) -> Array:
    """Of each token as the next one: (rows, VOCABULARY). Temperature 0 is greedy, and reported as 1."""
    logits = states @ weights["head.weight"].T / np.where(temperatures == 0, 1, temperatures)[:, None]
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


class NumpyPolicy(Policy):
    """What the engine must answer, computed the slow way: one sequence at a time, in float64."""

    vocabulary, context = VOCABULARY, CONTEXT

    def __init__(self) -> None:
        self._made = tempfile.TemporaryDirectory(prefix="numpy-policy-")
        np.savez(Path(self._made.name) / "weights.npz", **self.tensors(0))

    @property
    def folder(self) -> str:
        return self._made.name

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def tensors(self, version: int) -> Weights:
        random = np.random.default_rng(version)
        shapes = {
            "embed.weight": (VOCABULARY, HIDDEN),
            "mix.weight": (HIDDEN, HIDDEN),
            "head.weight": (VOCABULARY, HIDDEN),
        }
        scale = {"embed.weight": 0.6, "mix.weight": 1.1 * HIDDEN**-0.5, "head.weight": 3.0 * HIDDEN**-0.5}
        made = {name: random.normal(0, scale[name], shape).astype(np.float32) for name, shape in shapes.items()}
        return {**made, "mix.bias": random.normal(0, 0.3, HIDDEN).astype(np.float32)}

    def logprobs(self, version: int, prompt: Array, response: Array, temperature: float = 1.0) -> Array:
        rows = []
        for token, state in zip(
            response, self._states(version, np.concatenate([prompt, response])[:-1], len(prompt)), strict=True
        ):
            rows.append(logprobs_of(self._exact(version), state, np.array([temperature]))[0, token])
        return np.array(rows)

    def greedy(self, version: int, prompt: Array, max_tokens: int) -> Array:
        weights, ids = self._exact(version), []
        *_, state = self._states(version, prompt, len(prompt))
        for _ in range(max_tokens):
            ids.append(int(logprobs_of(weights, state, np.ones(1)).argmax()))
            state = advance(weights, state, ids[-1:])
        return np.array(ids, np.int32)

    def next_logprobs(self, version: int, prompt: Array, temperature: float = 1.0) -> Array:
        *_, state = self._states(version, prompt, len(prompt))
        return logprobs_of(self._exact(version), state, np.array([temperature]))[0]

    def _states(self, version: int, ids: Array, read: int) -> Iterator[Array]:
        """After the first ``read`` tokens, and after each one more."""
        weights, state = self._exact(version), np.zeros((1, HIDDEN))
        for count, token in enumerate(ids, 1):
            state = advance(weights, state, np.array([token]))
            if count >= read:
                yield state

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def _exact(self, version: int) -> Weights:
        return {name: array.astype(np.float64) for name, array in self.tensors(version).items()}


@dataclass(eq=False)
class Row:
    """A response under way. ``state``: after all its tokens; None until they were read under the weights held now."""

    request: af.Request
    index: int
    inbox: "asyncio.Queue[Row | Exception]"
    random: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    state: Array | None = None
    reason: str = ""

    def take(self, token: int, logprob: float, version: int) -> None:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.request.sampling.stop_ids:
            self.reason = "stop"
        elif len(self.ids) == self.request.sampling.max_tokens:
            self.reason = "length"

    def completion(self) -> af.Completion:
        edges = np.flatnonzero(np.diff(self.versions, prepend=-1, append=-1)).tolist()
        spans = [VersionSpan(self.versions[start], start, end) for start, end in itertools.pairwise(edges)]
        logprobs = np.array(self.logprobs, np.float32)
        return af.Completion(self.index, np.array(self.ids, np.int32), logprobs, self.reason, spans)


class NumpyRollout(af.RolloutEngine):
    """``model``: a folder with weights.npz. ``max_rows``: rows decoded at once; others wait."""

    conformance_policy = NumpyPolicy

    def __init__(self, model: str, *, max_rows: int = 16) -> None:
        with np.load(Path(model) / "weights.npz", allow_pickle=False) as file:
            self._weights: Weights = dict(file)
        self.capabilities = af.Capabilities(
            swap=frozenset({"drain", "partial", "in_flight"}), token_versions=True, max_rows=max_rows, context=CONTEXT,
            logprobs=True, held_weights=True, restrictions=(),
        )  # fmt: skip
        self._version = 0
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._prefixes: dict[bytes, Array] = {}
        self._decoding: asyncio.Task[None] | None = None

    # ---- what a run calls

    async def generate(self, request: af.Request) -> AsyncIterator[af.Completion]:
        self._check_request(request)
        inbox: asyncio.Queue[Row | Exception] = asyncio.Queue()
        rows = [Row(request, index, inbox, self._random(request, index)) for index in range(request.n)]
        self._waiting.extend(rows)
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        try:
            for _ in rows:
                row = await inbox.get()
                if isinstance(row, Exception):
                    raise EngineError(f"decoding failed: {row}") from row
                yield row.completion()
        finally:  # finished, closed or cancelled: nothing of it stays
            self._drop(rows)

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        new = {name: np.array(array) for name, array in update.arrays()}  # the memory is the update's: copy
        for name in {**new, **self._weights}:
            mine, theirs = self._weights.get(name), new.get(name)
            if mine is None or theirs is None or (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
                raise WeightMismatch(f"version {update.version}: {name!r} is missing, unknown, or of another type")
        self._take(new, update.version)
        return set(new)

    async def interrupt(self) -> None:
        for row in [*self._running, *self._waiting]:
            row.reason = "aborted"
            row.inbox.put_nowait(row)
        self._drop([*self._running, *self._waiting])

    async def logprobs(self, prompt_ids: Sequence[Any], response_ids: Sequence[Any]) -> list[list[float]]:
        return [self._score(np.array(p), np.array(r)) for p, r in zip(prompt_ids, response_ids, strict=True)]

    def held_weights(self) -> Iterator[tuple[str, Array]]:
        return iter(self._weights.items())

    async def close(self) -> None:
        for row in [*self._running, *self._waiting]:
            row.inbox.put_nowait(EngineError("the engine was closed"))
        self._drop([*self._running, *self._waiting])
        if self._decoding is not None:
            await self._decoding

    # ---- how it does it

    async def _decode(self) -> None:
        """One token of every row after another, until none is left. A token takes microseconds here; that of a larger model
        belongs in a thread: await asyncio.to_thread(...)."""
        while self._waiting or self._running:
            try:
                self._token()
            except Exception as error:
                for row in self._running:
                    row.inbox.put_nowait(error)
                self._drop(self._running)
            await asyncio.sleep(0)  # here requests come and go, and weights come in

    def _token(self) -> None:
        while self._waiting and len(self._running) < self.capabilities.max_rows:
            self._running.append(self._waiting.popleft())
        rows = self._running
        states = np.stack([self._read_row(row) if row.state is None else row.state for row in rows])
        temperatures = np.array([row.request.sampling.temperature for row in rows], np.float32)
        logprobs = logprobs_of(self._weights, states, temperatures)
        ids = self._choose(rows, logprobs, temperatures)
        states = advance(self._weights, states, ids)
        for row, state, token, logprob in zip(
            rows, states, ids.tolist(), logprobs[range(len(ids)), ids], strict=True
        ):
            row.state = state
            row.take(token, float(logprob), self._version)
            if row.reason:
                row.inbox.put_nowait(row)
        self._running = [row for row in rows if not row.reason]

    def _choose(self, rows: Sequence[Row], logprobs: Array, temperatures: Array) -> Array:
        """By the inverse of the cumulative distribution; the most likely at temperature 0."""
        chance = np.array([row.random.random() for row in rows])
        drawn = (np.exp(logprobs).cumsum(1) < chance[:, None]).sum(1).clip(max=VOCABULARY - 1)
        return np.where(temperatures == 0, logprobs.argmax(1), drawn)

    def _random(self, request: af.Request, index: int) -> np.random.Generator:
        """Of each response its own; one that goes on goes on where it was."""
        seed = request.sampling.seed if request.seed is None else request.seed
        random = np.random.default_rng(None if seed is None else [seed, request.first + index])
        random.random(request.drawn)
        return random

    def _read_row(self, row: Row) -> Array:
        return self._read(np.concatenate([row.request.prompt_ids, np.array(row.ids, np.int32)]))

    def _read(self, ids: Array) -> Array:
        """The state after ``ids``, from the longest prefix that is known."""
        whole = range(len(ids) // BLOCK * BLOCK, 0, -BLOCK)
        known = next((end for end in whole if ids[:end].tobytes() in self._prefixes), 0)
        state = self._prefixes[ids[:known].tobytes()] if known else np.zeros(HIDDEN, np.float32)
        for end in range(known + 1, len(ids) + 1):
            state = advance(self._weights, state[None], ids[end - 1 : end])[0]
            if end % BLOCK == 0:
                self._prefixes[ids[:end].tobytes()] = state
        return state

    def _take(self, new: Weights, version: int) -> None:
        """Between two tokens, all at once; and nothing of the old version is kept."""
        self._weights, self._version = new, version
        self._prefixes.clear()
        for row in self._running:
            row.state = None

    def _drop(self, rows: Sequence[Row]) -> None:
        gone = set(map(id, rows))
        self._waiting = deque(row for row in self._waiting if id(row) not in gone)
        self._running = [row for row in self._running if id(row) not in gone]

    def _score(self, prompt: Array, response: Array) -> list[float]:
        state, scored = self._read(prompt.astype(np.int32)), []
        for token in response:
            scored.append(float(logprobs_of(self._weights, state[None], np.ones(1))[0, token]))
            state = advance(self._weights, state[None], np.array([token]))[0]
        return scored

    def _check_request(self, request: af.Request) -> None:
        ids, sampling = request.prompt_ids, request.sampling
        if not len(ids) or len(ids) + sampling.max_tokens > CONTEXT:
            raise EngineError(
                f"a prompt of {len(ids)} and a response of {sampling.max_tokens} tokens; 2 to {CONTEXT} fit"
            )
        if ids.min() < 0 or ids.max() >= VOCABULARY:
            raise EngineError(f"a token of the prompt is not one of {VOCABULARY}")
        if sampling.top_k or sampling.top_p < 1:
            raise EngineError("this engine draws from the whole distribution: no top_k, no top_p")


if __name__ == "__main__":
    report = Conformance("rollout", NumpyRollout).run(
        lambda result: print(f"{result.outcome:16}{result.check}  {result.detail}")
    )
    print(f"level reached: {report.level}")
