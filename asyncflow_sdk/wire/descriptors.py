"""File descriptors of this process: how many are free, and a reserve of them.

raise_limit()                        # the soft limit becomes the hard one
if free_descriptors() < 100: ...     # an exact count, of whatever the process has open
reserve = Reserve(32); reserve.release()    # 32 descriptors that nobody else took meanwhile
"""

from __future__ import annotations

import contextlib
import os
import resource

UNLIMITED = 1 << 20
"""What a limit of infinity counts as."""


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: then the old limit holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def free_descriptors() -> int:
    """Return how many more descriptors this process may open."""
    used = os.stat("/proc/self/fd").st_size  # a Linux before 6.2 says 0
    return descriptor_limit() - (used or len(os.listdir("/proc/self/fd")))


class Reserve:
    """Hold ``size`` descriptors back, or fewer where the process has no more. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []

    def hold(self) -> None:
        """Open the missing ones."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))

    def release(self) -> None:
        """Close them, so that others can be opened. Idempotent."""
        while self._held:
            os.close(self._held.pop())
