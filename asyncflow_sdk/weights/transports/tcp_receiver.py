"""TcpReceiver: fetches versions from TcpSenders; on other hosts than theirs, once for all processes."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec

from ...errors import DeadlineExceeded, WireError
from ...interfaces.weights import Bytes, Fetched, Host, WeightReceiver
from ...memory import BufferPool
from ...types import Manifest
from ...wire import ServiceClient
from .host_share import HostShare, NotShared
from .streaming_fetch import StreamingFetch, alike
from .tcp_fetch import FetchThreads, TcpFetch
from .tcp_messages import TcpAddress, decode, fits


class TcpReceiver(WeightReceiver):
    """Fetches versions from TcpSenders. ``refetched``: number of buckets requested again in full,
    because a delta or the base was wrong."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._shares: dict[int, HostShare] = {}  # by rank
        self._interrupted = threading.Event()
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
        return self._pool.nbytes + sum(each.nbytes for each in self._shares.values())

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        address, until = decode(where, TcpAddress), time.monotonic() + timeout_s
        self._interrupted.clear()
        if address.host == self._host.identity or not manifest.digested:
            return self._receive(address, manifest, base, until)
        unstreamed = msgspec.structs.replace(address, stream=None)
        receive = functools.partial(self._receive, unstreamed, manifest, base, until)
        try:
            if address.rank not in self._shares:
                self._shares[address.rank] = HostShare(self._host, address.rank)
            return self._shares[address.rank].fetch(manifest, receive, until, self._interrupted)
        except NotShared as error:
            fetched = self._receive(address, manifest, base, until)
            fetched.notes = [f"version {manifest.version} is not shared on this host: {error}"]
            return fetched

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
            streaming = self._streaming.pop(address.rank, None)
            fetch = self._fetch = TcpFetch(client, address, manifest, streaming, until - time.monotonic(), on_bucket)
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
            self._stream_next(address, manifest, chunks, base)
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
        with self._lock:
            streaming, self._streaming, self._closed = list(self._streaming.values()), {}, True
        for each in streaming:
            each.stop()
        self._threads.end()
        while self._shares:
            self._shares.popitem()[1].close()
        for service in list(self._clients):
            self._disconnect(service)
        self._pool.close()

    def _run(self, fetch: TcpFetch, base: Fetched | None, room: Sequence[Bytes]) -> Sequence[Bytes]:
        """Run a fetch to its end. Return its chunks."""
        manifest, partial = fetch.manifest, None if room else fetch.take_streamed()
        chunks = partial.chunks if partial is not None else room
        chunks = chunks or self._pool.take([each.nbytes for each in manifest.chunks])
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

    def _client(self, service: bytes) -> ServiceClient:
        if service not in self._clients:
            self._clients[service] = ServiceClient(service, self._host.own_key)
        return self._clients[service]

    def _disconnect(self, service: bytes) -> None:
        client = self._clients.pop(service, None)
        if client is not None:  # an ending fetch and ``close`` may both be here
            client.close()
