"""HomeClients: connections of one store to the storage units of other homes."""

from __future__ import annotations

import threading

from ...errors import AccessDenied, LeaseLost, WireError
from ...interfaces.store import StorageHome
from ...wire import RunKey, ServiceAddress, ServiceClient
from .homes import HomeId, KnownHomes

MAX_REQUEST_BYTES = 16 << 20
"""Of one request to a unit, on both sides."""


def open_unit(home: StorageHome, key: RunKey | None) -> ServiceClient:
    """Return a connection to the unit of a home. ``key``: this client's own. Raises AccessDenied without a
    key that is needed."""
    if home.key and key is None:
        raise AccessDenied(f"home {home.home} ({home.name}) needs the run's key, and this client has none")
    return ServiceClient(ServiceAddress(home.address, home.key or None, 0, ""), key, max_call_bytes=MAX_REQUEST_BYTES)


class HomeClients:
    """``key``: this client's own. Thread-safe."""

    def __init__(self, homes: KnownHomes, key: RunKey | None) -> None:
        self._homes, self._key = homes, key
        self._clients: dict[int, tuple[tuple[str, str], ServiceClient]] = {}
        self._lock = threading.Lock()
        self.closed = False

    def client(self, where: HomeId) -> ServiceClient:
        """Return the connection to a home's unit. Raises LeaseLost for a lost epoch and after
        ``close``, WireError if it has no unit now, AccessDenied."""
        home = self._homes.in_epoch(where)
        if home is None:
            raise WireError(f"home {where.home} is unknown to this run's server")
        if not home.address:
            raise WireError("it has no storage unit now")
        with self._lock:
            known, client = self._clients.get(where.home, (None, None))
            if client is None or known != (home.address, home.key):
                if client is not None:
                    client.close()
                if self.closed:
                    raise LeaseLost("the connection that reads these rows is closed")
                client = open_unit(home, self._key)
                self._clients[where.home] = (home.address, home.key), client
            return client

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self.closed = True
            clients, self._clients = list(self._clients.values()), {}
        for _, client in clients:
            client.close()
