"""ConnectionLimiter: keeps file descriptors and memory of a server for its own work, however many peers connect.

libzmq accepts tcp peers by itself, as fast as they come. The limiter counts them by the monitor events of the
ROUTER sockets. With too many unauthenticated peers or too few free descriptors it pauses the tcp listeners of the
process, with a note: a socket filter drops all packets of new peers, and they try again by themselves. Peers of this
host are admitted while the tcp listeners are paused, too."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import ConfigError
from .processes import descriptor_limit, free_descriptors, raise_limit
from .sockets import GIVE_UP_MS, set_options

IPC_BACKLOG = 64  # peers that may wait at an ipc address: one ``admit`` admits at most one more
MAX_UNAUTHENTICATED = 128  # a server with this many unauthenticated tcp peers pauses the tcp listeners
RESUME_S = 0.1  # interval between attempts to resume paused listeners, or to admit peers after a failure
_SOON_S = 0.001  # interval between looks at tcp peers that libzmq has yet to accept, and their turn
_ACCEPT_S = 1.0  # libzmq accepts local peers within this time, or is given up: the peers try again
_EXPIRED_S = GIVE_UP_MS / 1000 + 5.0  # a peer has authenticated or disconnected this long after it connected
_MAX_PATH_BYTES = 107
_MONITORED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_LISTENING
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER of Linux
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes of each packet
_monitors = itertools.count()
_lock = threading.Lock()
_tcp: set[socket.socket] = set()
"""Duplicates of all tcp listening sockets of this process."""
_holders: set[ConnectionLimiter] = set()
"""Limiters of this process with a reason to pause the tcp listeners."""
_log = logging.getLogger(__name__)


class IpcListener:
    """The socket file ``path``, for the thread of ``router``. libzmq ends the process if it accepts an ipc peer
    without a free descriptor (``ipc_listener.cpp``), so peers wait at a socket unknown to libzmq. ``ready`` reports
    each new peer once. Raises ConfigError."""

    def __init__(self, router: zmq.Socket[Any], path: str, ready: select.epoll) -> None:
        if path[0] in "@*" or max(len(os.fsencode(each)) for each in (path, _beside(path))) > _MAX_PATH_BYTES:
            raise ConfigError(f"cannot listen on ipc://{path}: take a path of at most {_MAX_PATH_BYTES - 8} bytes")
        self._router, self._path, self._ready = router, path, ready
        self._admitted: dict[str, Counter[int]] = {}  # endpoint of a socket passed to libzmq → its events
        try:
            self.socket = self._listen()
        except OSError as error:
            raise ConfigError(f"cannot listen on ipc://{path}: {os.strerror(error.errno or 0)}") from None

    def admit(self) -> socket.socket:
        """Pass the socket with its waiting peers to libzmq, and put a new one in its place. Return a duplicate: it
        has no waiting peers once libzmq has accepted them. Raises OSError, ZMQError if it fails for now."""
        admitted, self.socket = self.socket, self._listen()
        accepting = admitted.dup()
        self._ready.unregister(admitted)
        self._router.setsockopt(zmq.USE_FD, admitted.detach())
        self._router.bind(f"ipc://{self._path}")
        self._router.setsockopt(zmq.USE_FD, -1)
        self._admitted[self._router.get_string(zmq.LAST_ENDPOINT)] = Counter()
        return accepting

    def renew(self) -> None:
        """Listen at a new socket file in place of a removed one. Raises OSError."""
        removed, self.socket = self.socket, self._listen()
        removed.close()

    def refuse(self) -> None:
        """Disconnect the waiting peers; they try again until their deadline. Raises OSError."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(IPC_BACKLOG):
                self.socket.accept()[0].close()

    def count(self, events: list[tuple[int, int, str]], unbind: bool) -> None:
        """Count joined and left peers. ``unbind``: no peer waits for libzmq. Then close sockets passed to it once
        all their peers have left: it closes the connections accepted at a socket together with it."""
        for event, _, endpoint in events:
            if endpoint in self._admitted:
                self._admitted[endpoint][event] += 1
        for endpoint, seen in list(self._admitted.items()):
            if unbind and 0 < seen[zmq.EVENT_ACCEPTED] <= seen[zmq.EVENT_DISCONNECTED]:
                del self._admitted[endpoint]
                self._router.unbind(endpoint)

    def close(self) -> None:
        """Remove the socket file, unless another server has replaced it. Idempotent."""
        if self.socket.fileno() >= 0:
            self.socket.close()
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)

    def _listen(self) -> socket.socket:
        """Replace the socket file by a new listening socket, atomically. libzmq names it by its first path."""
        new, made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), _beside(self._path)
        try:
            new.bind(made)
            new.listen(IPC_BACKLOG)
            new.setblocking(False)
            self._ready.register(new, select.EPOLLIN | select.EPOLLET)
            self._inode = os.stat(made).st_ino
            os.rename(made, self._path)
        except BaseException:
            new.close()
            with contextlib.suppress(OSError):
                os.unlink(made)
            raise
        return new


