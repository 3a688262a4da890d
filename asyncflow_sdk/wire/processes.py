"""Seeing a process die: by the kernel's word (pidfd), never by silence."""

from __future__ import annotations

import os
import select
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


class ProcessWatch:
    """See the processes of sessions end, by one descriptor a process. Not thread-safe. ``fileno()`` is readable when one
    has ended: a server's round must not look at each of them."""

    def __init__(self) -> None:
        self._deaths = select.epoll()
        self._watched: dict[int, tuple[tuple[int, str], set[str]]] = {}  # descriptor → process, and its sessions
        self._descriptors: dict[tuple[int, str], int] = {}

    def __len__(self) -> int:
        """Processes that are watched."""
        return len(self._watched)

    @property
    def sessions(self) -> int:
        """Sessions whose process is watched."""
        return sum(len(sessions) for _, sessions in self._watched.values())

    def fileno(self) -> int:
        return self._deaths.fileno()

    def add(self, session: str, pid: int, key: str) -> None:
        """Watch the process of a session, if it can be seen from here. Raises ProcessLookupError when it has ended."""
        if (pid, key) not in self._descriptors:
            fd = watch(pid, key)
            if fd is None:
                return
            self._descriptors[pid, key], self._watched[fd] = fd, ((pid, key), set())
            self._deaths.register(fd, select.EPOLLIN)
        self._watched[self._descriptors[pid, key]][1].add(session)

    def remove(self, session: str) -> None:
        """Forget a session; a process without one is watched no more."""
        for fd, (_, sessions) in list(self._watched.items()):
            if session in sessions:
                sessions.remove(session)
                if not sessions:
                    self._forget(fd)

    def ended(self) -> list[str]:
        """Return the sessions whose process has ended since, and forget them."""
        return [session for fd, _ in self._deaths.poll(0) for session in self._forget(fd)]

    def close(self) -> None:
        self._deaths.close()
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()

    def _forget(self, fd: int) -> set[str]:
        process, sessions = self._watched.pop(fd)
        del self._descriptors[process]
        self._deaths.unregister(fd)
        os.close(fd)
        return sessions
