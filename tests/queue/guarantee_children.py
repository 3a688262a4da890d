"""What processes of the guarantee tests do."""

import multiprocessing

import numpy as np
from children import hear, say

from asyncflow_sdk.queue import Connection, open_queue


def put_with_key(address: str, key: str) -> None:
    """Put ten rows under a key; the answer may never come."""
    queue = open_queue(Connection(address, "producer-child", insecure=True))
    say("connected")
    hear()
    rows = queue.put({"x": np.arange(10.0)}, key=key)
    say([rows.first, rows.count, rows.again])
    hear()


def hold(address: str, task: str) -> None:
    """Lease a row, say so, and wait to be killed."""
    batch = open_queue(Connection(address, "victim")).get(task, timeout_s=30)
    say(batch.ids.tolist())
    hear()


def _square(address: str) -> None:
    queue = open_queue(Connection(address, "spawned"))
    with queue.get("work", 5) as batch:
        batch.complete({"y": batch.array("x") ** 2})


def spawn(address: str) -> None:
    """Hold a connection, and let a spawned child use one of its own."""
    queue = open_queue(Connection(address, "spawner"))
    queue.audit()
    child = multiprocessing.get_context("spawn").Process(target=_square, args=(address,))
    child.start()
    child.join(60)
    say([child.exitcode, queue.audit().put])


def churn(address: str, rows: int) -> None:
    """Put rows of 40 KB, each full of its number, one after another."""
    queue = open_queue(Connection(address, "churner"))
    for number in range(rows):
        queue.put({"x": np.full((1, 5000), float(number))}, timeout_s=60)
    say("done")
    hear()
