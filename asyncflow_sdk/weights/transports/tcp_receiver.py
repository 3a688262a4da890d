"""TcpReceiver: fetches versions from TcpSenders, or through the relay of its host."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from ...errors import DeadlineExceeded, MemoryFull, WireError
from ...interfaces.weights import Bytes, Fetched, Host, WeightReceiver
from ...memory import BufferPool
from ...types import Manifest
from ...wire import ServiceClient
from .relay_receiver import RelayReceiver
from .streaming_fetch import StreamingFetch, alike
from .tcp_fetch import FetchThreads, TcpFetch
from .tcp_messages import TcpAddress, decode, fits


class TcpReceiver(WeightReceiver):
    """Fetches versions from TcpSenders. ``refetched``: number of buckets requested again in full,
    because a delta or the base was wrong."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._relayed: dict[int, RelayReceiver] = {}  # by rank
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")
        self._threads = FetchThreads()
        self._clients: dict[bytes, ServiceClient] = {}
        self._services: dict[int, bytes] = {}  # by rank: the service of the last version
        self._fetch: TcpFetch | None = None
        self._streaming: dict[int, StreamingFetch] = {}  # by rank
        self._lock = threading.Lock()
        self._closed = False
        self.refetched = 0

    @property
    def nbytes(self) -> int:
        """Host memory held: versions in use, and one that is idle or streamed."""
        return self._pool.nbytes + sum(each.nbytes for each in self._relayed.values())

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        address = decode(where, TcpAddress)
        notes: list[str] = []
        if address.fanout > 0 and address.host != self._host.identity and manifest.digested:
            try:
                return self._relayed_from(address.rank).fetch(manifest, address, base=base, timeout_s=timeout_s)
            except MemoryFull as error:
                notes.append(f"version {manifest.version} is not shared on this host: {error}")
        client = self._client(address.service)
        with self._lock:
            streaming = self._streaming.pop(address.rank, None)
            fetch = self._fetch = TcpFetch(client, address, manifest, streaming, timeout_s)
        try:
            chunks = self._run(fetch, base)
        finally:
            with self._lock:
                self._fetch = None
        self.refetched += fetch.refetched
        if fetch.error is None:
            self._services[address.rank] = address.service
            for service in set(self._clients) - set(self._services.values()):
                self._disconnect(service)  # replaced publishers: a replica may outlive many
            self._stream_next(address, manifest, chunks, base)
            return Fetched(manifest, chunks, fetch.moved, "delta" if fetch.saved else "full", notes=notes)
        self._pool.give_back(chunks)  # frames of the error's traceback still refer to them
        if isinstance(fetch.error, (WireError, DeadlineExceeded)):
            self._disconnect(address.service)
        raise fetch.error

    def interrupt(self) -> None:
        """See ``WeightReceiver.interrupt``."""
        with self._lock:
            if self._fetch is not None:
                self._fetch.interrupt()
            relayed = list(self._relayed.values())
        for each in relayed:
            each.interrupt()

    def close(self) -> None:
        """See ``WeightReceiver.close``."""
        self.interrupt()
        with self._lock:
            streaming, self._streaming, self._closed = list(self._streaming.values()), {}, True
        for each in streaming:
            each.stop()
        for relayed in self._relayed.values():
            relayed.close()
        self._threads.end()
        for service in list(self._clients):
            self._disconnect(service)
        self._pool.close()

    def _run(self, fetch: TcpFetch, base: Fetched | None) -> list[Bytes]:
        """Run a fetch to its end. Return its chunks."""
        manifest, partial = fetch.manifest, fetch.take_streamed()
        chunks = partial.chunks if partial is not None else self._pool.take([each.nbytes for each in manifest.chunks])
        fetch.begin(chunks, base, partial)
        if not fetch.missing:
            return chunks
        self._threads.run(fetch)
        return chunks

    def _stream_next(
        self, address: TcpAddress, manifest: Manifest, chunks: Sequence[Bytes], base: Fetched | None
    ) -> None:
        """Stream the next version, unless deltas would be smaller."""
        if address.stream is None or not manifest.nbytes or not 0 < address.attempt < 1 << 62:
            return
        has_deltas = address.deltas and manifest.digested
        if has_deltas and (base is None or not fits(manifest, base.manifest) or alike(base.chunks, chunks)):
            return
        with self._lock:
            if not self._closed:
                self._streaming[address.rank] = StreamingFetch(self._pool, address, manifest)

    def _relayed_from(self, rank: int) -> RelayReceiver:
        with self._lock:
            return self._relayed.setdefault(rank, RelayReceiver(self._host))

    def _client(self, service: bytes) -> ServiceClient:
        if service not in self._clients:
            self._clients[service] = ServiceClient(service, self._host.own_key)
        return self._clients[service]

    def _disconnect(self, service: bytes) -> None:
        client = self._clients.pop(service, None)
        if client is not None:  # an ending fetch and ``close`` may both be here
            client.close()
