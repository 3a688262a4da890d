"""Socket options and addresses.

The kernel detects lost connections (keepalive and TCP_USER_TIMEOUT), not ZeroMQ's heartbeats. Heartbeats are
answered only between frames, so each attempt to send a frame longer than the timeout would fail; and a stopped
process does not answer them, while its kernel does."""

from __future__ import annotations

import functools
import ipaddress
import os
import socket as sockets
from collections.abc import Mapping
from typing import Any

import zmq

from ..errors import ConfigError, ServerLost

GIVE_UP_MS = 10_000  # a tcp connection is closed after this long without acknowledgement; its client connects again
BULK_THREADS = 2
MAX_PORT = 65535
EVERY_HOST = ("*", "0.0.0.0", "::")  # hosts of an address where a server listens at all addresses of its host
RETRY_S = 0.1  # interval between attempts to reach a server, equal to ZeroMQ's reconnect interval
CONNECT_S = 5.0  # timeout of ``probe``
IDLE_S, PROBE_S, PROBES = 5, 2, 3
"""A tcp connection idle for IDLE_S is probed every PROBE_S, and closed after PROBES without response."""


@functools.cache
def _bulk_context(pid: int) -> zmq.Context[Any]:
    return zmq.Context(io_threads=BULK_THREADS)


def context_of(bulk: bool) -> zmq.Context[Any]:
    """Return this process's ZeroMQ context for calls, or for payload (``bulk``): calls do not wait for payload."""
    return _bulk_context(os.getpid()) if bulk else zmq.Context.instance()


def transport_of(address: str) -> str:
    """Return "inproc", "ipc" or "tcp". Raises ConfigError for an invalid address."""
    transport, _, rest = address.partition("://")
    if transport not in ("inproc", "ipc", "tcp") or not rest:
        raise ConfigError(f"{address!r} is no address; known transports are inproc, ipc and tcp")
    if transport == "tcp":
        host, _, port = rest.rpartition(":")
        if not (host and port.isdecimal()):
            raise ConfigError(f"{address!r} is no address; tcp://HOST:PORT is expected")
        port = port.lstrip("0")
        if len(port) > 5 or int(port or 0) > MAX_PORT:  # ZeroMQ would use the lowest 16 bits of more
            raise ConfigError(f"{address!r} is no address: a port is at most {MAX_PORT}")
    return transport


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host and the port of a tcp address; 0 without a port."""
    host, _, port = address.partition("://")[2].rpartition(":")
    return host.strip("[]"), int(port) if port.isdecimal() else 0


def is_loopback(address: str) -> bool:
    """True if only its own host reaches a tcp address: an IP address of loopback, or localhost."""
    host, _ = host_and_port(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def set_options(socket: Any, options: Mapping[zmq.SocketOption, int | bytes]) -> None:
    """Set options of a ZeroMQ socket, for its later connections."""
    for option, value in options.items():
        socket.setsockopt(option, value)


def set_tcp(socket: Any, address: str) -> None:
    """Set the options of a socket for a tcp address."""
    keepalive = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: IDLE_S, zmq.TCP_KEEPALIVE_INTVL: PROBE_S}
    limits = {zmq.TCP_KEEPALIVE_CNT: PROBES, zmq.TCP_MAXRT: GIVE_UP_MS, zmq.HANDSHAKE_IVL: GIVE_UP_MS}
    set_options(socket, keepalive | limits | {zmq.IPV6: int("[" in address)})


def probe(address: str) -> None:
    """Raises ServerLost if no server listens at an address, ConfigError for an invalid address."""
    transport = transport_of(address)
    if transport == "inproc":
        raise ConfigError(f"{address!r} is no address of another process; tcp://HOST:PORT or ipc://PATH is expected")
    try:
        if transport == "ipc":
            with sockets.socket(sockets.AF_UNIX) as trial:
                trial.settimeout(CONNECT_S)
                trial.connect(address.partition("://")[2])
        else:
            sockets.create_connection(host_and_port(address), CONNECT_S).close()
    except OSError as error:
        raise ServerLost(
            f"nobody listens at {address}: {error.strerror or error}; is the address right, and is the server running?"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{address} is no address: {error}") from None
