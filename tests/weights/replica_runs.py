"""What the tests of replicas share: a served queue, a trainer, a replica, and what the run said of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.types import Probe
from asyncflow_sdk.types.events import Event, WeightState
from asyncflow_sdk.weights import Staged, WeightPublisher, WeightUpdates

LIMIT_S = 30.0
"""Only ends a test that would hang."""
SEQUENCES = ((1, 2), (3,)), ((4, 5), (6,))


def model(version: int) -> dict[str, Any]:
    return {
        "w": np.full(1000, version, np.float32),
        "b": np.full((3, 5), version, ml_dtypes.bfloat16),
        "s": np.array(version, np.int64),
    }


def probe_of(steps: float) -> Probe:
    """What the engine ``echo`` passes after so many steps."""
    return Probe(*SEQUENCES, ((-steps, -steps), (-steps,)))


def values(update: Any) -> set[float]:
    return {float(v) for _, array in update.arrays() for v in np.asarray(array, np.float64).reshape(-1)}


class Served:
    """A queue that is served here. ``told``: what was said of weights, as (worker, version, state)."""

    def __init__(self, **limits: Any) -> None:
        self.events: list[Event] = []
        self.server = QueueServer([], on_event=self.events.append)
        self._connections: list[Connection] = []
        self.trainer = self.client("trainer")
        self.trainer.configure(**limits)
        self.publisher = WeightPublisher(self.trainer)

    def client(self, name: str, **options: Any) -> TransferQueue:
        self._connections.append(Connection(self.server.addresses[-1], name, **options))
        return open_queue(self._connections[-1])

    def publish(self, version: int, weights: dict[str, Any] | None = None, **options: Any) -> None:
        self.publisher.publish(version, (weights or model(version)).items(), **options).wait(LIMIT_S)

    def states(self, state: str, worker: str = "replica") -> list[WeightState]:
        return [e for e in self.events if isinstance(e, WeightState) and (e.worker, e.state) == (worker, state)]

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.publisher.close()
        for connection in self._connections:
            connection.close()
        self.server.close()


@contextlib.contextmanager
def served(**limits: Any) -> Iterator[Served]:
    run = Served(**limits)
    try:
        yield run
    finally:
        run.close()


class Replica:
    """Weight updates on the running event loop, and waiting for what they come to."""

    def __init__(self, queue: TransferQueue, loaded: int | None = None, **options: Any) -> None:
        self._changed = asyncio.Event()
        self.updates = WeightUpdates(queue, loaded, self._changed.set, **options)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        async def come() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        try:
            await asyncio.wait_for(come(), LIMIT_S)
        except asyncio.TimeoutError:
            raise AssertionError(f"never came: {what}") from None

    async def staged(self, version: int) -> Staged:
        await self.until(lambda: self.updates.staged and self.updates.staged.version == version, f"version {version}")
        assert self.updates.staged is not None
        return self.updates.staged

    async def load(self, version: int) -> Staged:
        """Wait for a version, ask, and commit it as an engine would that takes all."""
        await self.staged(version)
        assert await self.updates.permission(version)
        update = self.updates.take()
        await self.updates.commit(update, set(update.tensors))
        return update


@contextlib.asynccontextmanager
async def replica(queue: TransferQueue, loaded: int | None = None, **options: Any) -> AsyncIterator[Replica]:
    made = Replica(queue, loaded, **options)
    made.updates.start()
    try:
        yield made
    finally:
        await made.updates.close()
        await queue._port.connection.wire.aclose_loop()
