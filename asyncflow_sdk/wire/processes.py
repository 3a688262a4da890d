"""Processes, by pidfd: silence is never an end. Descriptors of this process, and the IP address of its host."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
from collections.abc import Sequence
from pathlib import Path

from .sockets import EVERY_HOST, host_and_port, is_loopback

LOOPBACK = "127.0.0.1"
_UNUSED_ADDRESS = "192.0.2.1"  # reserved (RFC 5737): its route is this host's default route


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard limit. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # forbidden in some sandboxes
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def descriptor_limit() -> int:
    """Return the soft limit; 2**20 without one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft >= 0 else 1 << 20


def free_descriptors() -> int:
    """Return how many more descriptors this process may open."""
    used = os.stat("/proc/self/fd").st_size  # 0 before Linux 6.2
    return descriptor_limit() - (used or len(os.listdir("/proc/self/fd")))


def boot_id() -> str:
    """Return the kernel's number of this boot of this host. Raises OSError without /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_key(pid: int) -> str:
    """Return an identity of a process: boot, pid namespace, start time. "" without /proc."""
    try:
        boot = boot_id()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started}"


def same_host(key: str) -> bool:
    """True if a process with this key runs on this host, in any container."""
    return bool(key) and key.split(" ", 1)[0] == process_key(os.getpid()).split(" ", 1)[0]


def has_ended(pid: int, key: str) -> bool:
    """True if a process has ended; False if it is not visible here."""
    return _is_visible(pid, key) and process_key(pid) != key


def _is_visible(pid: int, key: str) -> bool:
    here = process_key(os.getpid()).rsplit(" ", 1)[0]
    return pid > 0 and bool(key) and key.rsplit(" ", 1)[0] == here


def open_pidfd(pid: int, key: str) -> int:
    """Return a descriptor, readable once the process ends; -1 if it is not visible. Raises ProcessLookupError."""
    if not _is_visible(pid, key):
        return -1
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, OverflowError):  # forbidden, no descriptor left, or no valid pid
        return -1
    if process_key(pid) != key:  # the pid belongs to another process now
        os.close(fd)
        raise ProcessLookupError(f"process {pid} has ended")
    return fd


class ProcessWatch:
    """Watches the processes of sessions. ``fd``: readable once one has ended. Not thread-safe."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._watched: dict[tuple[int, str], tuple[int, set[str]]] = {}  # process → its descriptor and sessions

    def add(self, session: str, pid: int, key: str) -> None:
        """Watch a session's process if visible here. Raises ProcessLookupError if it has ended."""
        if (pid, key) not in self._watched:
            if (fd := open_pidfd(pid, key)) < 0:
                return
            self._watched[pid, key] = fd, set()
            self._epoll.register(fd, select.EPOLLIN)
        self._watched[pid, key][1].add(session)

    def remove(self, session: str) -> None:
        """Forget a session. A process without sessions is not watched any more."""
        for process, (_, sessions) in list(self._watched.items()):
            sessions.discard(session)
            if not sessions:
                self._forget(process)

    def ended(self) -> list[str]:
        """Return the sessions of processes ended since the last call, and forget them."""
        ended = {fd for fd, _ in self._epoll.poll(0)}
        processes = [process for process, (fd, _) in self._watched.items() if fd in ended]
        return [session for process in processes for session in self._forget(process)]

    def close(self) -> None:
        """Close all descriptors."""
        for process in list(self._watched):
            self._forget(process)
        self._epoll.close()

    def _forget(self, process: tuple[int, str]) -> set[str]:
        fd, sessions = self._watched.pop(process)
        self._epoll.unregister(fd)
        os.close(fd)
        return sessions


def own_address(server: str, served: Sequence[str] = ()) -> str:
    """Return the IP address at which other members of the run reach this host: the one of its route to ``server``.
    On the server's own host: the address it serves to others, if any of ``served`` is not a loopback address."""
    if server.startswith("tcp://") and not is_loopback(server):
        return _route_to(server)
    outward = next((each for each in served if not is_loopback(each)), None)
    return LOOPBACK if outward is None else _route_to(outward)


def _route_to(server: str) -> str:
    """Return this host's address on the route to a server; loopback if there is none."""
    host, port = host_and_port(server)
    host = _UNUSED_ADDRESS if host in EVERY_HOST else host
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK
