"""What a transport may know of the end it works for."""

from __future__ import annotations

import socket

from ..interfaces.weights import Host
from ..queue import Connection

LOOPBACK = "127.0.0.1"


def host_of(connection: Connection, name: str, *, rank: int = 0, world_size: int = 1) -> Host:
    """That of a process that is connected to a run as ``connection``. ``name``: nobody else's in the run."""
    return Host(
        directory=None if connection.inline else connection.directory,
        name=name,
        address=own_address(connection.wire.address),
        rank=rank,
        world_size=world_size,
    )


def own_address(server: str) -> str:
    """The IP address from which this host reaches ``server``: others that reach it too, reach this one there."""
    transport, _, rest = server.partition("://")
    if transport != "tcp":
        return LOOPBACK
    host, _, port = rest.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: a route is looked up, nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK
