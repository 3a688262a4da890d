"""What a transport may know of the end it works for."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ..interfaces.weights import Host
from ..queue import Connection
from ..wire import is_loopback

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # an address that is nobody's (RFC 5737): the way there is the way out of this host


def host_of(connection: Connection, name: str, *, rank: int = 0, world_size: int = 1, model: str = "") -> Host:
    """That of a process that is connected to a run as ``connection``. ``name``: nobody else's in the run."""
    return Host(
        directory=None if connection.inline else connection.directory,
        name=name,
        address=own_address(connection.wire.address, connection.server_addresses),
        rank=rank,
        world_size=world_size,
        run=connection.directory.name,
        model=model,
    )


def own_address(server: str, served: Sequence[str] = ()) -> str:
    """The IP address from which this host reaches ``server``: others that reach it too, reach this one there. From the server's
    own host, that at which others reach it, if it is ``served`` to others."""
    if server.startswith("tcp://") and not is_loopback(server):
        return _way_to(server)
    outward = next((each for each in served if not is_loopback(each)), None)
    return LOOPBACK if outward is None else _way_to(outward)


def _way_to(server: str) -> str:
    host, _, port = server.partition("://")[2].rpartition(":")
    host = host.strip("[]")
    if host in ("*", "0.0.0.0", "::"):
        host = _ELSEWHERE
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # of a datagram socket: a route is looked up, nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK
