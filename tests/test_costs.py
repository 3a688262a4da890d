"""Function calls of a put, a lease, a read and a completion of 32 rows: a cost without the machine's load in it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import pytest
from waiting import until

import asyncflow_sdk as af

ROWS = 32
REPEATS = 20
MAX_CALLS = {"put": (108, 141), "lease": (100, 137), "read": (6, 0), "complete": (110, 143)}
"""By verb: calls of Python and C functions by the client, and by the server. Later Pythons make fewer. ADR 70 says when a
limit may rise."""


class Calls:
    """Counts of function calls. A call of the server's ``poll`` is not counted."""

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


def usual(calls: Calls, verb: Callable[[], object]) -> tuple[int, int]:
    """Return the median numbers of calls of client and server for one use of a verb. Some uses include a timer of the server."""
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
    return median_low(client), median_low(server)


def test_verbs_take_no_more_calls_than_they_did(counted: tuple[Calls, af.TransferQueue]) -> None:
    calls, queue = counted
    rows, scores = {"x": np.arange(float(ROWS))}, {"y": np.ones(ROWS)}
    leased: list[Any] = []
    read: list[Any] = []

    def read_one() -> None:
        leased[-1]["x"]
        read.append(leased.pop())

    found = {
        "put": usual(calls, lambda: queue.put(rows)),
        "lease": usual(calls, lambda: leased.append(queue.get("score", ROWS, at_least=ROWS))),
        "read": usual(calls, read_one),
        "complete": usual(calls, lambda: read.pop().complete(scores)),
    }

    more = {verb: counts for verb, counts in found.items() if np.greater(counts, MAX_CALLS[verb]).any()}
    assert more == {}, f"of {MAX_CALLS}"