class ConnectionLimiter:
    """Pauses and resumes the listeners of one server. Not thread-safe: the server's thread owns it.

    Call ``update`` when ``fd`` is readable, and ``wait_s`` seconds after the last call unless None. ``note`` gets a
    text and "info" or "warning" on each change."""

    def __init__(self) -> None:
        raise_limit()
        limit = descriptor_limit()
        self.note: Callable[[str, str], None] = lambda text, level: getattr(_log, level)(text)
        # free descriptors below which no more peers are admitted
        self._for_tcp = min(256, limit // 4)
        self._for_ipc = max(IPC_BACKLOG + 16, min(3 * IPC_BACKLOG, limit * 3 // 16))
        self._to_reserve, self._reserve = min(128, limit // 8), list[int]()
        self._listeners: dict[str, socket.socket] = {}  # by tcp endpoint
        self._unauthenticated: dict[int, float] = {}  # descriptor → time of its connection
        self._ipc: list[IpcListener] = []
        self._monitors: list[tuple[zmq.Socket[Any], zmq.Socket[Any]]] = []  # each router with its monitor
        self._ready = select.epoll()
        self.fd = self._ready.fileno()
        self._accepting: socket.socket | None = None  # duplicate of a socket passed to libzmq
        self._accept_until_s = 0.0
        self._paused = self._refusing = False
        self.wait_s: float | None = None

    @property
    def short(self) -> bool:
        """True if too few descriptors are free to begin anything new."""
        return free_descriptors() < self._for_ipc // 3

    def on_note(self, note: Callable[[str, str], None]) -> None:
        """Call another ``note``."""
        self.note = note

    def monitor(self, router: zmq.Socket[Any]) -> None:
        """Monitor the connections of a socket. Call before it is bound."""
        address = f"inproc://asyncflow-monitor-{os.getpid()}-{next(_monitors)}"
        router.monitor(address, _MONITORED)
        monitor: zmq.Socket[Any] = router.context.socket(zmq.PAIR)
        # with a limit of messages, libzmq's threads would block, and a bind in this one
        set_options(monitor, {zmq.LINGER: 0, zmq.RCVHWM: 0})
        monitor.connect(address)
        self._monitors.append((router, monitor))
        self._ready.register(int(monitor.getsockopt(zmq.FD)), select.EPOLLIN)

    def add_tcp(self, endpoint: str) -> None:
        """Limit the tcp listener at ``endpoint``, after a monitored socket was bound to it."""
        for event, descriptor, bound in self._events():
            if event == zmq.EVENT_LISTENING and bound == endpoint:
                self._listeners[endpoint] = listening = socket.socket(fileno=os.dup(descriptor))
                with _lock:
                    _tcp.add(listening)
                    _filter_tcp()
                self._pause(False)

    def add_ipc(self, router: zmq.Socket[Any], path: str) -> None:
        """Listen at a socket file. Raises ConfigError."""
        self._ipc.append(IpcListener(router, path, self._ready))

    def renew_ipc(self) -> None:
        """Replace removed socket files. Raises OSError."""
        for listener in self._ipc:
            listener.renew()

    def update(self) -> None:
        """Process connection events; pause, resume or admit."""
        self._ready.poll(0)  # local peers are reported once
        now, events = time.monotonic(), self._events()
        for event, descriptor, endpoint in events:
            if endpoint not in self._listeners:
                continue
            if event == zmq.EVENT_ACCEPTED:
                self._unauthenticated[descriptor] = now
            elif event == zmq.EVENT_DISCONNECTED:
                self._unauthenticated.pop(descriptor, None)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._unauthenticated:
                self._unauthenticated.popitem()  # the event does not identify the peer: guess the newest
        if self._listeners:
            self._update_tcp(now)
        for listener in self._ipc:
            listener.count(events, unbind=self._accepting is None)
        self.wait_s = self._update_ipc(now) or (RESUME_S if self._paused else None)

    def close(self) -> None:
        """Call before the monitored sockets are closed. Idempotent."""
        self._hold(False)
        with _lock:
            _tcp.difference_update(self._listeners.values())
        for each in (*self._listeners.values(), *self._ipc, *([self._accepting] if self._accepting else ())):
            each.close()
        while self._reserve:
            os.close(self._reserve.pop())
        for router, monitor in self._monitors:  # in this order: libzmq would wait for a reader
            router.disable_monitor()
            monitor.close()
        self._monitors.clear()
        self._ready.close()

    def _events(self) -> list[tuple[int, int, str]]:
        """Return (event, descriptor, endpoint) of each new event."""
        found = []
        for _, monitor in self._monitors:
            while monitor.poll(0):
                event = recv_monitor_message(monitor)
                found.append((int(event["event"]), int(event["value"]), event["endpoint"].decode(errors="replace")))
        return found

    def _update_tcp(self, now: float) -> None:
        for descriptor in [fd for fd, began_s in self._unauthenticated.items() if now - began_s > _EXPIRED_S]:
            del self._unauthenticated[descriptor]  # corrects wrong guesses of ``update``
        free, unauthenticated, names = free_descriptors(), len(self._unauthenticated), ", ".join(self._listeners)
        if self._paused:
            if free >= self._to_reserve + self._for_tcp * 5 // 4 and unauthenticated <= MAX_UNAUTHENTICATED // 2:
                self._pause(False)
                self.note(f"{names} takes connections again", "info")
        elif free < self._for_tcp or unauthenticated >= MAX_UNAUTHENTICATED:
            self._pause(True)
            why = _short_of(free)
            if unauthenticated >= MAX_UNAUTHENTICATED:
                why = (
                    f"{unauthenticated} peers have connected and not authenticated; each is disconnected after"
                    f" {GIVE_UP_MS // 1000} s. Does somebody scan this port?"
                )
            self.note(f"{names} takes no connections for now: {why}", "warning")

    def _pause(self, paused: bool) -> None:
        """Pause or resume the tcp listeners. Keep descriptors in reserve while they are not paused: libzmq may accept
        peers faster than this thread can pause it."""
        self._paused = paused
        self._hold(paused or self._accepting is not None)
        with contextlib.suppress(OSError):
            while paused and self._reserve:
                os.close(self._reserve.pop())
            while not paused and len(self._reserve) < self._to_reserve:
                self._reserve.append(os.open("/", os.O_PATH | os.O_CLOEXEC))

    def _update_ipc(self, now: float) -> float | None:
        """Admit the waiting local peers, or disconnect them if too few descriptors are free. No tcp listener of the
        process takes one between the count and the last accept. Return the limit of the wait for the next call."""
        if self._accepting is not None:
            if has_waiting(self._accepting) and now < self._accept_until_s:
                return self._accept_until_s - now
            self._accepting.close()
            self._accepting = None
            self._hold(self._paused)
            return _SOON_S  # remote peers have their turn before the next local ones
        waiting = next((listener for listener in self._ipc if has_waiting(listener.socket)), None)
        self._hold(self._paused or waiting is not None)
        if waiting is None:
            return None
        try:
            with _lock:
                if _unpromised() >= self._for_ipc and any(map(has_waiting, _tcp)):
                    return _SOON_S  # libzmq is accepting these, and takes no more
                if _unpromised() >= self._for_ipc:
                    self._accepting, self._refusing = waiting.admit(), False
                    self._accept_until_s = now + _ACCEPT_S
                    return _ACCEPT_S
            waiting.refuse()
            if not self._refusing:
                self._refusing = True
                self.note(f"clients of this host are refused for now: {_short_of(free_descriptors())}", "warning")
        except (OSError, zmq.ZMQError):
            pass  # the peers still wait
        self._hold(self._paused)
        return RESUME_S

    def _hold(self, hold: bool) -> None:
        """Pause all tcp listeners of the process while any limiter holds them."""
        with _lock:
            if hold != (self in _holders):
                (_holders.add if hold else _holders.discard)(self)
                _filter_tcp()


def _beside(path: str) -> str:
    """Return a new path in the folder of another."""
    return os.path.join(os.path.dirname(path), secrets.token_hex(4))


def has_waiting(listening: socket.socket) -> bool:
    """True if a listening socket has peers to accept."""
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    return bool(poll.poll(0))


def _unpromised() -> int:
    """Return the free descriptors, but for local peers that libzmq is accepting. The caller holds the lock."""
    return free_descriptors() - sum(IPC_BACKLOG + 1 for each in _holders if each._accepting is not None)


def _filter_tcp() -> None:
    """Let each listening socket drop all packets of new peers, or none. The caller holds the lock."""
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(_DROP_ALL))
    for each in _tcp:
        with contextlib.suppress(OSError):  # forbidden in some sandboxes; or nothing to undo
            each.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER if _holders else _DETACH_FILTER, program)


def _short_of(free: int) -> str:
    return (
        f"{free} of {descriptor_limit()} file descriptors are free, and the server keeps these for its own work."
        " Close clients, or raise the limit (ulimit -n)"
    )
