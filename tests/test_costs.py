"""Function calls of a put, a lease, a read and a completion of 32 rows: the cost that does not depend on the machine's load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af

ROWS = 32
REPEATS = 20
MAX_CALLS = {"put": (182, 341), "lease": (158, 313), "read": (6, 0), "complete": (177, 357)}
"""By verb: calls of Python and C functions by the client, and by the server. ADR 70 says when one may rise."""


class Calls:
    """Calls in the threads that profile by it, but for those that wait for a message."""

    def __init__(self) -> None:
        self.client = self.server = 0
        self.waits = False

    def in_client(self, _: Any, event: str, __: Any) -> None:
        self.client += event in ("call", "c_call")

    def in_server(self, frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_name == "poll" and event in ("call", "return"):
            self.waits = event == "call"
        elif not self.waits:
            self.server += event in ("call", "c_call")


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[tuple[Calls, af.TransferQueue]]:
    """A served queue whose server counts its calls from its first one on."""
    calls = Calls()
    threading.setprofile(calls.in_server)
    try:
        run = af.serve(tmp_path / "run")
    finally:
        threading.setprofile(None)
    with run:
        run.queue.declare("score", needs=["x"], gives=["y"])
        yield calls, run.queue


def lowest(calls: Calls, verb: Callable[[], object]) -> tuple[int, int]:
    """Return the fewest calls of client and server for one use of a verb. Others had a timer of the server beside them."""
    client, server = [], []
    for _ in range(REPEATS):
        until(lambda: calls.waits, "a server that waits for a request")
        before = calls.client, calls.server
        sys.setprofile(calls.in_client)
        try:
            verb()
            client.append(calls.client - before[0])
        finally:
            sys.setprofile(None)
        until(lambda: calls.waits, "the end of the server's work")
        server.append(calls.server - before[1])
    return min(client), min(server)


def test_verbs_take_no_more_calls_than_they_did(counted: tuple[Calls, af.TransferQueue]) -> None:
    calls, queue = counted
    rows, scores = {"x": np.arange(float(ROWS))}, {"y": np.ones(ROWS)}
    leased: list[Any] = []
    read: list[Any] = []

    def read_one() -> None:
        leased[-1]["x"]
        read.append(leased.pop())

    found = {
        "put": lowest(calls, lambda: queue.put(rows)),
        "lease": lowest(calls, lambda: leased.append(queue.get("score", ROWS, at_least=ROWS))),
        "read": lowest(calls, read_one),
        "complete": lowest(calls, lambda: read.pop().complete(scores)),
    }

    print(found, sum(map(sum, found.values())))
    assert {verb: most for verb, most in found.items() if most > MAX_CALLS[verb]} == {}
