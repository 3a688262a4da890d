"""What a command of the ledger costs, by the number of rows that it concerns.

    python -m benchmarks.ledger

Prints the median time of each command at 8 rows, and that at more rows as a multiple of it. Rows are completed all at once, as a
reward stage does, or one by one, as a producer does that waits for no row's neighbours.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import numpy as np

from asyncflow_sdk.ledger import Ledger, TaskSpec, unpack_ids
from asyncflow_sdk.ledger import commands as cmd
from asyncflow_sdk.types import ColumnSpec

TOKENS, NUMBER = ColumnSpec("ragged", "int64"), ColumnSpec("fixed", "float32")
SIZES = (8, 64, 512, 4096)
GROUP = 8


def measure(rows: int, steps: int, *, one_by_one: bool = False) -> dict[str, float]:
    """Return the median seconds of each command in a run whose steps have so many rows."""
    ledger, ticket = Ledger(), 0
    times: dict[str, list[float]] = defaultdict(list)

    def apply(command: Any, name: str = "") -> Any:
        nonlocal ticket
        ticket += 1
        began = time.perf_counter()
        ledger.apply(session, command, float(ticket), ticket)
        ((_, reply),) = ledger.drain().answers
        if name:
            times[name].append(time.perf_counter() - began)
        return reply

    session = 0
    session = apply(cmd.OpenSession(name="bench")).session
    apply(cmd.Configure(steps=steps))
    for task in (
        TaskSpec(name="rollout", needs=("prompt",), gives=("response",), lease_s=1e9),
        TaskSpec(name="reward", needs=("response",), gives=("reward",), lease_s=1e9),
        TaskSpec(name="train", needs=("response", "reward"), batch_rows=rows, lease_s=1e9),
    ):
        apply(cmd.Declare(task=task))
    for _ in range(steps):
        apply(cmd.AddRows(groups=rows // GROUP, group_size=GROUP, columns={"prompt": TOKENS}, nbytes=1), "put")
        lease = apply(cmd.LeaseRows(task="rollout", count=rows), "lease")
        if one_by_one:
            for row in np.random.default_rng(0).permutation(len(unpack_ids(lease.ids))).astype("<i4"):
                complete = cmd.Complete(token=lease.token, columns={"response": TOKENS}, index=row.tobytes())
                apply(complete, "complete one row")
        else:
            apply(cmd.Complete(token=lease.token, columns={"response": TOKENS}), "complete")
        lease = apply(cmd.LeaseRows(task="reward", count=rows), "lease")
        apply(cmd.Complete(token=lease.token, columns={"reward": NUMBER}), "complete")
        step = apply(cmd.LeaseRows(task="train", count=1), "lease a step")
        apply(cmd.Complete(token=step.token, columns={}), "acknowledge a step")
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    found = {rows: measure(rows, max(20, 20_000 // rows // 8)) for rows in SIZES}
    single = measure(512, 8, one_by_one=True)["complete one row"]
    print("| command | 8 rows, µs |" + "".join(f" {rows:,} rows |" for rows in SIZES[1:]))
    print("|---|---|" + "---|" * len(SIZES[1:]))
    for name, base in found[SIZES[0]].items():
        print(f"| {name} | {1e6 * base:.0f} |" + "".join(f" x{found[rows][name] / base:.2f} |" for rows in SIZES[1:]))
    print(f"| complete one row of 512 | {1e6 * single:.0f} |")


if __name__ == "__main__":
    main()
