"""Version directories for tests: what is published into them, what is found there, and processes that publish."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.errors import ConfigError
from asyncflow_sdk.testing.ends import Ends
from asyncflow_sdk.weights import transport_named

FIRST = "model-00001-of-00003.safetensors"


def tensors(seed: int = 0, count: int = 6) -> dict[str, Any]:
    """Of sizes that need padding in memory."""
    numbers = np.random.default_rng(seed)
    return {f"layer.{n}": numbers.integers(0, 256, 30_000 + 7 * n, np.uint8) for n in range(count)}


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if not each.name.startswith("."))


def publishing(path: str | Path, run: str = "") -> Ends:
    """Both ends of the transport ``file``, of a run of this name."""
    return Ends(lambda: transport_named("file", path=path), lambda: transport_named("file"), run=run)


def publish_and_stay(path: str, fork: bool = False) -> None:
    """Publish version 1, print this process's number, or that of a child that is forked and does nothing; stay alive."""
    with publishing(path, "run") as ends:
        ends.publish(1, {"w": np.zeros(1000, np.uint8)})
        child = os.fork() if fork else os.getpid()
        while not child:
            signal.pause()
        say(child)
        hear()


def publish_in_a_run(directory: str, path: str) -> None:
    """Publish version 1 in a durable run, say so, and stay alive."""
    with af.serve(directory, durability="process") as run:
        run.weight_publisher("file", path=path).publish(1, {"w": np.ones(4)}).wait()
        say("there")
        hear()


def attempt(path: str, run: str = "") -> None:
    """Print why no other process can publish there; "" when one can."""
    try:
        with publishing(path, run):
            say("")
    except ConfigError as error:
        say(str(error))
