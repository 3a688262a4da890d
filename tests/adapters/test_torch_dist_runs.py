"""A run whose weights go by the transport ``dist``: published, prefetched by every replica, rolled back; by several ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncflow_sdk as af
from asyncflow_sdk.types import Shard

LIMIT_S = 60.0
"""Only ends a test that would hang."""


class Replica:
    """Loads what comes, in a thread. ``loaded``: the sums of each version's tensors."""

    def __init__(self, address: str, name: str) -> None:
        self.loaded: dict[int, float] = {}
        self.changed = threading.Condition()
        self._address, self._name = address, name
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with af.connect(self._address, name=self._name) as run:
            for update in run.weight_updates(timeout_s=LIMIT_S):
                with update:
                    total = sum(float(tensor.double().sum()) for _, tensor in update)
                with self.changed:
                    self.loaded[update.version] = total
                    self.changed.notify_all()

    def has(self, version: int, total: float) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: version in self.loaded, LIMIT_S), (self._name, self.loaded)
            assert self.loaded[version] == total, (self._name, version, self.loaded)

    def end(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with af.serve(tmp_path / "run") as run:
        yield run


@contextlib.contextmanager
def replicas(run: Any, count: int) -> Iterator[list[Replica]]:
    """They end with the run."""
    found = [Replica(run.address, f"replica-{n}") for n in range(count)]
    yield found
    run.queue.end()
    for each in found:
        each.end()


def weights(version: int) -> list[tuple[str, Any]]:
    large = torch.full((300, 1000), float(version))
    return [("embed", large), ("head", large), ("bias", torch.full((7,), float(version), dtype=torch.bfloat16))]


def total(version: int) -> float:
    return version * (2 * 300_000 + 7.0)


def test_each_version_reaches_every_replica_and_an_old_one_comes_back(run: Any) -> None:
    with run.weight_publisher("dist") as publisher, replicas(run, 2) as both:
        for version in (1, 2, 3):
            publisher.publish(version, weights(version)).wait(LIMIT_S)
            for each in both:
                each.has(version, total(version))
        # when the bytes of version 2 are made current again
        again = publisher.rollback(2, "it was better").version
        # then
        for each in both:
            each.has(again, total(2))


def test_ranks_that_each_have_a_part_send_it_by_groups_of_their_own(run: Any) -> None:
    with af.connect(run.address, name="rank-1") as other, replicas(run, 2) as both:
        ranks = [
            run.weight_publisher("dist", rank=0, world_size=2),
            other.weight_publisher("dist", rank=1, world_size=2),
        ]
        whole = torch.arange(1000.0).reshape(10, 100)
        for version in (1, 2):
            parts = [
                publisher.publish(
                    version, [("w", Shard(whole[rank * 5 : rank * 5 + 5] * version, (rank * 5, 0), (10, 100)))]
                )
                for rank, publisher in enumerate(ranks)
            ]
            for part in parts:
                part.wait(LIMIT_S)
            for each in both:
                each.has(version, version * 499_500.0)
        for publisher in ranks:
            publisher.close()
