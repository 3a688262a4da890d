"""Seeing a process die: by the kernel's word (pidfd), never by silence."""

from __future__ import annotations

import os
from pathlib import Path


def process_key(pid: int) -> str:
    """What tells this process from any other: boot, pid namespace, start time. "" where /proc is not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started}"


def same_host(key: str) -> bool:
    """Whether a process with this key runs under the kernel that this one runs under, in any container."""
    return bool(key) and key.split(" ", 1)[0] == process_key(os.getpid()).split(" ", 1)[0]


def has_ended(pid: int, key: str) -> bool:
    """Whether a process that could be seen from here is no more; False where it cannot be seen."""
    here = process_key(os.getpid()).rsplit(" ", 1)[0]
    return pid > 0 and bool(key) and key.rsplit(" ", 1)[0] == here and process_key(pid) != key


def watch(pid: int, key: str) -> int | None:
    """A file descriptor that becomes readable when the process ends; None when it cannot be seen from
    here, or may not be.

    Raises ProcessLookupError when it has already ended.
    """
    if pid <= 0 or not key or key.rsplit(" ", 1)[0] != process_key(os.getpid()).rsplit(" ", 1)[0]:
        return None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, OverflowError):  # not allowed, no descriptor left, no such number
        return None
    if process_key(pid) != key:  # the number was given to another process
        os.close(fd)
        raise ProcessLookupError(f"process {pid} has ended")
    return fd
