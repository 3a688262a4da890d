"""Keys of the servers of this user on this host: a client that has only a tcp address finds the key by itself.

offer_key(directory, ["tcp://127.0.0.1:7000"], keys.run, bound=True)     # the server, in the run's shared-memory directory
find_key("tcp://127.0.0.1:7000")                                         # a client of the same user

The directory has mode 0700 and goes with its server, so no other user reads the key, and a key is no longer found
once its server has ended, unless a journal keeps the directory for the next server of the run.
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
    """``network``: the network namespace of ``addresses``. ``bound``: the server listens there; before, it is about to."""

    network: str
    addresses: tuple[str, ...]
    bound: bool
    key: RunKey


def offer_key(directory: Path, addresses: Sequence[str], key: RunKey | None, *, bound: bool) -> None:
    """Offer the key to clients of this user, or none any more. A server calls it before and after it binds: whoever
    can connect finds the key. Raises ConfigError if it cannot be written."""
    if key is not None:
        over_tcp = tuple(address for address in addresses if address.startswith("tcp://"))
        save(directory / FILE, _Offer(_network(), over_tcp, bound, key))
    else:
        (directory / FILE).unlink(missing_ok=True)


def find_key(address: str) -> RunKey | None:
    """The key of the server of this user that listens on a tcp address of this host; None if there is none.

    Prefers a server that lives to one that a journal will continue, and one that listens to one that is about to.
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
    """The same. On loopback, wait for the server up to ``timeout_s``, since it may be starting.

    Raises ServerLost if nobody listens in that time, AccessDenied if a server listens whose key is not this user's.
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
            key = find_key(address)  # offered before its server could be connected to
            if key is not None:
                return key
            raise AccessDenied(
                f"what listens at {address} is no server of this user on this host, so no key for it is known; pass key=,"
                " the path of a copy of the run's run.key, or insecure=True if it is served without keys"
            )


def _read(path: Path) -> _Offer | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.json.decode(path.read_bytes(), type=_Offer)
    return None


def _network() -> str:
    """The network namespace of this process: other containers may have the same address."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.partition("://")[2].rpartition(":")
    host = host.strip("[]")
    return "127.0.0.1" if host == "localhost" else host, int(port) if port.isdecimal() else 0


def _is_here(host: str) -> bool:
    """True if a name or an IP address is one of this host: a socket can be bound to it."""
    try:
        for family, kind, _, _, (ip, *_rest) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as trial:
                trial.bind((ip, 0))
                return True
    except OSError:
        pass
    return False
