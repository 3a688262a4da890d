"""make_transport, and host_of: the ``Host`` description that a transport gets."""

from __future__ import annotations

import inspect
import os
from typing import Any

from ..errors import ConfigError, PluginError
from ..interfaces import WeightTransport
from ..interfaces.weights import Host
from ..plugins import registry
from ..queue import Connection
from ..wire import boot_id, own_address

__all__ = ["AUTO", "host_of", "make_transport", "own_address"]

AUTO = "auto"


def make_transport(name: str, **options: Any) -> WeightTransport:
    """Make a transport by its registered name. Raises PluginError, and ConfigError for odd options."""
    adapter = registry().get("transport", name)
    try:
        factory = adapter.load()
    except PluginError as error:
        plain = [a.spec.name for a in registry().adapters if a.spec.kind == "transport" and not a.spec.requires]
        raise PluginError(f"{error}. Transports that need nothing more: {', '.join(plain)}") from error
    known = inspect.signature(factory).parameters
    odd = options.keys() - known.keys()
    if odd and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        has = f"its options: {', '.join(known)}" if known else "it has none"
        raise ConfigError(f"transport {name!r} has no option {', '.join(map(repr, sorted(odd)))}; {has}")
    try:
        made: WeightTransport = factory(**options)
    except TypeError as error:
        raise ConfigError(f"transport {name!r} cannot be made with options {options}: {error}") from error
    return made


def host_of(connection: Connection, name: str, *, rank: int = 0, world_size: int = 1, model: str = "") -> Host:
    """Describe the host of ``connection``. ``name``: unique in the run."""
    return Host(
        directory=connection.directory,
        name=name,
        address=own_address(connection.wire.address, connection.server_addresses),
        rank=rank,
        world_size=world_size,
        run=connection.run,
        model=model,
        identity=identity() if connection.shared_memory else "",
        member=connection.member,
    )


def identity() -> str:
    """Return what all processes that see each other's shared memory have: boot, device, user; "" without it."""
    try:
        return f"{boot_id()} {os.stat('/dev/shm').st_dev} {os.getuid()}"
    except OSError:
        return ""
