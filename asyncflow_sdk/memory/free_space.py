"""Free space: how many bytes files and processes may still take."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(directory: Path) -> int:
    """Return the free bytes for files in a directory. Below /dev/shm, at most the free memory:
    beyond it, as in a container with a lower limit, the kernel kills a process instead of refusing.
    """
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    return min(free, free_memory()) if SHM in directory.parents else free


def free_memory() -> int:
    """Return the bytes that processes may still take before the kernel kills one."""
    return min(_machine(), _container())


def _machine() -> int:
    with contextlib.suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def _container() -> int:
    """Return the free memory below this container's limit, reclaimable page cache included."""
    for limit, usage, stat, caches in (
        ("memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file")),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
         ("total_inactive_file", "total_active_file")),
    ):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):
            most, used = int((CGROUPS / limit).read_text()), int((CGROUPS / usage).read_text())
            lines = (line.split() for line in (CGROUPS / stat).read_text().splitlines())
            return max(most - used + sum(int(count) for name, count in lines if name in caches), 0)
    return 1 << 62
