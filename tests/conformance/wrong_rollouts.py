"""A rollout engine with one fault, made from the right one of the examples.

Conformance("rollout", WrongRollout, options={"fault": "yields twice"})

Each ``match`` lists the faults of one method, by the name that selects them.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from own_engine import CONTEXT, HIDDEN, VOCABULARY, Array, NumpyRollout, Row, Weights, logprobs_of

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completions
from asyncflow_sdk.types import Ragged, VersionSpan

LEFT = contextlib.ExitStack()
"""Frees what engines left behind; tests close it."""
MADE: list[str] = []
"""The fault of each engine that was made."""


def arrays(update: af.WeightUpdate) -> dict[str, Array]:
    return {name: np.array(array) for name, array in update.arrays()}


def leave_a_thread(**options: Any) -> None:
    end = threading.Event()
    threading.Thread(target=end.wait, args=(30,), **options).start()
    LEFT.callback(end.set)


def leave_a_descriptor() -> None:
    LEFT.callback(os.close, os.open("/dev/zero", os.O_RDONLY))


def leave_a_segment() -> str:
    """A new file in shared memory, of 64 KB."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="wrong-engine-", delete=False) as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 16)
    LEFT.callback(os.unlink, file.name)
    return file.name


def leave_a_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, **options)
    LEFT.callback(process.wait, 10)
    LEFT.callback(process.kill)
    return process


