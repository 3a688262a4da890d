"""What producer, consumer and server processes of the queue tests do."""

from pathlib import Path

import numpy as np
from children import hear, say

from asyncflow_sdk.errors import AsyncFlowError
from asyncflow_sdk.queue import Connection, QueueServer, blocks, open_queue
from asyncflow_sdk.weights import WeightPublisher
from asyncflow_sdk.wire import fresh_keys, server_keys


def values_of(first: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.arange(first, first + count, dtype=np.float64) ** 0.5


def consume(address: str, count: int) -> None:
    """Lease rows and say them; complete them when told to, and say what came of it and what the view shows."""
    queue = open_queue(Connection(address, "consumer-child"))
    batch = queue.get("work", count)
    say({"ids": batch.ids.tolist(), "token": batch.token})
    hear()
    try:
        batch.complete({"y": np.arange(batch.rows) - 1.0})
        outcome = "completed"
    except AsyncFlowError as error:
        outcome = f"{type(error).__name__}: {error}"
    say({"outcome": outcome, "same": batch.array("x").tobytes() == values_of(int(batch.ids[0]), count).tobytes()})
    hear()


def produce(address: str, count: int) -> None:
    """Put rows, say so, and wait to be killed."""
    queue = open_queue(Connection(address, "producer-child"))
    rows = queue.put({"x": values_of(0, count), "text": [f"row {i} \u00e4\0" for i in range(count)]})
    say([rows.first, rows.count])
    hear()


def write_only(address: str) -> None:
    """Write a block as a put does, and wait to be killed before it is sent."""
    connection = Connection(address, "producer-child")
    for _ in range(3):
        block, _ = blocks.write(connection.arena, blocks.pack_columns({"x": values_of(0, 200_000)}))
    say([connection.session, block.segment])
    hear()


def serve() -> None:
    """Serve a run until killed."""
    server = QueueServer(["tcp://127.0.0.1:0"], keys=fresh_keys())
    queue = open_queue(Connection(server.addresses[0], "driver"))
    queue.put({"x": values_of(0, 10_000)})
    say([str(server.directory.path), server.addresses[1]])
    hear()


def serve_durably(directory: str, address: str, durability: str) -> None:
    """Serve a run that outlives its server, until killed."""
    home = Path(directory)
    server = QueueServer(
        [address], keys=server_keys(home / "server.key", home / "run.key"), journal=home, durability=durability
    )
    say(server.addresses[-1])
    hear()


def publish(address: str, version: int) -> None:
    """Publish a version and wait to be killed."""
    connection = Connection(address, "trainer-child")
    publisher = WeightPublisher(open_queue(connection))
    publisher.publish(version, [("w", np.full(1000, version, np.float32))]).wait()
    say(connection.session)
    hear()


def use_after_fork(address: str) -> None:
    """Put from a forked child, which must neither reach the server nor touch the parent's memory."""
    import os

    queue = open_queue(Connection(address, "forker"))
    batch = queue.get("work", 4)
    arena = queue._port.connection.arena
    block, space = blocks.write(arena, blocks.pack_columns({"x": np.zeros(100)}))
    if not (child := os.fork()):
        refused = 0
        for attempt in (
            lambda: queue.put({"x": np.ones(100)}),
            lambda: batch.complete({"y": np.ones(4)}),
            lambda: batch.torch("x"),
        ):
            try:
                attempt()
            except AsyncFlowError as error:
                refused += "fork()" in str(error)
        os._exit(refused)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    batch.complete({"y": np.zeros(4)})
    say([code, float(space.memory[64:].sum()), block.rows])
