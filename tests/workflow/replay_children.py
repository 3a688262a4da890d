"""A worker of the replay's tests."""

from children import hear, say

from asyncflow_sdk.queue import Connection, open_queue


def take_and_wait(address: str) -> None:
    """Hold rows until it is killed."""
    queue = open_queue(Connection(address, "taker"))
    batch = queue.get("work", 8)
    assert batch.rows == 8
    say("has rows")
    hear()
