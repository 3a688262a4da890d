"""What processes of the data loader tests do."""

import os

from children import hear, say

from asyncflow_sdk.queue import Connection, StreamDataLoader, open_queue


def load_after_fork(address: str) -> None:
    """Iterate in a child made by fork(), as a worker process of a DataLoader does, and then here."""
    queue = open_queue(Connection(address, "forker"))
    loader = StreamDataLoader(queue, "train", ["x"], 4, collate=lambda batch: batch.rows)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            next(iter(loader))
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    say([os.read(reader, 4096).decode(), len(list(loader))])


def be_rank_1(address: str, prefetch: int) -> None:
    """Be rank 1 of 2: say each batch, and go on when told to."""
    queue = open_queue(Connection(address, "rank-1"))
    loader = StreamDataLoader(
        queue,
        "train",
        ["x"],
        rank=1,
        world_size=2,
        prefetch=prefetch,
        collate=lambda batch: batch.array("x").tolist(),
    )
    for values in loader:
        say(values)
        hear()
    say("over")
    hear()
