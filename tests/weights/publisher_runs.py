"""What the tests of publishers share: a served queue, senders that do as they are told, and processes that publish."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from children import hear, say

from asyncflow_sdk.interfaces import Host
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.queue import Connection, QueueServer, TransferQueue, open_queue
from asyncflow_sdk.queue._once import drive
from asyncflow_sdk.types import Manifest, Probe, Shard
from asyncflow_sdk.types.events import Event
from asyncflow_sdk.weights import Update, WeightPublisher
from asyncflow_sdk.weights.shm import ShmReceiver, ShmSender, ShmTransport

LIMIT_S = 30.0
"""Only ends a test that would hang."""
PROBE = Probe(((1,),), ((2,),), ((-0.5,),))


class Served:
    """A queue that is served here."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.server = QueueServer([], on_event=self.events.append)
        self._connections: list[Connection] = []

    @property
    def address(self) -> str:
        return self.server.addresses[1]

    def client(self, name: str = "trainer", **options: Any) -> TransferQueue:
        self._connections.append(Connection(self.address, name, **options))
        return open_queue(self._connections[-1])

    def newest(self) -> Update:
        """The current version, as a replica gets it."""
        told = drive(self.client("replica")._port.send(cmd.AwaitVersion(after=-1)))
        receiver = ShmReceiver(self.server.directory.path)
        fetched = [
            receiver.fetch(msgspec.msgpack.decode(part.manifest, type=Manifest), part.where, timeout_s=LIMIT_S)
            for part in told.parts
        ]
        receiver.close()
        return Update(told.version, fetched)

    def held(self) -> int:
        """Bytes that files of weights really take."""
        return sum(path.stat().st_blocks * 512 for path in self.server.directory.path.glob("w*"))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.server.close()


class Gated(ShmTransport):
    """Sends when ``gate`` is open; raises what ``problem`` says, once."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.sending = threading.Event()
        self.problem: BaseException | None = None

    def sender(self, host: Host) -> ShmSender:
        assert host.directory is not None
        sender, send = ShmSender(host.directory, host.name, rank=host.rank), ShmSender.send

        def gated(manifest: Manifest) -> bytes:
            self.sending.set()
            assert self.gate.wait(LIMIT_S)
            if self.problem is not None:
                problem, self.problem = self.problem, None
                raise problem
            return send(sender, manifest)

        sender.send = gated  # type: ignore[method-assign]
        return sender


def full(value: float, count: int = 1000) -> list[tuple[str, Any]]:
    return [("w", np.full(count, value, np.float32)), ("b", np.full((3, 5), value, np.float16))]


def broken() -> Iterator[tuple[str, Any]]:
    """Weights of an engine that fails while they are asked for."""
    yield "w", np.zeros(10)
    raise RuntimeError("the engine broke")


def value_of(update: Update) -> float:
    (value,) = {float(v) for _, array in update.arrays() for v in np.asarray(array, np.float64).reshape(-1)}
    return value


def crash_while_publishing(address: str, first: int, count: int) -> None:
    """Publish two versions; in the middle of the third, say what is held, and wait to be killed."""
    publisher = WeightPublisher(open_queue(Connection(address, "trainer")))
    for version in (first, first + 1):
        publisher.publish(version, full(version, count)).wait(LIMIT_S)

    def weights() -> Iterator[tuple[str, Any]]:
        yield from full(99, count)
        say(publisher.nbytes)
        hear()

    publisher.publish(first + 2, weights())


def publish_a_half(address: str, rank: int) -> None:
    """Publish this rank's half of a tensor of 10 under the numbers that are heard; say what came of it. Of a negative one, say
    so in the middle of it and wait."""
    publisher = WeightPublisher(
        open_queue(Connection(address, f"rank{rank}")), rank=rank, world_size=2, timeout_s=LIMIT_S
    )
    say("ready")
    while (version := hear()) is not None:

        def weights(version: int = version) -> Iterator[tuple[str, Any]]:
            half = np.full(5, abs(version), np.float32)
            yield "w", Shard(half, (5 * rank,), (10,))
            if version < 0:
                say("in the middle")
                hear()

        try:
            publisher.publish(abs(version), weights()).wait(LIMIT_S)
            say("published")
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
    publisher.close()
    say("closed")
