"""TcpReceiver: maps versions of TcpSenders on its host, and fetches others once for all processes of its host."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from ...errors import DeadlineExceeded, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, Host, WeightReceiver
from ...memory import BufferPool
from ...types import Manifest
from ...wire import ServiceClient
from .host_share import HostShare
from .shm import ShmReceiver
from .tcp_fetch import FetchThreads, TcpFetch
from .tcp_messages import TcpAddress, decode


class TcpReceiver(WeightReceiver):
    """Fetches versions from TcpSenders. ``refetched``: number of buckets requested again in full,
    because a delta or the base was wrong."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._shares: dict[int, HostShare] = {}  # by rank
        self._mapped: dict[int, ShmReceiver] = {}  # by rank: the memory of its publisher on this host
        self._interrupted = threading.Event()
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")
        self._threads = FetchThreads()
        self._clients: dict[bytes, ServiceClient] = {}
        self._services: dict[int, bytes] = {}  # by rank: the service of the last version
        self._fetch: TcpFetch | None = None
        self._lock = threading.Lock()
        self.refetched = 0

    @property
    def nbytes(self) -> int:
        """Host memory held: versions in use, and one that is idle."""
        return self._pool.nbytes + sum(each.nbytes for each in self._shares.values())

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        address, until = decode(where, TcpAddress), time.monotonic() + timeout_s
        receive = functools.partial(self._receive, address, manifest, base, until)
        try:
            if address.host == self._host.identity:
                return self._map(address, manifest) or receive()
            if not manifest.digested:
                return receive()
            if address.rank not in self._shares:
                self._shares[address.rank] = HostShare(self._host, address.rank)
            return self._shares[address.rank].fetch(manifest, receive, until, self._interrupted)
        finally:
            self._interrupted.clear()  # not at the begin: an interrupt may come before the thread of a fetch runs

    def _map(self, address: TcpAddress, manifest: Manifest) -> Fetched | None:
        """Map a version from the memory of a publisher on this host. Return None if it is not there, or a host
        without an identity: the publisher's service sends it, or says why not."""
        if not address.host:
            return None
        mapped = self._mapped.get(address.rank)
        if mapped is None or str(mapped.directory) != address.directory:
            if mapped is not None:
                mapped.close()
            mapped = self._mapped[address.rank] = ShmReceiver(Path(address.directory))
        try:
            return mapped.fetch(manifest, address.places, timeout_s=0.0)
        except (VersionGone, OSError, ValueError):  # of a path that is none
            return None

    def _receive(
        self,
        address: TcpAddress,
        manifest: Manifest,
        base: Fetched | None,
        until: float,
        room: Sequence[Bytes] = (),
        on_bucket: Callable[[], None] = lambda: None,
    ) -> Fetched:
        """Receive a version in ``room``, or in memory of this process."""
        client = self._client(address.service)
        with self._lock:
            fetch = self._fetch = TcpFetch(client, address, manifest, until - time.monotonic(), on_bucket)
            if self._interrupted.is_set():
                fetch.interrupt()
        try:
            chunks = self._run(fetch, base, room)
        finally:
            with self._lock:
                self._fetch = None
        self.refetched += fetch.refetched
        if fetch.error is None:
            self._services[address.rank] = address.service
            for service in set(self._clients) - set(self._services.values()):
                self._disconnect(service)  # replaced publishers: a replica may outlive many
            return Fetched(manifest, chunks, fetch.moved, "delta" if fetch.saved else "full")
        if not room:
            self._pool.give_back(chunks)  # frames of the error's traceback still refer to them
        if isinstance(fetch.error, (WireError, DeadlineExceeded)):
            self._disconnect(address.service)
        raise fetch.error

    def interrupt(self) -> None:
        """See ``WeightReceiver.interrupt``."""
        self._interrupted.set()
        with self._lock:
            if self._fetch is not None:
                self._fetch.interrupt()

    def close(self) -> None:
        """See ``WeightReceiver.close``."""
        self.interrupt()
        self._threads.end()
        for ends in (self._shares, self._mapped):
            while ends:
                ends.popitem()[1].close()
        for service in list(self._clients):
            self._disconnect(service)
        self._pool.close()

    def _run(self, fetch: TcpFetch, base: Fetched | None, room: Sequence[Bytes]) -> Sequence[Bytes]:
        """Run a fetch to its end. Return its chunks."""
        chunks = room or self._pool.take([each.nbytes for each in fetch.manifest.chunks])
        fetch.begin(chunks, base)
        if fetch.missing:
            self._threads.run(fetch)
        return chunks

    def _client(self, service: bytes) -> ServiceClient:
        if service not in self._clients:
            self._clients[service] = ServiceClient(service, self._host.own_key)
        return self._clients[service]

    def _disconnect(self, service: bytes) -> None:
        client = self._clients.pop(service, None)
        if client is not None:  # an ending fetch and ``close`` may both be here
            client.close()
