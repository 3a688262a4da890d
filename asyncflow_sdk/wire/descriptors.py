"""File descriptors of this process: the number of free ones, and a reserve.

raise_limit()                        # the soft limit becomes the hard one
if free_descriptors() < 100: ...     # counts everything that the process has open
reserve = Reserve(32); reserve.hold(); reserve.release()    # frees 32 descriptors held back
"""

from __future__ import annotations

import contextlib
import os
import resource

UNLIMITED = 1 << 20
"""The value of an infinite limit."""


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # forbidden in some sandboxes
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return the soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def free_descriptors() -> int:
    """Return how many more descriptors this process may open."""
    used = os.stat("/proc/self/fd").st_size  # 0 before Linux 6.2
    return descriptor_limit() - (used or len(os.listdir("/proc/self/fd")))


class Reserve:
    """Holds ``size`` descriptors, or as many as the process may open. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []

    def hold(self) -> None:
        """Open the missing descriptors."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open("/", os.O_PATH | os.O_CLOEXEC))

    def release(self) -> None:
        """Close all descriptors. Idempotent."""
        while self._held:
            os.close(self._held.pop())
