"""HomeFetcher: columns of rows in other homes, fetched from their units, all homes in parallel.

A unit that restarts has another address and key, and the same contents: the fetcher looks it up
again between two attempts. Only after ``timeout_s`` without a success, or for a lost home, it gives
up, with StoreUnavailable or LeaseLost.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...errors import (
    AccessDenied,
    AsyncFlowError,
    DigestMismatch,
    LeaseLost,
    ProtocolError,
    StoreUnavailable,
    WireError,
)
from ...interfaces.store import StorageHome
from ...types import Column
from ...wire import RunKey, ServiceAddress, ServiceClient
from .fetch import FetchPart, FetchReply, FetchRequest, decode_reply, encode, unpack_parts
from .homes import SERVER_MEMORY, HomeId, KnownHomes

MAX_REQUEST_BYTES = 16 << 20
"""Of one request to a unit, on both sides."""
FETCH_S = 30.0
"""Longest wait for one home. A transfer in progress goes on."""
ATTEMPT_S = 2.0
"""The first wait for an answer to begin, before the home's address is looked up again. Then doubled."""
LAST_S = 1.0
"""The shortest attempt, also at the end."""
PAUSE_S = 0.2
THREADS = 2
"""Requests to one home at a time. Others of the same client wait for them."""
Columns = dict[str, Column]
_log = logging.getLogger(__name__)


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


class HomeFetcher:
    """``key``: the run's key. ``server``: sends a request for columns in home 0; see
    ``StoreContext.fetch``. Thread-safe."""

    def __init__(
        self,
        homes: KnownHomes,
        key: RunKey | None,
        server: Callable[[FetchRequest, float], tuple[FetchReply, Any]] | None,
        *,
        timeout_s: float = FETCH_S,
    ) -> None:
        self._homes, self._server, self._timeout_s = homes, server, timeout_s
        self._clients = HomeClients(homes, key)
        self._lock = threading.Lock()
        self._closed = False
        self._threads: dict[HomeId, ThreadPoolExecutor] = {}

    def fetch(self, wanted: Mapping[HomeId, Sequence[FetchPart]]) -> dict[HomeId, list[Columns]]:
        """Return the columns of each part, all homes in parallel. Raises the first home's error:
        StoreUnavailable, LeaseLost, SchemaError, ProtocolError, AccessDenied."""
        if len(wanted) == 1:  # in this thread: handing over costs more than a small transfer
            ((where, parts),) = wanted.items()
            return {where: self._fetch(where, parts)}
        with self._lock:
            if self._closed:
                raise LeaseLost("the connection that reads these rows is closed")
            waiting: dict[HomeId, Future[list[Columns]]] = {}
            for where, parts in wanted.items():  # threads for each: a lost host must not delay others
                if where not in self._threads:
                    self._threads[where] = ThreadPoolExecutor(THREADS, f"asyncflow-home-{where.home}")
                waiting[where] = self._threads[where].submit(self._fetch, where, parts)
        return {where: future.result() for where, future in waiting.items()}  # each ends at its own deadline

    def close(self) -> None:
        """End all fetches and connections. Idempotent."""
        with self._lock:
            self._closed = True
            pools, self._threads = list(self._threads.values()), {}
        self._clients.close()
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, where: HomeId, parts: Sequence[FetchPart]) -> list[Columns]:
        request, timeout_s = FetchRequest(tuple(parts)), self._timeout_s
        began, damaged, attempt_s = time.monotonic(), 0, ATTEMPT_S
        while True:
            left = timeout_s - (time.monotonic() - began)
            try:
                reply, payload = self._ask(where, request, min(max(left, LAST_S), attempt_s))
                return unpack_parts(reply, payload, parts)
            except DigestMismatch as error:
                damaged += 1
                reason: AsyncFlowError = error
                if damaged > 1:
                    raise StoreUnavailable(f"{self._named(where)}: {error}, twice") from None
            except (ProtocolError, AccessDenied) as error:
                if not self._moved(where):
                    raise
                reason = error
            except WireError as error:
                reason = error
            waited = time.monotonic() - began
            if self._closed:
                raise LeaseLost("the connection that reads these rows was closed")
            moved = self._moved(where)
            if waited >= timeout_s and not moved:
                raise StoreUnavailable(
                    f"{self._named(where)} could not be reached from this host in {waited:.1f} s: {reason}. The rows are"
                    " not lost; is its storage unit running, and does the network reach it?"
                )
            attempt_s = ATTEMPT_S if moved else 2 * attempt_s
            if not moved:
                time.sleep(PAUSE_S)

    def _ask(self, where: HomeId, request: FetchRequest, timeout_s: float) -> tuple[FetchReply, Any]:
        if where == SERVER_MEMORY:
            if self._server is None:
                raise ProtocolError("rows are in memory of the server that this client neither sees nor may request")
            return self._server(request, timeout_s)
        answer = self._clients.client(where).call(encode(request), timeout_s, f"rows in {self._named(where)}")
        return decode_reply(answer.body), answer.payload

    def _moved(self, where: HomeId) -> bool:
        """Look a home up again. True if its unit has another address or key now."""
        if where == SERVER_MEMORY:
            return False
        before = self._homes.find(where)
        with contextlib.suppress(WireError):  # the server may be away, too
            self._homes.refresh(after_s=PAUSE_S / 2)
        now = self._homes.find(where)
        return (before and (before.address, before.key)) != (now and (now.address, now.key))

    def _named(self, where: HomeId) -> str:
        home = None
        with contextlib.suppress(WireError):
            home = self._homes.find(where)
        if where == SERVER_MEMORY:
            return "the memory of the queue server"
        return f"home {where.home}" if home is None else f"home {where.home} ({home.name}) at {home.address}"
