"""What server, producer and consumer processes of the journal's tests do."""

import os
import resource
from pathlib import Path

from children import say

from asyncflow_sdk.errors import MemoryFull
from asyncflow_sdk.queue import Connection, QueueServer, open_queue


def fill_a_small_disk(path: str) -> None:
    """Put until the journal's disk is full; say what was acknowledged, and what another server finds."""
    server = QueueServer([], journal=Path(path), durability="process")
    queue = open_queue(Connection(server.addresses[1], "producer"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, resource.RLIM_INFINITY))
    acknowledged, refused = 0, ""
    key = "k" * 200_000
    while not refused:
        try:
            queue.put({"x": [acknowledged]}, key=f"{acknowledged}{key}")
            acknowledged += 1
        except MemoryFull as full:
            refused = f"MemoryFull: {full}"
    put = queue.audit().put
    blocks = queue._port.connection.arena.blocks
    copy = Path(path).with_name("copy")
    os.system(f"cp -r --sparse=always {path} {copy}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    queue.put({"x": [acknowledged]})
    after = queue.audit().put
    from asyncflow_sdk.queue.journal import Recorded
    from asyncflow_sdk.queue.protocol import decode_call

    (name,) = copy.glob("journal-*")
    bodies = [decode_call(entry.record.body).command for entry in Recorded(name).entries()]
    recovered = sum(type(command).__name__ == "Put" for command in bodies)
    say(
        {
            "refused": refused, "acknowledged": acknowledged, "put": put, "after": after, "recovered": recovered,
            "live_blocks": blocks,
        }
    )  # fmt: skip
    queue.end(cancel=True)
    server.close()
