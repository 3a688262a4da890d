"""Where a run is served: a small file ``address`` in its directory, one address a line, while it is served."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from ..errors import ConfigError, ServerLost

FILE = "address"
PROBE_S = 5.0


def write_addresses(directory: Path, addresses: list[str]) -> None:
    """Say where the run is served. Addresses within this process are left out."""
    new = directory / f".{FILE}-{os.getpid()}"
    new.write_text(_text(addresses))
    new.replace(directory / FILE)


def remove_addresses(directory: Path, addresses: list[str]) -> None:
    """The run is no longer served there. Where another serves it by now is left."""
    with contextlib.suppress(OSError):
        if (directory / FILE).read_text() == _text(addresses):
            (directory / FILE).unlink()


def _text(addresses: list[str]) -> str:
    return "".join(f"{address}\n" for address in addresses if not address.startswith("inproc:"))


def find_address(where: str | os.PathLike[str]) -> str:
    """The address of a run, given that or its directory. Raises ConfigError for a directory that is not served,
    ServerLost when nobody listens any more."""
    text = os.fspath(where)
    if "://" in text:
        return text
    path = Path(text)
    if not text or not path.is_dir():
        raise ConfigError(f"{text} is neither an address (tcp://..., ipc://...) nor the directory of a run")
    try:
        addresses = (path / FILE).read_text().split()
    except OSError:
        raise ConfigError(f"{text} is not being served: it has no file {FILE!r}; has its run ended?") from None
    lost: ServerLost | None = None
    for address in addresses:  # one's own host's socket comes first
        try:
            probe(address)
        except ServerLost as error:
            lost = lost or error
        else:
            return address
    raise lost or ConfigError(f"{path / FILE} names no address")


def probe(address: str) -> None:
    """Raises ServerLost when nobody listens at an address, ConfigError when it is none."""
    transport, _, rest = address.partition("://")
    try:
        if transport == "ipc":
            with socket.socket(socket.AF_UNIX) as trial:
                trial.settimeout(PROBE_S)
                trial.connect(rest)
        elif transport == "tcp":
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
        else:
            raise ConfigError(f"{address} is no address of another process: tcp://HOST:PORT or ipc://PATH is")
    except OSError as error:
        raise ServerLost(f"nobody listens at {address} ({error.strerror or error}); its server has ended") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{address} is no address: {error}") from None
