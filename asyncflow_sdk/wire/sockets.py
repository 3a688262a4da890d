"""How sockets are set: what is bounded, what a cable that was cut is noticed by, and where keys are needed.

A connection is given up by the kernel's word (keepalive and TCP_USER_TIMEOUT), not by ZeroMQ's heartbeats: those are
answered only between frames, so that one frame longer than the patience of the other side would be cut at each
attempt; and they are not answered by a process that is stopped, while a kernel always answers for it.
"""

from __future__ import annotations

import ipaddress
import os
import socket as sockets
import threading
from typing import Any

import zmq

from ..errors import ConfigError, ServerLost
from .envelope import FRAME_BYTES
from .keys import RunKey

GIVE_UP_MS = 10_000
"""A tcp connection on which nothing sent was acknowledged for so long is given up, and made anew by its client."""
BULK_THREADS = 2
MOST_PORT = 65535
RETRY_S = 0.1
"""How often a server that is awaited is looked for, the interval at which ZeroMQ connects again."""
CONNECT_S = 5.0
"""The longest that ``probe`` waits."""
IDLE_S, PROBE_S, PROBES = 5, 2, 3
"""A tcp connection on which nothing moved for IDLE_S is probed every PROBE_S; after PROBES without word it is over."""


_bulk: list[tuple[int, zmq.Context[Any]]] = []
_bulk_lock = threading.Lock()


def context_of(bulk: bool) -> zmq.Context[Any]:
    """The context of this process for calls, or for payload beside which calls must not wait: that one has more threads, and
    so moves more over more connections."""
    if not bulk:
        return zmq.Context.instance()
    with _bulk_lock:
        if not _bulk or _bulk[0][0] != os.getpid():
            _bulk[:] = [(os.getpid(), zmq.Context(io_threads=BULK_THREADS))]
        return _bulk[0][1]


def transport_of(address: str) -> str:
    """inproc, ipc or tcp. Raises ConfigError."""
    transport, _, rest = address.partition("://")
    if transport not in ("inproc", "ipc", "tcp") or not rest:
        raise ConfigError(f"{address!r} is no address; known transports are inproc, ipc and tcp")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(f"{address!r} is no address; tcp://HOST:PORT is expected")
        port = port.lstrip("0")
        if len(port) > 5 or int(port or 0) > MOST_PORT:  # of more, ZeroMQ would take the lowest bits
            raise ConfigError(f"{address!r} is no address: a port is at most {MOST_PORT}")
    return transport


def is_loopback(address: str) -> bool:
    """Whether a tcp address can be reached from its own host alone. Names but localhost are not."""
    host = address.partition("://")[2].rsplit(":", 1)[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def set_tcp(socket: Any) -> None:
    """What holds for connections made or accepted from now on."""
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = IDLE_S, PROBE_S, PROBES
    socket.setsockopt(zmq.TCP_MAXRT, GIVE_UP_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, GIVE_UP_MS)


def connect(socket: Any, address: str, key: RunKey | None) -> None:
    """Set a requester's socket, and connect it. Raises ConfigError for an address that is none."""
    socket.linger = 200  # milliseconds: a last acknowledgement leaves, a dead server holds up nothing
    socket.sndhwm = socket.rcvhwm = 0  # a requester has a request or two under way; nothing is dropped
    socket.maxmsgsize = FRAME_BYTES
    if transport_of(address) == "tcp":
        set_tcp(socket)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)  # milliseconds; the kernel's own patience is minutes
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.ipv6 = "[" in address
    if key is not None:
        socket.curve_serverkey = key.server.encode()
        socket.curve_publickey = key.public.encode()
        socket.curve_secretkey = key.secret.encode()
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot connect to {address}: {error}") from None


def probe(address: str) -> None:
    """Raises ServerLost when nobody listens at an address, ConfigError when it is none."""
    transport, _, rest = address.partition("://")
    try:
        if transport == "ipc":
            with sockets.socket(sockets.AF_UNIX) as trial:
                trial.settimeout(CONNECT_S)
                trial.connect(rest)
        elif transport == "tcp":
            host, _, port = rest.rpartition(":")
            sockets.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        else:
            raise ConfigError(f"{address} is no address of another process: tcp://HOST:PORT or ipc://PATH is")
    except OSError as error:
        raise ServerLost(f"nobody listens at {address} ({error.strerror or error}); its server has ended") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{address} is no address: {error}") from None
