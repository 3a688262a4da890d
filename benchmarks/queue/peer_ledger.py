"""The peer's control plane alone: what one fetch (scan, then mark as consumed) of 32 rows costs its controller."""

from __future__ import annotations

import json
import os
import statistics as st
import sys
import time

os.environ.setdefault("TQ_LOGGING_LEVEL", "CRITICAL")

import torch
from transfer_queue.controller import DataPartitionStatus

COLUMNS = ["x", "y"]
ROWS = 32


def cost(live: int, turns: int) -> float:
    """Microseconds, median."""
    status = DataPartitionStatus(partition_id="p")
    spec = {"dtype": torch.int32, "shape": None, "is_nested": True, "per_sample_shapes": {}}
    status.update_production_status(list(range(live)), COLUMNS, {name: dict(spec) for name in COLUMNS})
    status.scan_data_status(COLUMNS, "task")
    times = []
    for _ in range(turns):
        began = time.perf_counter()
        found = status.scan_data_status(COLUMNS, "task")
        status.mark_consumed("task", found[:ROWS])
        times.append(time.perf_counter() - began)
    return st.median(times) * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({live: cost(int(live), int(sys.argv[1])) for live in sys.argv[2:]}))
