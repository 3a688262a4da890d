"""What server, producer and consumer processes of the journal's tests do."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
from children import hear, say

from asyncflow_sdk.errors import DeadlineExceeded, Ended, LeaseLost
from asyncflow_sdk.queue import Connection, QueueServer, open_queue, recovery, snapshot
from asyncflow_sdk.queue.journal import Journal, Recorded
from asyncflow_sdk.queue.protocol import decode_call


def fill_a_small_disk(path: str) -> None:
    """Put until the journal's disk is full; say what was acknowledged, and what another server finds."""
    server = QueueServer([], journal=Path(path), durability="process")
    queue = open_queue(Connection(server.addresses[1], "producer"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, resource.RLIM_INFINITY))
    acknowledged, refused = 0, ""
    key = "k" * 200_000
    while not refused:
        try:
            queue.put({"x": [acknowledged]}, key=f"{acknowledged}{key}", timeout_s=0.0)
            acknowledged += 1
        except DeadlineExceeded as full:
            refused = str(full)
    put = queue.audit().put
    blocks = queue._port.connection.arena.blocks
    copy = Path(path).with_name("copy")
    os.system(f"cp -r --sparse=always {path} {copy}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    queue.put({"x": [acknowledged]})
    after = queue.audit().put
    (name,) = copy.glob("journal-*")
    bodies = [decode_call(entry.record.body).command for entry in Recorded(name).entries()]
    recovered = sum(type(command).__name__ == "Put" for command in bodies)
    queue.end(cancel=True)
    server.close()
    say(
        {
            "refused": refused, "acknowledged": acknowledged, "put": put, "after": after, "recovered": recovered,
            "live_blocks": blocks,
        }
    )  # fmt: skip


def serve_and_die(path: str, writes: int, moment: str, durability: str = "process") -> None:
    """Serve a run; about the ``writes``-th commit of the journal, kill -9 at a moment."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write, commit, left = Journal._write, Journal.commit, [writes]

    def counted(journal: Journal) -> None:
        if left[0] <= 0 and moment == "torn":
            os.pwrite(journal._fd, bytes(journal._buffer[: len(journal._buffer) * 2 // 3]), journal._written)
        if left[0] <= 0 and moment in ("torn", "before"):
            die()
        write(journal)

    def committed(journal: Journal) -> bool:
        left[0] -= bool(journal._buffer)
        done = commit(journal)
        if left[0] <= 0 and moment == "after":
            die()  # written, and no answer has left
        return done

    def snapshot_written(*arguments: object) -> None:
        left[0] -= 8  # as rare as so many commits
        if left[0] <= 0 and moment == "before the snapshot":
            die()
        write_snapshot(*arguments)  # type: ignore[arg-type]
        if left[0] <= 0 and moment == "after the snapshot":
            die()  # it counts, and what it replaces is still there

    write_snapshot, snapshot.write = snapshot.write, snapshot_written
    recovery.LEAST_BYTES, recovery.GROWTH = 1 << 12, 0  # snapshots come often
    Journal._write, Journal.commit = counted, committed  # type: ignore[method-assign]
    server = QueueServer([], journal=Path(path), durability=durability)
    found = server.recovered
    say(
        {
            "address": server.addresses[1],
            "differing": found.differing if found else 0,
            "lost": found.lost if found else 0,
            "damaged": found.damaged if found else "",
        }
    )
    hear()
    say("closing")
    server.close()


def patient() -> None:
    """Ask again often: the server comes back soon."""
    from asyncflow_sdk.wire import client

    client.RESEND_S = 0.1


def values_of(first: int, count: int) -> np.ndarray:  # type: ignore[type-arg]
    return (np.arange(first, first + count) * np.pi) ** 0.5


def put_all(address: str, first: int, puts: int, size: int) -> None:
    """Put rows number first, first + 1, ...: each put under its key; what is said was acknowledged."""
    patient()
    queue = open_queue(Connection(address, "producer"))
    for number in range(first, puts):
        queue.put(
            {"number": np.arange(size) + number * size, "x": values_of(number * size, size)}, key=f"put-{number}"
        )
        say(number)
    say("done")
    hear()


def work_all(address: str, task: str) -> None:
    """Complete rows of a task until the end; say which, once it is acknowledged."""
    patient()
    queue = open_queue(Connection(address, "consumer"))
    rng = np.random.default_rng(os.getpid())
    try:
        while True:
            batch = queue.get(task, int(rng.integers(1, 9)), timeout_s=60)
            numbers, x = batch.array("number"), batch.array("x")
            exact = all(values_of(int(n), 1)[0] == v for n, v in zip(numbers, x, strict=True))
            try:
                batch.complete({"y": x * 2}) if task == "work" else batch.ack()
            except LeaseLost:
                continue
            say({"numbers": numbers.tolist(), "exact": bool(exact)})
    except Ended:
        say("done")
    hear()


def hold(address: str, task: str) -> None:
    """Hold rows of a task until it is killed."""
    patient()
    queue = open_queue(Connection(address, "holder"))
    say(queue.get(task, 4).rows)
    hear()


def produce_and_wait(address: str) -> None:
    """Wait for rows of a task; say what came."""
    patient()
    queue = open_queue(Connection(address, "waiter"))
    queue.declare("other", needs=["z"])
    say("waits")
    say(queue.get("other", 3, timeout_s=60).array("z").tolist())
    hear()
