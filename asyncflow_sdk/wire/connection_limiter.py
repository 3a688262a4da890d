"""ConnectionLimiter: limits the connections of a server, to keep enough file descriptors for its
own work.

It counts connections by the monitor events of the ROUTER sockets, and descriptors by the open files
of the process. Too many unauthenticated peers or too few free descriptors pause the tcp listeners,
with a note. Each peer has HANDSHAKE_IVL to authenticate. Peers of this host are admitted a few at a
time, down to a lower number of free descriptors, and below it disconnected; they try again until
their own deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from .descriptors import Reserve, descriptor_limit, free_descriptors, raise_limit
from .listeners import IPC_BACKLOG, IpcListener, TcpListener
from .sockets import GIVE_UP_MS

MAX_UNAUTHENTICATED = 128
"""Unauthenticated tcp peers of one server at which its tcp listeners are paused."""
RESUME_S = 0.1
"""Interval between attempts to resume paused listeners."""
_SOON_S = 0.002
_EXPIRED_S = GIVE_UP_MS / 1000 + 5.0
"""A peer that connected this long ago has authenticated or disconnected."""
_AUTHENTICATED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ACCEPTED, _DISCONNECTED, _LISTENING = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_LISTENING)
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_monitors = itertools.count()
_log = logging.getLogger(__name__)


class ConnectionLimiter:
    """Pauses and resumes the listeners of one server. Not thread-safe: the server's thread owns it.

    ``note``: called with a text and "info" or "warning" on each change. Call ``update`` when
    ``fileno()`` is readable, and ``wait_s`` seconds after the last call unless None.
    """

    def __init__(self) -> None:
        raise_limit()
        limit = descriptor_limit()
        self.note: Callable[[str, str], None] = _log_note
        self.wait_s: float | None = None
        # free descriptors below which no more peers are admitted
        self._for_tcp, self._for_ipc = min(256, limit // 4), min(3 * IPC_BACKLOG, limit * 3 // 16)
        reserved = min(128, limit // 8)
        # held while tcp is not paused: libzmq may accept peers faster than this thread can pause it
        self._reserve = Reserve(reserved)
        self._to_resume = reserved + self._for_tcp * 5 // 4
        self._tcp: dict[str, TcpListener] = {}
        self._ipc: list[IpcListener] = []
        self._monitors: list[tuple[zmq.Socket[Any], zmq.Socket[Any]]] = []  # each router with its monitor
        self._ready = select.epoll()
        self._registered: dict[IpcListener, int] = {}
        self._admitting: IpcListener | None = None
        self._paused = self._refusing = self._holding = False
        self._retry_at_s = 0.0

    def fileno(self) -> int:
        """Readable when ``update`` has something to do."""
        return self._ready.fileno()

    @property
    def unauthenticated(self) -> int:
        """Connected tcp peers with an unfinished handshake."""
        return sum(len(listener.unauthenticated) for listener in self._tcp.values())

    @property
    def short(self) -> bool:
        """True if too few descriptors are free to begin anything new."""
        return free_descriptors() < self._for_ipc // 3

    def monitor(self, router: zmq.Socket[Any]) -> None:
        """Monitor the connections of a socket. Call before it is bound."""
        address = f"inproc://asyncflow-monitor-{os.getpid()}-{next(_monitors)}"
        router.monitor(address, _AUTHENTICATED | _ACCEPTED | _DISCONNECTED | _LISTENING)
        monitor: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # with a limit, libzmq's threads would block, and a bind in this one
        monitor.connect(address)
        self._monitors.append((router, monitor))
        self._ready.register(int(monitor.getsockopt(zmq.FD)), select.EPOLLIN)

    def add_tcp(self, endpoint: str) -> None:
        """Limit the tcp listener at ``endpoint``, to which a monitored socket was just bound."""
        for event, descriptor, bound in self._events():
            if event == _LISTENING and bound == endpoint:
                self._tcp[endpoint] = TcpListener(descriptor)
                self._reserve.hold()

    def add_ipc(self, router: zmq.Socket[Any], path: str) -> None:
        """Listen at a socket file. Raises ConfigError."""
        self._ipc.append(listener := IpcListener(router, path))
        self._register(listener)

    def renew_ipc(self) -> None:
        """Replace removed socket files. Raises OSError."""
        for listener in self._ipc:
            listener.renew()
            self._register(listener)

    def update(self) -> None:
        """Process connection events; pause, resume or admit."""
        now = time.monotonic()
        for event, descriptor, endpoint in self._events():
            self._count(event, descriptor, endpoint, now)
        self._update_tcp(now)
        if now >= self._retry_at_s:
            self._update_ipc(now)
        waits = now < self._retry_at_s
        for listener in self._ipc:
            self._register(listener, self._holding or waits)
        self.wait_s = _SOON_S if self._holding else RESUME_S if self._paused or waits else None

    def close(self) -> None:
        """Call before the monitored sockets are closed. Idempotent."""
        self._release()
        listeners: list[TcpListener | IpcListener] = [*self._tcp.values(), *self._ipc]
        for listener in listeners:
            listener.close()
        self._reserve.release()
        for router, monitor in self._monitors:  # in this order: libzmq would wait for a reader
            router.disable_monitor()
            monitor.close()
        self._monitors.clear()
        self._ready.close()

    def _events(self) -> list[tuple[int, int, str]]:
        """Return (event, descriptor, endpoint) of each new event."""
        found = []
        for _, monitor in self._monitors:
            while int(monitor.getsockopt(_EVENTS)) & _POLLIN:
                event = parse_monitor_message(monitor.recv_multipart(_NOBLOCK))
                found.append((int(event["event"]), int(event["value"]), event["endpoint"].decode(errors="replace")))
        return found

    def _count(self, event: int, descriptor: int, endpoint: str, now: float) -> None:
        listener = self._tcp.get(endpoint)
        if listener is None:
            for each in self._ipc if event in (_ACCEPTED, _DISCONNECTED) else ():
                each.count(endpoint, left=event == _DISCONNECTED)
        elif event == _ACCEPTED:
            listener.unauthenticated[descriptor] = now
        elif event == _DISCONNECTED:
            listener.unauthenticated.pop(descriptor, None)
        elif event == _AUTHENTICATED and listener.unauthenticated:
            listener.unauthenticated.popitem()  # the event does not identify the peer: guess the newest

    def _update_tcp(self, now: float) -> None:
        if not self._tcp:
            return
        for listener in self._tcp.values():  # corrects wrong guesses of _count
            for descriptor in [fd for fd, began_s in listener.unauthenticated.items() if now - began_s > _EXPIRED_S]:
                del listener.unauthenticated[descriptor]
        free, unauthenticated, names = free_descriptors(), self.unauthenticated, ", ".join(self._tcp)
        if self._paused:
            if free >= self._to_resume and unauthenticated <= MAX_UNAUTHENTICATED // 2:
                self._reserve.hold()
                self._pause_tcp(False)
                self.note(f"{names} takes connections again", "info")
        elif free < self._for_tcp or unauthenticated >= MAX_UNAUTHENTICATED:
            self._pause_tcp(True)
            self._reserve.release()
            why = _short_of(free)
            if unauthenticated >= MAX_UNAUTHENTICATED:
                why = (
                    f"{unauthenticated} peers have connected and not authenticated; each is disconnected after"
                    f" {GIVE_UP_MS // 1000} s. Does somebody scan this port?"
                )
            self.note(f"{names} takes no connections for now: {why}", "warning")

    def _pause_tcp(self, paused: bool) -> None:
        for listener in self._tcp.values():
            listener.set_paused(paused)
        self._paused = paused

    def _update_ipc(self, now: float) -> None:
        """Admit waiting peers of this host while the tcp listeners of the process are paused, so
        that nothing else takes the counted descriptors."""
        if self._admitting is not None and self._admitting.admitting:
            return
        if self._admitting is not None:
            self._admitting = None
            self._release()
        for listener in self._ipc:
            listener.close_unused()
        waiting = next((listener for listener in self._ipc if listener.waiting), None)
        if waiting is None:
            self._release()
            return
        if not self._holding:
            self._holding = True
            TcpListener.pause_all()
        if free_descriptors() >= self._for_ipc and not TcpListener.none_waiting():
            return  # libzmq is still accepting
        try:
            if (free := free_descriptors()) >= self._for_ipc:  # does not change during pause_all
                waiting.admit()
                self._admitting, self._refusing = waiting, False
                return
            waiting.refuse()
            if not self._refusing:
                self._refusing = True
                self.note(f"clients of this host are refused for now: {_short_of(free)}", "warning")
        except (OSError, zmq.ZMQError):
            self._retry_at_s = now + RESUME_S
        self._release()

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            TcpListener.resume_all()

    def _register(self, listener: IpcListener, busy: bool = False) -> None:
        """Make ``fileno()`` readable for waiting peers, unless ``busy``."""
        wanted, known = -1 if busy else listener.descriptor, self._registered.get(listener, -1)
        if wanted == known:
            return
        if known >= 0:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._ready.unregister(known)
        if wanted >= 0:
            self._ready.register(wanted, select.EPOLLIN)
        self._registered[listener] = wanted


def _short_of(free: int) -> str:
    return (
        f"{free} of {descriptor_limit()} file descriptors are free, and those are kept for the server's own work."
        " Close clients, or raise the limit (ulimit -n)"
    )


def _log_note(text: str, level: str) -> None:
    _log.log(logging.WARNING if level == "warning" else logging.INFO, text)
