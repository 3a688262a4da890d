"""What is done with a contender, in real processes of its environment.

put and get: one process puts all batches, then another takes them all; the two times add up, so that neither hides
behind the other. stream: everybody at once. Each starts anew; the first repetition is not counted (pages, imports).
"""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from . import samples
from .contender import Client, Task, client, service

LIMIT_S = 120.0
TRAIN = "train"
STREAM = {
    "generate": Task(("uid", "at", "prompt_ids"), ("response_ids", "logprobs", "response_len")),
    "judge": Task(("uid", "at", "response_ids"), ("reward",)),
    TRAIN: Task(("uid", "at", "prompt_ids", "response_ids", "logprobs", "reward")),
}
_spawn = mp.get_context("spawn")


def put_get(name: str, *, batches: int, batch: int, take: int, nbytes: int = 0, repeats: int = 3) -> dict[str, Any]:
    """Seconds of all puts and of all takes, each repetition. ``nbytes``: of one tensor a row, copied out by the taker;
    0: small samples, of which the taker looks at every column."""
    rows, kind = batches * batch, (batch, nbytes)
    columns = ("tensor",) if nbytes else samples.SMALL
    with service(name) as served:
        address = served.start({TRAIN: Task(columns)})
        with _Child(_putter, name, address, kind) as putter, _Child(_taker, name, address) as taker:
            times = []
            for part in range(repeats + 1):
                put_s = putter.ask(part, batches)
                take_s = taker.ask(part, rows, take, nbytes)
                times.append((put_s, take_s))
        served.check(rows * (repeats + 1))
    return {
        "rows": rows,
        "bytes": rows * nbytes,
        "put_s": [t[0] for t in times[1:]],
        "take_s": [t[1] for t in times[1:]],
    }


def stream(name: str, *, batches: int, batch: int = 32, producers: int = 2, consumers: int = 2) -> dict[str, Any]:
    """Seconds from the first put to the last row through the last of three tasks."""
    rows = producers * batches * batch
    workers = producers + consumers * len(STREAM)
    with service(name) as served:
        address = served.start(STREAM)
        line = _spawn.Barrier(workers + 1)
        counts = {task: _spawn.Value("q", 0) for task in STREAM}
        makers = [_Child(_producer, name, address, number, batch, batches, line) for number in range(producers)]
        others = [
            _Child(_consumer, name, address, task, batch, rows, counts[task], line)
            for task in STREAM
            for _ in range(consumers)
        ]
        line.wait(LIMIT_S)
        began = min(maker.hear() for maker in makers)
        served.end()
        done = max(other.hear() for other in others)
        for child in (*makers, *others):
            child.close()
        served.check(rows)
    return {"rows": rows, "seconds": [done - began]}


class _Child:
    """A process and the pipe to it."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._pipe, there = _spawn.Pipe()
        self._process = _spawn.Process(target=work, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()

    def ask(self, *what: Any) -> Any:
        self._pipe.send(what)
        return self.hear()

    def hear(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"no word from {self._process.name} in {LIMIT_S:.0f} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _asked(pipe: Any) -> Any:
    """What is asked of a child, until there is nobody to ask."""
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _putter(pipe: Any, name: str, address: str, kind: tuple[int, int]) -> None:
    queue = client(name, address)
    batch, nbytes = kind
    made = [samples.large(batch, nbytes)] if nbytes else [samples.small(batch, seed) for seed in range(8)]
    prepared = [queue.prepare(columns) for columns in made]
    for part, batches in _asked(pipe):
        queue.part = part
        began = time.perf_counter()
        for number in range(batches):
            queue.put(prepared[number % len(prepared)])
        pipe.send(time.perf_counter() - began)
    queue.close()


def _taker(pipe: Any, name: str, address: str) -> None:
    queue = client(name, address)
    out = np.zeros(0, np.uint8)
    for part, rows, count, nbytes in _asked(pipe):
        queue.part = part
        if len(out) < rows * nbytes:
            out = np.ones(rows * nbytes, np.uint8)
        began = time.perf_counter()
        _take_all(queue, rows, count, out)
        pipe.send(time.perf_counter() - began)
        queue.clear()
    queue.close()


def _take_all(queue: Client, rows: int, count: int, out: Any) -> None:
    copied = 0
    while rows:
        taken = queue.take(TRAIN, count, lambda: True)
        for values in queue.values(taken):
            if len(out):
                raw = values.reshape(-1).view(np.uint8)
                out[copied : copied + len(raw)] = raw
                copied += len(raw)
        rows -= queue.rows(taken)
        queue.finish(taken)
    queue.settle()


def _producer(pipe: Any, name: str, address: str, number: int, batch: int, batches: int, line: Any) -> None:
    queue = client(name, address)
    columns = samples.pick(samples.small(batch, number), ("uid", "group", "version", "at", "prompt_ids"))
    prepared = queue.prepare(columns)
    line.wait(LIMIT_S)
    began = time.perf_counter()
    for _ in range(batches):
        queue.put(prepared)
    pipe.send(began)
    _asked_to_end(pipe)
    queue.close()


def _consumer(pipe: Any, name: str, address: str, task: str, batch: int, rows: int, count: Any, line: Any) -> None:
    queue = client(name, address)
    gives = STREAM[task].gives
    prepared: dict[int, Any] = {}
    if gives:
        prepared[batch] = queue.prepare(samples.pick(samples.small(batch, 7), gives))
    line.wait(LIMIT_S)
    last = 0.0
    while (taken := queue.take(task, batch, lambda: count.value < rows)) is not None:
        queue.values(taken)
        n = queue.rows(taken)
        if gives and n not in prepared:
            prepared[n] = queue.prepare(samples.pick(samples.small(n, 7), gives))
        queue.finish(taken, prepared[n] if gives else None)
        last = time.perf_counter()
        with count.get_lock():
            count.value += n
    pipe.send(last)
    _asked_to_end(pipe)
    queue.close()


def _asked_to_end(pipe: Any) -> None:
    for _ in _asked(pipe):
        pass
