"""A rollout engine with one fault, made from the right one of the examples.

Conformance("rollout", WrongRollout, options={"fault": "yields twice"})
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from faults import LEFT, Fault, before, leave_descriptor, leave_thread, refuses, with_fault
from own_engine import CONTEXT, HIDDEN, VOCABULARY, Array, NumpyRollout

import asyncflow_sdk as af
from asyncflow_sdk.errors import EngineError
from asyncflow_sdk.interfaces import Completions
from asyncflow_sdk.testing.kit import resources
from asyncflow_sdk.types import Ragged, VersionSpan

MADE: list[str] = []
"""The fault of each engine that was made."""


class WrongRollout(NumpyRollout):
    """``making_s``: how long it takes to be made (seconds)."""

    def __init__(self, model: str, *, fault: str, max_rows: int = 16, making_s: float = 0.0) -> None:
        if fault == "can be made once" and fault in MADE:
            raise RuntimeError("the process group is initialised already")
        super().__init__(model, max_rows=max_rows)
        self.kept, self.loading, self.first = list[Any](), False, NumpyRollout(model)
        self.capabilities = replace(self.capabilities, **SAID.get(fault, {}))
        MADE.append(fault)
        time.sleep(making_s)
        with_fault(self, FAULTS.get(fault, {}))


# ---- leave something behind


def own_pages(weights: dict[str, Any]) -> mmap.mmap:
    """As much memory as the weights take, which was not free in this process before."""
    pages = mmap.mmap(-1, sum(array.nbytes for array in weights.values()), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"\1" * len(pages))
    return pages


def leave_segment() -> mmap.mmap:
    """A new file in shared memory, of 64 KB, mapped as long as the result lives."""
    with tempfile.NamedTemporaryFile(dir=resources.SHM, prefix="wrong-engine-", delete=False) as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 16)
        LEFT.callback(os.unlink, file.name)
        return mmap.mmap(file.fileno(), 0)


def leave_process(*command: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    LEFT.callback(child.communicate)
    LEFT.callback(child.kill)
    return child


# ---- answer wrongly


def asks(change: Callable[[af.Request], af.Request]) -> Fault:
    return {"generate": lambda self, right, request: right(change(request))}


def answers(change: Callable[[af.Completion], Sequence[af.Completion | Completions]]) -> Fault:
    async def generate(
        self: WrongRollout, right: Any, request: af.Request
    ) -> AsyncIterator[af.Completion | Completions]:
        async for got in right(request):
            for each in change(got):
                yield each

    return {"generate": generate}


def packed(got: af.Completion, *reasons: str) -> Completions:
    ids, logprobs = Ragged.of([got.token_ids], np.int32), Ragged.of([got.logprobs])
    return Completions(np.array([got.index]), ids, logprobs, reasons, got.spans[0].version)


def without_stop(got: af.Completion) -> list[af.Completion]:
    end = len(got.token_ids) - (got.finish_reason == "stop")
    spans = [VersionSpan(v, s, min(e, end)) for v, s, e in got.spans if s < end]
    return [replace(got, token_ids=got.token_ids[:end], logprobs=got.logprobs[:end], spans=spans)]


async def length_first(self: WrongRollout, right: Any, request: af.Request) -> AsyncIterator[af.Completion]:
    """Look at the length, and only then at the token."""
    async for got in right(request):
        full = len(got.token_ids) == request.sampling.max_tokens
        yield replace(got, finish_reason="length") if full else got


def draws_as(change: Callable[[af.Request], dict[str, int]]) -> Fault:
    """Take the random numbers of another request."""
    return {"_random": lambda self, right, request, index: right(replace(request, **change(request)), index)}


# ---- decode wrongly


def late_stops(self: WrongRollout, right: Any) -> None:
    """Look for stop tokens from the second token on."""
    new = {row: row.request for row in [*self._running, *self._waiting] if not row.ids}
    for row, request in new.items():
        row.request = replace(request, sampling=replace(request.sampling, stop_ids=()))
    right()
    for row, request in new.items():
        row.request = request


async def slow(self: WrongRollout, right: Any, *args: Any) -> Any:
    await asyncio.sleep(0.6)
    return await right(*args)


async def wait_for_the_end(self: WrongRollout, right: Any, *args: Any) -> Any:
    while self._running or self._waiting:
        await asyncio.sleep(0.001)
    return await right(*args)


def lose_room(self: WrongRollout, right: Any) -> None:
    """Rows that were cancelled while they ran, which it keeps, still hold theirs."""
    whole = self.capabilities
    self.capabilities = replace(whole, max_rows=whole.max_rows - len(self.kept))
    with contextlib.suppress(ValueError):  # none fits
        right()
    self.capabilities = whole


def normal(logprobs: Array) -> Array:
    return logprobs - np.log(np.exp(logprobs).sum(1, keepdims=True))


def draws(change: Callable[[Array], Array]) -> Fault:
    """Draw by other probabilities than it reports."""
    return {"_choose": lambda self, right, rows, logprobs, *args: right(rows, normal(change(logprobs)), *args)}


def reports(change: Callable[[Array, Array], Array]) -> Fault:
    """Report other log-probs than it draws by; ``change``: of log-probs and temperatures."""

    def choose(self: WrongRollout, right: Any, rows: Any, logprobs: Array, temperatures: Array) -> Array:
        ids: Array = right(rows, logprobs, temperatures)
        logprobs[:] = np.minimum(change(logprobs, temperatures[:, None]), 0)
        return ids

    return {"_choose": choose}


# ---- load wrongly


def arrays(update: af.WeightUpdate) -> dict[str, Array]:
    return {name: np.array(array) for name, array in update.arrays()}


def loads(fit: Callable[..., Any]) -> Fault:
    """Hold what ``fit`` makes of an update and of the weights before, and say that all is taken."""

    async def load_weights(self: WrongRollout, right: Any, update: af.WeightUpdate) -> set[str]:
        self._take(fit(update, self._weights), update.version)
        return set(update.tensors)

    return {"load_weights": load_weights}


async def write_each(self: WrongRollout, right: Any, update: af.WeightUpdate) -> set[str]:
    """One tensor after another."""
    for name, array in update.arrays():
        self._take({**self._weights, name: array.copy()}, self._version)
    self._version = update.version
    return set(update.tensors)


async def write_some(self: WrongRollout, right: Any, update: af.WeightUpdate) -> set[str]:
    with contextlib.suppress(OSError):
        await write_each(self, right, update)
    return set(update.tensors)


async def write_apart(self: WrongRollout, right: Any, update: af.WeightUpdate) -> set[str]:
    """In a thread, while requests run."""
    return await asyncio.to_thread(asyncio.run, write_each(self, right, update))


async def load_apart(self: WrongRollout, right: Any, update: af.WeightUpdate) -> set[str]:
    """Read in a thread, while requests run, and keep what is cached of prompts that come meanwhile."""
    self._prefixes.clear()
    self.loading = True
    self._weights, self._version = await asyncio.to_thread(arrays, update), update.version
    self.loading = False
    for row in self._running:
        row.state = None
    return set(update.tensors)


SAID: dict[str, dict[str, Any]] = {
    "in flight without versions": {"token_versions": False},
    "ignores top_k": {"restrictions": ("top_k",)},
    "writes in a thread": {"swap": {"drain"}, "token_versions": False},
}
"""Each with its wrong capabilities."""
FAULTS: dict[str, Fault] = {
    "can be made once": {"_check_request": before(lambda *_: leave_descriptor())},
    "leaves a thread": {"_check_request": before(lambda *_: leave_thread(name="never-joined"))},
    "leaves a process": {"_check_request": before(lambda *_: leave_process("sleep", "3000"))},
    "leaves a server": {"_check_request": before(lambda *_: LEFT.callback(os.kill, int(leave_process(
        "setsid", "sh", "-c", "sleep 3100 > /dev/null 2>&1 & echo $!"  # detached, as servers are: it is nobody's child
    ).stdout.readline()), 9))},
    "leaves a segment": {"_check_request": before(lambda self, _: self.kept.append(leave_segment()))},
    "leaves descriptors and threads": {
        "_check_request": before(lambda *_: (leave_descriptor(), leave_thread(daemon=True)))
    },
    # ---- requests and completions
    "answers nothing": {"_check_request": lambda self, right, request: len(request.prompt_ids) and right(request)},
    "asserts prompts": {"_check_request": refuses(lambda self, request: not len(request.prompt_ids), AssertionError)},
    "refuses more": {"_check_request": refuses(
        lambda self, request: request.n + len(self._running) + len(self._waiting) > self.capabilities.max_rows
    )},
    "refuses the whole context": {"_check_request": refuses(
        lambda self, request: len(request.prompt_ids) + request.sampling.max_tokens == CONTEXT
    )},
    "ignores stops": asks(lambda request: replace(request, sampling=replace(request.sampling, stop_ids=()))),
    "looks at the first of stop_ids": asks(lambda request: replace(
        request, sampling=replace(request.sampling, stop_ids=request.sampling.stop_ids[:1])
    )),
    "looks for stops from the second token on": {"_token": late_stops},
    "looks at the length first": {"generate": length_first},
    "cuts long prompts": asks(lambda request: replace(
        request, prompt_ids=request.prompt_ids[request.sampling.max_tokens - CONTEXT :]
    )),
    "yields twice": answers(lambda got: [got, got]),
    "never yields the last": answers(lambda got: [got] * (got.index != 3)),
    "always stops": answers(lambda got: [replace(got, finish_reason="stop")]),
    "drops the stop token": answers(without_stop),
    "fewer log-probs": answers(lambda got: [replace(got, logprobs=got.logprobs[1:])]),
    "probabilities": answers(lambda got: [replace(got, logprobs=np.exp(got.logprobs))]),
    "log-probs to base 2": answers(lambda got: [replace(got, logprobs=got.logprobs / np.log(2))]),
    "log-probs of the token beside": answers(lambda got: [replace(got, logprobs=np.roll(got.logprobs, 1))]),
    "names the last version": answers(lambda got: [
        replace(got, spans=[VersionSpan(span.version, 0, len(got.token_ids)) for span in got.spans[-1:]])
    ]),
    "packs fewer reasons": answers(lambda got: [packed(got)]),
    "packs log-probs of the token beside": answers(
        lambda got: [packed(replace(got, logprobs=np.roll(got.logprobs, 1)), got.finish_reason)]
    ),
    # ---- decoding
    "takes long for all": {"_decode": slow, "load_weights": slow},
    "blocks": {"_token": lambda self, right: [
        (right(), time.sleep(0.002)) for _ in range(CONTEXT) if self._running or self._waiting
    ]},
    "throws away what it had": {"interrupt": before(
        lambda self: [vars(row).update(ids=[], logprobs=[], versions=[]) for row in self._running]
    )},
    "never interrupts": {"interrupt": wait_for_the_end},
    "goes on": {"_drop": lambda self, right, rows: None},
    "loses room": {"_token": lose_room, "_drop": before(
        lambda self, rows: self.kept.extend({*rows} & {*self._running})
    )},
    "aborts all": {"_drop": before(lambda self, rows: {*rows} & {*self._running} and [
        row.inbox.put_nowait(EngineError("aborted")) for row in self._running
    ])},
    "forgets neighbours": {"_drop": lambda self, right, rows: right(
        self._running if {*rows} & {*self._running} else rows
    )},
    "slightly off": reports(  # of what is drawn, by less than one token may be in low precision
        lambda logprobs, temperatures: logprobs - 0.5 * (temperatures > 0)
    ),
    "log-probs at temperature 1": reports(
        lambda logprobs, temperatures: normal(logprobs * np.where(temperatures == 0, 1, temperatures))
    ),
    "cuts log-probs": reports(  # of a whole draw, to the few likeliest tokens
        lambda logprobs, _: logprobs - np.log(np.exp(np.sort(logprobs, 1)[:, -8:]).sum(1, keepdims=True))
    ),
    "draws the likeliest 20": draws(lambda each: np.where(each < np.sort(each, 1)[:, [-20]], -np.inf, each)),
    "ignores top_k": asks(lambda request: replace(request, sampling=replace(request.sampling, top_k=0))),
    "draws at a higher temperature": draws(lambda logprobs: logprobs / 1.6),
    "penalises tokens of the prompt": {"_choose": lambda self, right, rows, logprobs, *args: right(
        rows, normal(logprobs - [np.isin(range(VOCABULARY), row.request.prompt_ids) for row in rows]), *args
    )},
    "one seed for all": {"_random": lambda self, right, request, index: np.random.default_rng(index)},
    "one seed for a group": {"_random": lambda self, right, request, index: right(request, 0)},
    "ignores first": draws_as(lambda request: {"first": 0}),
    "ignores drawn": draws_as(lambda request: {"drawn": 0}),
    "adds drawn to first": draws_as(lambda request: {"first": request.first + request.drawn, "drawn": 0}),
    "goes on without what it had drawn": {"_read_row": lambda self, right, row: self._read(
        row.request.prompt_ids[: len(row.request.prompt_ids) - row.request.drawn]
    )},
    "pads prompts": {"_read_row": lambda self, right, row: self._read(np.pad(  # to the longest, and nothing masks it
        ids := row.request.prompt_ids, (max(len(each.request.prompt_ids) for each in self._running) - len(ids), 0)
    ))},
    "drops the first token": {"_read": lambda self, right, ids: right(ids[1:])},
    "puts a special token twice": {"_read": lambda self, right, ids: right(np.append(np.int32(1), ids))},
    # ---- weights
    "asserts weights": {"load_weights": refuses(lambda self, update: {  # right: it may raise anything
        name: shape for name, (_, shape) in update.tensors.items()
    } != {name: array.shape for name, array in self._weights.items()}, AssertionError)},
    "never goes back": {"load_weights": refuses(lambda self, update: update.version < self._version)},
    "swallows the unknown": loads(lambda update, held: {name: arrays(update)[name] for name in held}),
    "never misses any": loads(lambda update, held: {**held, **arrays(update)}),
    "reshapes": loads(lambda update, held: {n: np.resize(arrays(update)[n], old.shape) for n, old in held.items()}),
    "transposes": loads(lambda update, held: {**(new := arrays(update)), "mix.weight": new["mix.weight"].T.copy()}),
    "keeps views": loads(lambda update, held: dict(update.arrays())),
    "writes as it reads": {"load_weights": write_each},
    "hides that it broke off": {"load_weights": write_some},
    "answers as it writes": {"load_weights": write_apart},
    "writes in a thread": {"load_weights": write_apart, **answers(lambda got: [replace(got, spans=())])},
    "waits for the end": {"load_weights": wait_for_the_end},
    "caches while it loads": {"load_weights": load_apart},
    "refuses during loads": {"load_weights": load_apart, "_check_request": refuses(lambda self, _: self.loading)},
    "ignores updates": {"_take": lambda self, right, new, version: right(self._weights, version)},
    "takes all but one": {"_take": lambda self, right, new, version: right(
        {**new, "mix.bias": self._weights["mix.bias"]}, version
    )},
    "stops following": {"_take": lambda self, right, new, version: right(new if version < 3 else self._weights, version)},
    "names the next": {"_take": lambda self, right, new, version: right(new, version + 1)},
    "keeps the cache": {"_take": lambda self, right, new, version: vars(self).update(_weights=new, _version=version)},
    "keeps states": {"_take": lambda self, right, new, version: vars(self).update(  # of rows that run
        _weights=new, _version=version, _prefixes={}
    )},
    "leaks": {"_take": before(lambda self, *_: self.kept.append(own_pages(self._weights)))},
    "leaks shared maps": {"_take": before(lambda self, *_: self.kept.append(mmap.mmap(-1, 1 << 16)))},
    "leaks segments": {"_take": before(lambda *_: leave_segment().close())},
    "leaks descriptors and threads": {"_take": before(lambda *_: (leave_descriptor(), leave_thread(daemon=True)))},
    "leaks in its worker": {"_take": before(lambda self, *_: (
        self.kept or self.kept.append(leave_process(
            sys.executable, "-c", "import sys; kept = [(bytearray(b'x' * (1 << 16)), print(flush=True)) for _ in sys.stdin]"
        )),
        self.kept[0].stdin.write(b"update\n"), self.kept[0].stdout.readline(),
    ))},
    "scores a copy": {"logprobs": lambda self, right, *args: self.first.logprobs(*args)},
    "holds a copy": {"held_weights": lambda self, right: self.first.held_weights()},
    "holds fused weights": {
        "held_weights": lambda self, right: iter([("mix.weight", np.zeros((HIDDEN, VOCABULARY), np.float32))])
    },
}  # fmt: skip
"""Each with the methods that it replaces."""
