"""What server, producer and consumer processes of the queue tests do."""

import dataclasses
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
