"""A receiver of two ranks on two hosts, in little: each fetches its slices, and both load a version or neither."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.workflow.workers.rank_communicator import RankCommunicator

LIMIT_S, ROW = 100.0, 1 << 16
Weights = dict[str, np.ndarray[Any, Any]]


class Rank:
    """A rank of ``count``: its share of the first dimension of ``up`` and ``embed``, and all else."""

    def __init__(self, rank: int, count: int = 2) -> None:
        self.rank, self.count = rank, count

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
        if name not in ("up", "embed"):
            return None
        return self.rank * shape[0] // self.count, (self.rank + 1) * shape[0] // self.count

    def of(self, weights: Mapping[str, np.ndarray[Any, Any]]) -> Weights:
        return {name: array[slice(*(self(name, array.shape) or (None,)))] for name, array in weights.items()}


def model(seed: int, rows: int = 8) -> Weights:
    """Two tensors that ranks share, and two that each has. In most tests a row of the first is a bucket."""
    random = np.random.default_rng(seed)
    return {
        "up": random.integers(0, 256, (rows, ROW), np.uint8), "down": random.integers(0, 256, (2, ROW), np.uint8),
        "embed": random.integers(0, 256, (2 * rows, ROW // 4), np.uint16), "norm": np.full(100, seed),
    }  # fmt: skip


def train(address: str, directory: str) -> None:
    """Serve a run, and publish a version with each line."""
    with af.serve(directory, address=address) as run, run.weight_publisher("tcp") as publisher:
        say("ready")
        for version in (1, 2):
            hear()
            publisher.publish(version, model(version, 128)).wait(LIMIT_S)
            say(version)
        hear()


def receive(address: str, key: str, rank: int) -> None:
    """Load each version as one of two ranks: on both or on none. Rank 1 fails when it first loads version 2."""
    fails = rank == 1
    with af.connect(address, key=key, name=f"rank-{rank}") as run:
        ranks = RankCommunicator(run.queue, "receiver", rank, 2)
        with run.weight_updates(slices=Rank(rank), timeout_s=LIMIT_S) as updates:
            say("ready")
            for update in updates:
                if len(set(ranks.all_gather("its version", b"%d" % update.version))) > 1:
                    continue  # a rank has a newer one
                try:
                    with update, ranks.all_or_none(f"version {update.version}"):
                        taken = {name: array.copy() for name, array in update.arrays()}
                        if update.version == 2 and fails:
                            raise ValueError("rank 1 cannot load it")
                except Exception as error:
                    fails = False
                    say([updates.loaded, str(error)])
                    continue
                wanted = Rank(rank).of(model(update.version, 128))
                say([updates.loaded, all(np.array_equal(taken[name], wanted[name]) for name in wanted)])
