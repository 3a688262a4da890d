"""ConnectionLimiter: which peers a server accepts, so that no number of them takes the descriptors that it works with.

It counts connections by the events of the ROUTER sockets, and descriptors by what the process has open. Two limits
shut the TCP doors, with a note why: too many peers that have not authenticated, or too few free descriptors. Each
peer has until HANDSHAKE_IVL to authenticate. Peers of this host are admitted a little longer, a few at a time, and
disconnected when descriptors are short; they try again until their own deadline.
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

MOST_UNPROVEN = 128
"""Peers of one server that have connected over tcp and not authenticated yet; at more its tcp doors shut."""
LOOK_S = 0.1
"""How often it is tried whether doors that are shut can be opened."""
_SOON_S = 0.002
_EXPIRED_S = GIVE_UP_MS / 1000 + 5.0
"""A peer that connected so long ago has authenticated or is gone."""
_PROVEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_ACCEPTED, _DISCONNECTED, _LISTENING = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED), int(zmq.EVENT_LISTENING)
_EVENTS, _READABLE, _AT_ONCE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_monitors = itertools.count()
_log = logging.getLogger(__name__)


class ConnectionLimiter:
    """Opens and shuts the doors of one server. Not thread-safe: the server's thread owns it once that runs.

    ``note``: called with a text and "info" or "warning" when doors are shut or open again. ``fileno()`` is readable
    when ``tend`` has something to do; besides, ``tend`` is due after ``wait_s`` seconds.
    """

    def __init__(self) -> None:
        raise_limit()
        limit = descriptor_limit()
        self.note: Callable[[str, str], None] = _log_note
        self.wait_s: float | None = None
        self._for_tcp = min(256, limit // 4)
        self._for_ipc = min(3 * IPC_BACKLOG, limit * 3 // 16)
        """Free descriptors below which peers are let in no more."""
        reserved = min(128, limit // 8)
        self._reserve = Reserve(reserved)
        """Held while tcp doors are open: libzmq may accept peers faster than this thread can shut the door."""
        self._to_open = reserved + self._for_tcp * 5 // 4
        self._tcp: dict[str, TcpListener] = {}
        self._ipc: list[IpcListener] = []
        self._monitors: list[tuple[zmq.Socket[Any], zmq.Socket[Any]]] = []  # of a router, its monitor
        self._ready = select.epoll()
        self._registered: dict[IpcListener, int] = {}
        self._admitting: IpcListener | None = None
        self._shut = self._refusing = self._holding = False
        self._pause_s = 0.0

    def fileno(self) -> int:
        return self._ready.fileno()

    @property
    def unproven(self) -> int:
        """Peers that have connected over tcp and not authenticated yet."""
        return sum(len(door.unproven) for door in self._tcp.values())

    @property
    def short(self) -> bool:
        """True if so few descriptors are free that nothing new should be begun."""
        return free_descriptors() < self._for_ipc // 3

    def monitor(self, router: zmq.Socket[Any]) -> None:
        """Follow the connections of a socket. Call before it is bound."""
        address = f"inproc://asyncflow-monitor-{os.getpid()}-{next(_monitors)}"
        router.monitor(address, _PROVEN | _ACCEPTED | _DISCONNECTED | _LISTENING)
        monitor: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        monitor.linger = 0
        monitor.rcvhwm = 0  # libzmq's threads, and a bind in this one, wait where events are bounded
        monitor.connect(address)
        self._monitors.append((router, monitor))
        self._ready.register(int(monitor.getsockopt(zmq.FD)), select.EPOLLIN)

    def add_tcp(self, endpoint: str) -> None:
        """A monitored socket has been bound to ``endpoint``."""
        for event, descriptor, bound in self._events():
            if event == _LISTENING and bound == endpoint:
                self._tcp[endpoint] = TcpListener(descriptor)
                self._reserve.hold()

    def add_ipc(self, router: zmq.Socket[Any], path: str) -> None:
        """Listen at a socket file. Raises ConfigError."""
        self._ipc.append(door := IpcListener(router, path))
        self._register(door)

    def tend(self) -> None:
        """Take in what happened at the doors, and open or shut them."""
        now = time.monotonic()
        for event, descriptor, endpoint in self._events():
            self._take(event, descriptor, endpoint, now)
        self._tend_tcp(now)
        if now >= self._pause_s:
            self._tend_ipc(now)
        busy = self._holding or now < self._pause_s
        for door in self._ipc:
            self._register(door, busy)
        self.wait_s = _SOON_S if self._holding else LOOK_S if self._shut or now < self._pause_s else None

    def close(self) -> None:
        """Call before the monitored sockets are closed. Idempotent."""
        self._release()
        for tcp in self._tcp.values():
            tcp.close()
        for ipc in self._ipc:
            ipc.close()
        self._reserve.release()
        for router, monitor in self._monitors:  # in this order: libzmq would wait for one who reads
            router.disable_monitor()
            monitor.close()
        self._monitors.clear()
        self._ready.close()

    def _events(self) -> list[tuple[int, int, str]]:
        """What happened: event, descriptor and endpoint."""
        found = []
        for _, monitor in self._monitors:
            while int(monitor.getsockopt(_EVENTS)) & _READABLE:
                event = parse_monitor_message(monitor.recv_multipart(_AT_ONCE))
                found.append((int(event["event"]), int(event["value"]), event["endpoint"].decode(errors="replace")))
        return found

    def _take(self, event: int, descriptor: int, endpoint: str, now: float) -> None:
        door = self._tcp.get(endpoint)
        if door is None:
            for each in self._ipc:
                if event == _ACCEPTED:
                    each.accepted(endpoint)
                elif event == _DISCONNECTED:
                    each.disconnected(endpoint)
        elif event == _ACCEPTED:
            door.unproven[descriptor] = now
        elif event == _DISCONNECTED:
            door.unproven.pop(descriptor, None)
        elif event == _PROVEN and door.unproven:
            door.unproven.popitem()  # which one is not said: the newest, most likely

    def _tend_tcp(self, now: float) -> None:
        if not self._tcp:
            return
        for door in self._tcp.values():  # what a wrong guess of _take left
            for descriptor in [each for each, came in door.unproven.items() if now - came > _EXPIRED_S]:
                del door.unproven[descriptor]
        free, unproven = free_descriptors(), self.unproven
        if self._shut:
            if free >= self._to_open and unproven <= MOST_UNPROVEN // 2:
                self._reserve.hold()
                for door in self._tcp.values():
                    door.open()
                self._shut = False
                self.note(f"{self._names()} takes connections again", "info")
        elif free < self._for_tcp or unproven >= MOST_UNPROVEN:
            for door in self._tcp.values():
                door.shut()
            self._shut = True
            self._reserve.release()
            self.note(f"{self._names()} takes no connections for now: {self._why(free, unproven)}", "warning")

    def _why(self, free: int, unproven: int) -> str:
        if unproven >= MOST_UNPROVEN:
            return (
                f"{unproven} peers have connected and not authenticated; each is disconnected after"
                f" {GIVE_UP_MS // 1000} s. Does somebody scan this port?"
            )
        return _short_of(free)

    def _names(self) -> str:
        return ", ".join(self._tcp)

    def _tend_ipc(self, now: float) -> None:
        """Admit waiting peers of this host, while no descriptor goes to anybody else."""
        if self._admitting is not None and self._admitting.admitting:
            return
        if self._admitting is not None:
            self._admitting = None
            self._release()
        for door in self._ipc:
            door.tidy()
        waiting = next((door for door in self._ipc if door.waiting), None)
        if waiting is None:
            self._release()
            return
        if not self._holding:
            self._holding = True
            TcpListener.hold_all()
        if free_descriptors() >= self._for_ipc and not TcpListener.quiet():
            return  # libzmq is still accepting; in a moment
        try:
            if (free := free_descriptors()) >= self._for_ipc:  # and it stays so while the doors are held
                waiting.admit()
                self._admitting, self._refusing = waiting, False
                return
            waiting.refuse()
            if not self._refusing:
                self._refusing = True
                self.note(f"clients of this host are refused for now: {_short_of(free)}", "warning")
        except (OSError, zmq.ZMQError):
            self._pause_s = now + LOOK_S
        self._release()

    def _release(self) -> None:
        if self._holding:
            self._holding = False
            TcpListener.release_all()

    def _register(self, door: IpcListener, busy: bool = False) -> None:
        """Be woken by peers that wait, unless there is no use in it."""
        wanted, known = -1 if busy else door.descriptor, self._registered.get(door, -1)
        if wanted == known:
            return
        if known >= 0:
            with contextlib.suppress(OSError):  # closed meanwhile
                self._ready.unregister(known)
        if wanted >= 0:
            self._ready.register(wanted, select.EPOLLIN)
        self._registered[door] = wanted


def _short_of(free: int) -> str:
    return (
        f"{free} of {descriptor_limit()} file descriptors are free, and those are kept for the server's own work. Close"
        " clients, or raise the limit (ulimit -n)"
    )


def _log_note(text: str, level: str) -> None:
    _log.log(logging.WARNING if level == "warning" else logging.INFO, text)
