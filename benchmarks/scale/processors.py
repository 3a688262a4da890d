"""Processor time of processes and of the machine, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def of_processes(pids: Iterable[int]) -> float:
    """Seconds that these processes have used; those that ended count for nothing."""
    return sum(map(_of_process, pids))


def of_machine() -> float:
    """Seconds that all processors have been busy."""
    every = list(map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]))
    idle = slice(3, 5)  # idle, and waiting for a disk
    return (sum(every) - sum(every[idle])) * _TICK_S


def _of_process(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S
    return 0.0
