"""Room: how much more a directory can take before somebody is harmed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

SHM = Path("/dev/shm")
MEMINFO = Path("/proc/meminfo")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(directory: Path) -> int:
    """Bytes that files in a directory may take. Below /dev/shm they take memory: where there is less of it than the
    file system promises (a container's limit above all), the kernel would kill somebody instead of refusing."""
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    return min(free, free_memory()) if SHM in directory.parents else free


def free_memory() -> int:
    """Bytes that processes may still take before the kernel kills one."""
    return min(_memory(), _container())


def _memory() -> int:
    """Of the machine."""
    with contextlib.suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


def _container() -> int:
    """Of this process's container, if it has a limit: what is not used, and what the page cache would give back."""
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