class WrongRollout(NumpyRollout):
    """``making_s``: how long it takes to be made (seconds)."""

    def __init__(self, model: str, *, fault: str, max_rows: int = 16, making_s: float = 0.0) -> None:
        if fault == "can be made once" and fault in MADE:
            raise RuntimeError("the process group is initialised already")
        super().__init__(model, max_rows=max_rows)
        self.fault, self._old, self._rows, self._loading = fault, list[Any](), 0, False
        MADE.append(fault)
        time.sleep(making_s)
        match fault:
            case "in flight without versions":
                self.capabilities = af.Capabilities(swap={"in_flight"}, token_versions=False)
            case "writes in a thread":
                self.capabilities = af.Capabilities(swap={"drain"}, token_versions=False, max_rows=16, context=256)
            case "scores a copy" | "holds a copy":
                self._copy = {name: array.copy() for name, array in self._weights.items()}
            case "leaves a thread":
                leave_a_thread(name="never-joined")
            case "leaves a daemon thread":
                leave_a_thread(daemon=True)
            case "leaves a process":
                leave_a_process(["sleep", "30"])
            case "leaves a server":  # detached, as servers are: it is nobody's child any more
                detached = ["setsid", "sh", "-c", "sleep 31 > /dev/null 2>&1 & echo $!"]
                LEFT.callback(os.kill, int(subprocess.run(detached, check=True, capture_output=True).stdout), 9)
            case "leaves a segment":
                with open(leave_a_segment(), "r+b") as file:
                    self._old.append(mmap.mmap(file.fileno(), 0))
            case "leaves descriptors" | "can be made once":
                leave_a_descriptor()
            case "leaks in its worker":  # a process of its own
                code = "import sys; kept = [(bytearray(b'x' * (1 << 16)), print(flush=True)) for _ in sys.stdin]"
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._worker: Any = leave_a_process([sys.executable, "-c", code], **pipes)

    # ---- requests

    def _check_request(self, request: af.Request) -> None:
        if self.fault == "answers nothing" and not len(request.prompt_ids):
            return
        try:
            super()._check_request(request)
        except EngineError as error:
            match self.fault:
                case "raises KeyError":
                    raise KeyError("prompt") from error
                case "asserts prompts":
                    raise AssertionError("a prompt that does not fit") from error
            raise
        whole = len(request.prompt_ids) + request.sampling.max_tokens == CONTEXT
        if self._loading or (whole and self.fault == "refuses the whole context"):
            raise EngineError("it loads" if self._loading else "too long")

    async def generate(self, request: af.Request) -> AsyncIterator[Any]:
        match self.fault:
            case "takes long for all":
                await asyncio.sleep(0.6)
            case "ignores stops":
                request = replace(request, sampling=replace(request.sampling, stop_ids=()))
            case "cuts long prompts":
                request = replace(request, prompt_ids=request.prompt_ids[request.sampling.max_tokens - CONTEXT :])
        if self.fault.startswith("packs"):
            yield self._packed([got async for got in super().generate(request)])
            return
        self._rows += request.n
        try:
            if self.fault == "refuses more" and self._rows > self.capabilities.max_rows:
                raise EngineError(f"{self._rows} rows at once, and {self.capabilities.max_rows} fit")
            async for got in super().generate(request):
                for one in self._answered(request, got):
                    yield one
        finally:
            self._rows -= request.n

    def _answered(self, request: af.Request, got: af.Completion) -> list[af.Completion]:
        kept, drawn = len(got.token_ids) - (got.finish_reason == "stop"), request.sampling.temperature > 0
        cut = [VersionSpan(v, s, min(e, kept)) for v, s, e in got.spans if s < kept]
        last = [VersionSpan(span.version, 0, len(got.token_ids)) for span in got.spans[-1:]]
        if self.fault == "yields twice" or (self.fault == "never yields the last" and got.index == 3):
            return [got, got] if self.fault == "yields twice" else []
        changes: dict[str, dict[str, Any]] = {
            "always stops": {"finish_reason": "stop"},
            "drops the stop token": {
                "token_ids": got.token_ids[:kept],
                "logprobs": got.logprobs[:kept],
                "spans": cut,
            },
            "fewer log-probs": {"logprobs": got.logprobs[1:]},
            "probabilities": {"logprobs": np.exp(got.logprobs)},
            "log-probs to base 2": {"logprobs": got.logprobs / np.log(2)},
            "log-probs of the token beside": {"logprobs": np.roll(got.logprobs, 1)},
            "slightly off": {"logprobs": got.logprobs - 0.5 * drawn},  # less than one token may be, in low precision
            "names the last version": {"spans": last},
            "writes in a thread": {"spans": ()},
        }
        return [replace(got, **changes.get(self.fault, {}))]

    def _packed(self, ended: Sequence[af.Completion]) -> Completions:
        """All responses in one, and something of them is missing."""
        reasons = [got.finish_reason for got in ended]
        logprobs = Ragged.of([got.logprobs for got in ended], np.float32)
        match self.fault:
            case "packs fewer reasons":
                reasons = reasons[1:]
            case "packs fewer log-probs":
                logprobs = Ragged.of([row[1:] for row in logprobs], np.float32)
            case "packs log-probs of others":
                logprobs = Ragged(np.roll(logprobs.values, -int(logprobs.offsets[1])), logprobs.offsets)
        ids = Ragged.of([got.token_ids for got in ended], np.int32)
        return Completions(np.array([got.index for got in ended]), ids, logprobs, reasons, ended[0].spans[0].version)

    async def interrupt(self) -> None:
        match self.fault:
            case "throws away what it had":
                for row in self._running:
                    row.ids, row.logprobs, row.versions = [], [], []
            case "never interrupts":
                while self._running or self._waiting:
                    await asyncio.sleep(0.001)
                return
        await super().interrupt()

    def _drop(self, rows: Sequence[Row]) -> None:
        runs = any(row in self._running for row in rows)
        match self.fault:
            case "loses room":
                self._old += [row for row in rows if row in self._running]
            case "aborts all" if runs:
                for row in self._running:
                    if row not in rows:
                        row.inbox.put_nowait(EngineError("aborted"))
                rows = list(self._running)
            case "forgets neighbours" if runs:
                rows = list(self._running)
            case "goes on":
                return
        super()._drop(rows)

    async def close(self) -> None:
        if self.fault == "goes on":
            self._running, self._waiting = [], deque()
            return
        await super().close()
        if self.fault == "leaks in its worker":
            self._worker.communicate()

    # ---- decoding

    async def _decode(self) -> None:
        if self.fault != "blocks":
            return await super()._decode()
        while self._waiting or self._running:
            self._token()
            time.sleep(0.002)  # noqa: ASYNC251
        return None

    def _token(self) -> None:
        rows = [*self._running, *self._waiting]
        match self.fault:
            case "pads prompts":  # on the left, to the longest, and nothing masks it
                longest = max(len(row.request.prompt_ids) for row in rows)
                for row in rows:
                    if row.state is None:
                        pad = np.zeros(longest - len(row.request.prompt_ids), np.int32)
                        row.state = self._read(np.concatenate([pad, row.request.prompt_ids]))
            case "log-probs at temperature 1":
                before = [(len(row.ids), row.state) for row in rows]
                super()._token()
                for row, (count, state) in zip(rows, before, strict=True):
                    if len(row.ids) > count:
                        state = self._read(row.request.prompt_ids) if state is None else state
                        row.logprobs[-1] = float(logprobs_of(self._weights, state[None], np.ones(1))[0, row.ids[-1]])
                return
            case "loses room":  # what was cancelled while it ran still holds its own
                room = self.capabilities.max_rows - len(self._old)
                while self._waiting and len(self._running) < room:
                    self._running.append(self._waiting.popleft())
                waiting, self._waiting = self._waiting, deque()
                if self._running:
                    super()._token()
                self._waiting = waiting
                return
        super()._token()

    def _choose(self, rows: Sequence[Row], logprobs: Array, temperatures: Array) -> Array:
        match self.fault:
            case "cuts log-probs":  # of a whole draw, to the few likeliest tokens
                ids = super()._choose(rows, logprobs, temperatures)
                logprobs -= np.log(np.exp(np.sort(logprobs, 1)[:, -8:]).sum(1, keepdims=True))
                np.minimum(logprobs, 0, out=logprobs)
                return ids
            case "draws the likeliest 20":
                logprobs = np.where(logprobs < np.sort(logprobs, 1)[:, [-20]], -np.inf, logprobs)
            case "draws at a higher temperature":
                logprobs = logprobs / 1.6
        logprobs = logprobs - np.log(np.exp(logprobs).sum(1, keepdims=True))
        return super()._choose(rows, logprobs, temperatures)

    def _random(self, request: af.Request, index: int) -> np.random.Generator:
        if self.fault == "one seed for all":
            return np.random.default_rng(index)
        return super()._random(request, 0 if self.fault == "one seed for a group" else index)

    def _read_row(self, row: Row) -> Array:
        if self.fault == "goes on without what it had drawn":
            return self._read(row.request.prompt_ids[: len(row.request.prompt_ids) - row.request.drawn])
        return super()._read_row(row)

    def _read(self, ids: Array) -> Array:
        match self.fault:
            case "drops the first token":
                ids = ids[1:]
            case "puts a special token twice":
                ids = np.concatenate([np.ones(1, np.int32), ids])
        return super()._read(ids)

    # ---- weights

    async def load_weights(self, update: af.WeightUpdate) -> set[str]:
        match self.fault:
            case "takes long for all":
                await asyncio.sleep(0.6)
            case "asserts weights":  # right: a load that does not work out may raise anything
                new = arrays(update)
                assert {name: new[name].shape for name in {**self._weights, **new}} == {
                    name: array.shape for name, array in self._weights.items()
                }
            case "swallows the unknown":
                new = arrays(update)
                self._take({name: new[name] for name in self._weights}, update.version)
                return set(new)
            case "never misses any":
                new = arrays(update)
                if any(name not in self._weights or new[name].shape != self._weights[name].shape for name in new):
                    raise EngineError("a tensor has no place")
                self._take({**self._weights, **new}, update.version)
                return set(new)
            case "reshapes":
                new = arrays(update)
                fitted = {name: np.resize(new[name], old.shape) for name, old in self._weights.items()}
                self._take(fitted, update.version)
                return set(new)
            case "writes as it reads" | "hides that it broke off":
                with contextlib.suppress(*([OSError] if self.fault.startswith("hides") else [])):
                    for name, array in update.arrays():
                        self._take({**self._weights, name: array.copy()}, self._version)
                    self._version = update.version
                return set(update.tensors)
            case "keeps views":
                self._take(dict(update.arrays()), update.version)
                return set(update.tensors)
            case "never goes back" if update.version < self._version:
                raise EngineError("an older version")
            case "waits for the end":
                while self._running or self._waiting:
                    await asyncio.sleep(0.001)
            case "answers as it writes":  # requests that come between two tensors
                for name, array in arrays(update).items():
                    self._take({**self._weights, name: array}, self._version)
                    await asyncio.sleep(0.002)
                self._version = update.version
                return set(update.tensors)
            case "writes in a thread":  # though it says that it is drained first
                await asyncio.to_thread(self._write, update)
                return set(update.tensors)
            case "caches while it loads":  # what comes meanwhile is read by the old weights into the new cache
                self._prefixes.clear()
                self._weights = await asyncio.to_thread(arrays, update)
                self._version = update.version
                for row in self._running:
                    row.state = None
                return set(self._weights)
            case "refuses during loads":
                self._loading = True
                try:
                    self._take(await asyncio.to_thread(arrays, update), update.version)
                finally:
                    self._loading = False
                return set(update.tensors)
        return await super().load_weights(update)

    def _write(self, update: af.WeightUpdate) -> None:
        for name, array in update.arrays():
            self._weights = {**self._weights, name: np.array(array)}
            self._prefixes.clear()

    def _take(self, new: Weights, version: int) -> None:
        old = self._weights
        match self.fault:
            case "ignores updates":
                self._version = version
                return
            case "takes all but one":
                new = {**new, "mix.bias": old["mix.bias"]}
            case "keeps the cache":
                self._weights, self._version = new, version
                for row in self._running:
                    row.state = None
                return
            case "keeps states":  # of rows that run
                self._weights, self._version = new, version
                self._prefixes.clear()
                return
            case "stops following":  # after two updates
                self._old.append(version)
                new = new if len(self._old) < 3 else old
            case "names the next":
                version += 1
            case "names the first":
                version = 0
            case "leaks":
                self._old.append(old)
            case "leaks shared maps":
                self._old.append(mmap.mmap(-1, 1 << 16))
            case "leaks segments":
                leave_a_segment()
            case "leaks descriptors":
                leave_a_descriptor()
            case "leaks threads":
                leave_a_thread(daemon=True)
            case "leaks in its worker":
                self._worker.stdin.write(b"update\n")
                self._worker.stdin.flush()
                self._worker.stdout.readline()  # it has it
        super()._take(new, version)

    def _score(self, prompt: Array, response: Array) -> list[float]:
        if self.fault != "scores a copy":
            return super()._score(prompt, response)
        held, self._weights = self._weights, self._copy
        self._prefixes.clear()
        try:
            return super()._score(prompt, response)
        finally:
            self._weights = held
            self._prefixes.clear()

    def held_weights(self) -> Iterator[tuple[str, Array]]:
        match self.fault:
            case "holds a copy":
                return iter(self._copy.items())
            case "holds fused weights":
                return iter([("mix.weight", np.zeros((HIDDEN, VOCABULARY), np.float32))])
        return super().held_weights()


class PromisesScores(WrongRollout):
    """Its capabilities name a method that it does not have."""

    logprobs = af.RolloutEngine.logprobs  # type: ignore[assignment]
