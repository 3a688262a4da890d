"""How long a lease takes that can be granted at once: ``python -m benchmarks.scale.probe ADDRESS``, until the stream ends.

Leases a row of its own partition every ``EVERY_S``, and prints when each was asked for and how long it took, in seconds.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import asyncflow_sdk as af
from asyncflow_sdk.errors import Ended

TASK, COLUMN = "probe", "number"
EVERY_S = 0.05


def declare(run: af.Run, rows: int) -> None:
    """Put the rows that the probe leases, beside the stream."""
    run.queue.declare(TASK, needs=(COLUMN,), partitions=(TASK,))
    run.queue.put({COLUMN: np.zeros(rows, np.float32)}, partition=TASK)


def main(address: str) -> None:
    taken: list[tuple[float, float]] = []
    with af.connect(address, name=TASK) as run:
        while True:
            asked = time.monotonic()
            try:
                batch = run.queue.get(TASK, 1)
            except Ended:
                break
            taken.append((asked, time.monotonic() - asked))
            batch.finish()
            time.sleep(EVERY_S)
    print(json.dumps(taken))


if __name__ == "__main__":
    main(sys.argv[1])
