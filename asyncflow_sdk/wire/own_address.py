"""own_address: the IP address at which other members of a run reach this host."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from .sockets import is_loopback

LOOPBACK = "127.0.0.1"
_UNUSED_ADDRESS = "192.0.2.1"  # reserved (RFC 5737): its route is this host's default route


def own_address(server: str, served: Sequence[str] = ()) -> str:
    """Return the IP address at which other members of the run reach this host: the one of its route
    to ``server``. On the server's own host: the address it serves to others, if any of ``served``
    is not a loopback address."""
    if server.startswith("tcp://") and not is_loopback(server):
        return _route_to(server)
    outward = next((each for each in served if not is_loopback(each)), None)
    return LOOPBACK if outward is None else _route_to(outward)


def _route_to(server: str) -> str:
    """Return this host's address on the route to a server; loopback if there is none."""
    host, _, port = server.partition("://")[2].rpartition(":")
    host = host.strip("[]")
    if host in ("*", "0.0.0.0", "::"):
        host = _UNUSED_ADDRESS
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # a datagram socket only looks up the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return LOOPBACK
