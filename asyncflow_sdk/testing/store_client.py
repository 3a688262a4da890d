"""Clients of a `StoredRun` in a process of their own.

python -m asyncflow_sdk.testing.store_client ADDRESS put|square|use ROWS [KEY]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..interfaces import TransferQueue
from ..workflow import connect

WAIT_S = 60.0


def put(queue: TransferQueue, rows: int, key: str) -> None:
    """Put rows with a column x. ``key``: of the put; "": none."""
    queue.put({"x": np.arange(float(rows))}, key=key)


def squares(x: Any) -> Any:
    """Return the squares of a column."""
    return np.square(x)


def square(queue: TransferQueue, rows: int, key: str) -> None:
    """Add the column y, the square of x, to rows of the task "square"."""
    while rows:
        with queue.get("square", rows, timeout_s=WAIT_S) as batch:
            rows -= batch.rows
            batch.complete({"y": squares(batch.array("x"))})


def use(queue: TransferQueue, rows: int, key: str) -> None:
    """Check the squares in rows of the task "use"."""
    while rows:
        with queue.get("use", rows, timeout_s=WAIT_S) as batch:
            rows -= batch.rows
            if (batch.array("y") != batch.array("x") ** 2).any():
                raise ValueError(f"squares of {batch.array('x').tolist()} are read as {batch.array('y').tolist()}")
            batch.ack()


def main() -> None:
    """Run one client."""
    address, action, rows, key = sys.argv[1:]
    with connect(address, name=action) as run:
        {"put": put, "square": square, "use": use}[action](run.queue, int(rows), key)


if __name__ == "__main__":
    main()
