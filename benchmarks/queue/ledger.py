"""The control plane alone, in one process: what an operation costs as rows live, are leased, and requests wait.

A turn is one lease, one completion and one put of 32 rows each, with the tick and the look at the next deadline that
a server does between requests. The queues of all sizes are alive at once and take turns, so that a machine that is
slow for a moment is slow for all.
"""

from __future__ import annotations

import json
import statistics as st
import sys
import time
from typing import Any

from asyncflow_sdk.ledger import Ledger, TaskSpec
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec

ROWS = 32
WAITING = 256
X, Y = {"x": ColumnSpec("ragged", "int32")}, {"y": ColumnSpec("fixed", "float32")}


class Queue:
    """A ledger with ``live`` rows ready for a task; with ``held``, half of them leased by 8 sessions, and requests
    of another task parked."""

    def __init__(self, live: int, *, held: bool) -> None:
        self.ledger, self.now, self.puts, self.ended = Ledger(), 0.0, 0, 0
        self.sessions = [self.say(0, cmd.OpenSession(name=f"client {i}")).session for i in range(9)]
        self.me = self.sessions[-1]
        for task in (
            TaskSpec(name="work", needs=("x",), gives=("y",), lease_s=1e6),
            TaskSpec(name="train", needs=("y",)),
            TaskSpec(name="idle", needs=("x",), gives=("w",), partitions=("none",)),
        ):
            self.say(self.me, cmd.Declare(task=task))
        self.put(live // 2 if held else live)
        if held:
            for number in range(live // 2 // ROWS):
                self.say(self.sessions[number % 8], cmd.LeaseRows(task="work", count=ROWS))
            self.put(live - live // 2)
            for number in range(WAITING):
                self.ledger.apply(
                    self.sessions[number % 8], cmd.LeaseRows(task="idle", count=1, timeout_s=1e6), 0.0, 1000 + number
                )

    def say(self, session: int, command: Any) -> Any:
        self.now += 1e-6
        self.ledger.apply(session, command, self.now, 1)
        (_, reply), *_rest = self.ledger.drain().answers
        if isinstance(reply, Exception):
            raise reply
        return reply

    def put(self, rows: int) -> None:
        while rows > 0:
            part = min(rows, 1 << 14)
            self.say(self.me, cmd.AddRows(groups=part, group_size=1, columns=X))
            rows -= part
            self.puts += part

    def turn(self) -> float:
        """Seconds of a turn. The rows completed go on to their end outside of it."""
        began = time.perf_counter()
        lease = self.say(self.me, cmd.LeaseRows(task="work", count=ROWS))
        self.say(self.me, cmd.Complete(token=lease.token, columns=Y))
        self.say(self.me, cmd.AddRows(groups=ROWS, group_size=1, columns=X))
        self.ledger.tick(self.now)
        self.ledger.next_deadline()
        took = time.perf_counter() - began
        self.puts += ROWS
        done = self.say(self.me, cmd.LeaseRows(task="train", count=ROWS))
        self.say(self.me, cmd.Complete(token=done.token, columns={}))
        self.ended += ROWS
        return took

    def check(self, live: int) -> None:
        audit = self.ledger.audit()
        assert audit.balanced
        assert (audit.put, audit.live, audit.consumed) == (self.puts, live, self.ended), audit


def cost(turns: int, sizes: list[int]) -> dict[str, float]:
    """Microseconds of a turn, median: "LIVE" with rows ready, "LIVE held" with rows leased and requests parked."""
    queues = {
        f"{live}{' held' if held else ''}": (live, Queue(live, held=held)) for live in sizes for held in (False, True)
    }
    times: dict[str, list[float]] = {name: [] for name in queues}
    for _ in range(turns):
        for name, (_, queue) in queues.items():
            times[name].append(queue.turn())
    for live, queue in queues.values():
        queue.check(live)
    return {name: st.median(taken[turns // 10 :]) * 1e6 for name, taken in times.items()}


if __name__ == "__main__":
    print(json.dumps(cost(int(sys.argv[1]), [int(n) for n in sys.argv[2:]])))
