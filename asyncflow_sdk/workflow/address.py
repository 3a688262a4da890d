"""Addresses of a run: the file ``address`` in its directory, one address a line, while it is
served."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from ..errors import ConfigError, ServerLost
from ..memory import private_opener
from ..queue import is_unfinished
from ..wire import LOOPBACK, RETRY_S, own_address, probe

FILE = "address"
JOURNAL = "journal"


def write_addresses(directory: Path, addresses: list[str]) -> None:
    """Write the addresses of a run; an inproc address is left out. Raises OSError if the disk is
    full."""
    with contextlib.suppress(OSError):
        if (directory / FILE).read_text() == _text(addresses):  # left by a server of the same run that was killed
            return
    new = directory / f".{FILE}-{os.getpid()}"
    try:
        with open(new, "w", opener=private_opener) as file:
            file.write(_text(addresses))
        new.replace(directory / FILE)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def remove_addresses(directory: Path, addresses: list[str]) -> None:
    """Remove these addresses of a run. Addresses of another server stay."""
    with contextlib.suppress(OSError):
        if (directory / FILE).read_text() == _text(addresses):
            (directory / FILE).unlink()


def _text(addresses: list[str]) -> str:
    return "".join(f"{address}\n" for address in addresses if not address.startswith("inproc:"))


def advertised(address: str, advertise: str | None = None) -> str:
    """Return the tcp address at which other hosts reach a server: with ``advertise`` as its host, or
    with its own; of a server on all interfaces, the one of the default route, or the host's name."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if advertise is None and host not in ("0.0.0.0", "[::]", "*"):
        return address
    own = advertise or own_address(address)
    own = socket.gethostname() if own == LOOPBACK and advertise is None else own
    return f"tcp://{f'[{own}]' if ':' in own.strip('[]') and '[' not in own else own}:{port}"


def find_address(directory: Path, timeout_s: float) -> str:
    """Return the address of a directory's run.

    Waits up to ``timeout_s`` for the next server of an unfinished durable run. Raises ConfigError
    for a directory without a served run, ServerLost if nobody listens any more.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return _served_at(directory)
        except (ConfigError, ServerLost) as error:
            if not is_unfinished(directory / JOURNAL):
                raise
            if time.monotonic() >= until:
                raise ServerLost(
                    f"{error}. Its journal holds a durable run that is not over; nobody served {directory} again in"
                    f" {timeout_s:.1f} s of waiting"
                ) from None
        time.sleep(RETRY_S)


def check_unserved(directory: Path) -> None:
    """Raise ConfigError if a server of this host answers at an address of the directory."""
    try:
        addresses = (directory / FILE).read_text().split()
    except (OSError, ValueError):
        return
    for address in addresses:
        with contextlib.suppress(ServerLost):
            if address.startswith("ipc:"):  # a port may be another program's by now
                probe(address)
                raise ConfigError(f"{directory} is being served at {address}; connect to it, or end its server")


def _served_at(directory: Path) -> str:
    """Return the first address with a server. Raises ConfigError, ServerLost."""
    try:
        addresses = (directory / FILE).read_text().split()
    except FileNotFoundError:
        raise ConfigError(f"{directory} is not being served: it has no file {FILE!r}; has its run ended?") from None
    except OSError as error:
        raise ConfigError(f"{directory / FILE} cannot be read: {error.strerror}; is it another user's run?") from None
    lost: ServerLost | None = None
    for address in addresses:  # one's own host's socket comes first
        try:
            probe(address)
        except ServerLost as error:
            lost = lost or error
        else:
            return address
    raise lost or ConfigError(f"{directory / FILE} names no address")
