"""What processes on two hosts do."""

import contextlib

import numpy as np
from children import hear, say

import asyncflow_sdk as af
from asyncflow_sdk.wire import client, sockets

ROWS, WIDTH = 4, 40_000


def values(number: int) -> np.ndarray:  # type: ignore[type-arg]
    """What part ``number`` of the work consists of."""
    return np.random.default_rng(number).random((ROWS, WIDTH))


def _hurry(give_up_ms: int, resend_s: float) -> None:
    """Tests cannot wait as long as people can."""
    sockets.GIVE_UP_MS, client.RESEND_S = give_up_ms, resend_s
    client.GRACE_S = 2.0


def serve(directory: str, address: str, give_up_ms: int, parts: int) -> None:
    """Serve a run with keys; when asked, say how it went."""
    _hurry(give_up_ms, 1.0)
    with af.serve(directory, address=address) as run:
        run.queue.declare("work", needs=["x"], gives=["sum"])
        run.queue.declare("end", needs=["x", "sum"])
        say(run.address)
        while hear() != "how did it go":
            pass
        ended = run.audit()
        wrong = 0
        with contextlib.suppress(af.DeadlineExceeded):
            for batch in run.queue.stream("end", ROWS * parts, timeout_s=1):
                right = np.concatenate([values(int(i) // ROWS)[int(i) % ROWS][None] for i in batch.ids])
                wrong += int((batch.array("x") != right).any(1).sum() + (batch.array("sum") != right.sum(1)).sum())
                batch.finish()
        audit = run.audit()
        say(
            {
                "put": audit.put,
                "consumed": audit.consumed,
                "failed": audit.failed,
                "before": ended.put,
                "wrong": wrong,
            }
        )
        hear()


def work(address: str, key: str, give_up_ms: int, parts: int) -> None:
    """Put parts, take them, complete them, and say so after each."""
    _hurry(give_up_ms, 1.0)
    with af.connect(address, key=key, name="far-worker") as run:
        say(["inline", run._connection.inline])
        for number in range(parts):
            run.queue.put({"x": values(number)}, key=str(number))
            with run.queue.get("work", ROWS, timeout_s=60) as batch:
                batch.complete({"sum": batch.array("x").sum(1)})
            say(number)
        hear()


def ask(address: str, key: str) -> None:
    """Ask when told to; say what became of it."""
    _hurry(60_000, 1.0)
    run = af.connect(address, key=key, name="far-asker")
    say("connected")
    hear()
    try:
        run.queue.put({"x": values(0)}, timeout_s=0.5)
    except af.AsyncFlowError as error:
        say(f"{type(error).__name__}: {error}")
    hear()
