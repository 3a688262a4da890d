"""A replay wakes requests in the order of the run, also in a process that hashes otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ledger_queue import LAST, PLAIN, REWARD, ROLLOUT, TRAIN, Queue

from asyncflow_sdk.ledger import commands as cmd


def wakings() -> str:
    """The order in which one command wakes requests that wait for different things."""
    queue = Queue(ROLLOUT, REWARD, TRAIN, PLAIN, LAST, capacity_rows=4)
    for task in ("train", "last", "reward"):
        queue.ask(queue.admin, cmd.LeaseRows(task=task, count=1, timeout_s=9))
    queue.ask(queue.admin, cmd.AwaitVersion(after=0, timeout_s=9))
    queue.ask(queue.admin, cmd.AwaitRowsWanted(timeout_s=9))
    before = set(queue.answers)
    queue.do(queue.admin, cmd.End())
    return str([ticket for ticket in queue.answers if ticket not in before])


def test_a_replay_wakes_requests_in_the_same_order() -> None:
    command = [sys.executable, "-c", "import test_wake_order; print(test_wake_order.wakings())"]
    runs = [
        subprocess.Popen(
            command,
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert [run.communicate()[0].strip() for run in runs] == [wakings()] * 2
