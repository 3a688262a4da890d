"""host_of: the ``Host`` description that a transport gets."""

from __future__ import annotations

import os

from ..interfaces.weights import Host
from ..queue import Connection
from ..wire import boot_id, own_address

__all__ = ["host_of", "own_address"]


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
