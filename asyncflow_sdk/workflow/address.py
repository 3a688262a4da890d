"""Where a run is served: a small file ``address`` in its directory, one address a line, while it is served."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ..errors import ConfigError, ServerLost
from ..memory import private_opener
from ..queue import is_unfinished
from ..wire import RETRY_S, probe

FILE = "address"
JOURNAL = "journal"


def write_addresses(directory: Path, addresses: list[str]) -> None:
    """Say where the run is served. Addresses within this process are left out. Raises OSError where the disk is full."""
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
    """The run is no longer served there. Where another serves it by now is left."""
    with contextlib.suppress(OSError):
        if (directory / FILE).read_text() == _text(addresses):
            (directory / FILE).unlink()


def _text(addresses: list[str]) -> str:
    return "".join(f"{address}\n" for address in addresses if not address.startswith("inproc:"))


def find_address(directory: Path, timeout_s: float) -> str:
    """The address at which the run of a directory is served.

    Waits up to ``timeout_s`` for a server of a durable run that is not over, since another may continue it. Raises
    ConfigError for a directory that is not served, ServerLost when nobody listens any more.
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


def _served_at(directory: Path) -> str:
    """Raises ConfigError, ServerLost."""
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
