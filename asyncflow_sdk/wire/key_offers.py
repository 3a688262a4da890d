"""Key offers: a client finds the key for a tcp address if a server of the same user on this host
offers it.

    offer_key(directory, ["tcp://127.0.0.1:7000"], keys.run, bound=True)   # server, in the run's shared-memory directory
    find_key("tcp://127.0.0.1:7000")                                       # client

The directory has mode 0700: other users cannot read the key. It is removed with its server, unless
a journal keeps it for the run's next server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..errors import AccessDenied, ServerLost
from ..memory import is_served, journal_owns, own_directories
from .keys import RunKey, save
from .sockets import RETRY_S, is_loopback, probe

FILE = "tcp.key"
_EVERY_HOST = ("*", "0.0.0.0", "::")


class _Offer(msgspec.Struct, frozen=True):
    """``network``: the network namespace of ``addresses``. ``bound``: False if the server will
    listen soon."""

    network: str
    addresses: tuple[str, ...]
    bound: bool
    key: RunKey


def offer_key(directory: Path, addresses: Sequence[str], key: RunKey | None, *, bound: bool) -> None:
    """Offer a key to clients of this user; None withdraws it. Call before and after binding, so
    that a client able to connect finds it. Raises ConfigError if it cannot be written."""
    if key is not None:
        over_tcp = tuple(address for address in addresses if address.startswith("tcp://"))
        save(directory / FILE, _Offer(_network(), over_tcp, bound, key))
    else:
        (directory / FILE).unlink(missing_ok=True)


def find_key(address: str) -> RunKey | None:
    """Return the key offered by a server of this user for a tcp address of this host, else None.

    Prefers a running server over one to be continued from its journal, then a listening server.
    """
    host, port = _split(address)
    network, found = _network(), list[tuple[bool, bool, RunKey]]()
    for directory in own_directories():
        offer = _read(directory / FILE)
        if offer is None or offer.network != network:
            continue
        for each in map(_split, offer.addresses):
            if each[1] == port and (each[0] == host or (each[0] in _EVERY_HOST and _is_here(host))):
                served = is_served(directory)
                if served or journal_owns(directory):
                    found.append((served, offer.bound, offer.key))
    return max(found, key=lambda each: each[:2])[2] if found else None


def await_key(address: str, timeout_s: float) -> RunKey | None:
    """Like ``find_key``. On loopback, wait up to ``timeout_s`` for a starting server.

    Raises ServerLost if none listens in time, AccessDenied if one of another user listens.
    """
    until = time.monotonic() + timeout_s
    while True:
        key = find_key(address)
        if key is not None or not is_loopback(address):
            return key
        try:
            probe(address)
        except ServerLost:
            if time.monotonic() >= until:
                raise ServerLost(
                    f"nobody listens at {address}, after {timeout_s:.1f} s of waiting for a server; is the run served"
                    " there, and does its process still live?"
                ) from None
            time.sleep(RETRY_S)
        else:
            key = find_key(address)  # the server offers it before it listens
            if key is not None:
                return key
            raise AccessDenied(
                f"at {address} listens no server of this user on this host, so no key for it is known; pass key=,"
                " the path of a copy of the run's run.key, or insecure=True if it is served without keys"
            )


def _read(path: Path) -> _Offer | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Offer)
    return None


def _network() -> str:
    """Return the network namespace of this process: other containers may use the same address."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.partition("://")[2].rpartition(":")
    host = host.strip("[]")
    return "127.0.0.1" if host == "localhost" else host, int(port) if port.isdecimal() else 0


def _is_here(host: str) -> bool:
    """True if a host name or IP address belongs to this host: a socket can be bound to it."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, (ip, *_rest) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as trial:
                trial.bind((ip, 0))
                return True
    return False
