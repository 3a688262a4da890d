"""What server, producer and consumer processes of the queue tests do."""

import contextlib
import dataclasses
import os
from typing import Any

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.wire import client as WAITS


def asking_again_soon() -> None:
    """Ask a silent server again after 0.1 s: tests cannot wait as long as people can."""
    WAITS.RESEND_S = 0.1


def serve(directory: str, options: dict[str, Any]) -> None:
    """Serve a run directory; say where, and what was found there."""
    with af.serve(directory, **options) as run:
        found = run.recovered
        say(
            {
                "addresses": run.addresses,
                "found": None if found is None else {**dataclasses.asdict(found), "text": str(found)},
            }
        )
        hear()


def values_of(first: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return (np.arange(first, first + count) * np.pi) ** 0.5


def evaluate(address: str, name: str, options: dict[str, Any]) -> None:
    """Say what each expression that is heard gives in a client."""
    run = af.connect(address, name=name, **options)
    known = {"af": af, "np": np, "run": run, "queue": run.queue, "values_of": values_of}
    while True:
        try:
            value = eval(hear(), known)
        except af.AsyncFlowError as error:
            value = f"{type(error).__name__}: {error}"
        say(value)


def use_after_fork(address: str) -> None:
    """Use a queue from a forked child, which must neither reach the server nor touch the parent's memory."""
    queue = af.connect(address, name="forker").queue
    batch = queue.get("work", 4)
    loader = af.StreamDataLoader(queue, "work", ["x"], 4, collate=lambda batch: batch.rows)
    if not (child := os.fork()):
        refused = 0
        for attempt in (
            lambda: queue.put({"x": np.ones(100)}),
            lambda: batch.complete({"y": np.ones(4)}),
            lambda: batch.torch("x"),
            lambda: next(iter(loader)),
        ):
            try:
                attempt()
            except af.AsyncFlowError as error:
                refused += "fork()" in str(error)
        os._exit(refused)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    batch.complete({"y": np.zeros(4)})
    say([code, float(batch.array("x").sum())])


def put_all(address: str, first: int, puts: int, size: int) -> None:
    """Put rows number first, first + 1, ...: each put under its key; what is said was acknowledged."""
    asking_again_soon()
    queue = af.connect(address, name="producer").queue
    for number in range(first, puts):
        values = {"number": np.arange(size) + number * size, "x": values_of(number * size, size)}
        queue.put(values, key=f"put-{number}")
        say(number)
    say("done")
    hear()


def work_all(address: str, task: str) -> None:
    """Complete rows of a task until the end; say which, once it is acknowledged."""
    asking_again_soon()
    queue = af.connect(address, name="consumer").queue
    numbers = np.random.default_rng(os.getpid())
    with contextlib.suppress(af.Ended):
        while True:
            batch = queue.get(task, int(numbers.integers(1, 9)), timeout_s=60)
            rows, x = batch.array("number"), batch.array("x")
            exact = all(values_of(int(n), 1)[0] == v for n, v in zip(rows, x, strict=True))
            try:
                batch.complete({"y": x * 2}) if task == "work" else batch.ack()
            except af.LeaseLost:
                continue
            say({"numbers": rows.tolist(), "exact": bool(exact)})
    say("done")
    hear()
