"""Transport ``tcp``: from the publisher's host memory to replicas on any host.

    run.weight_publisher("tcp")                                               # with keys
    run.weight_publisher("tcp", listen="tcp://10.0.0.7:9000", insecure=True)  # without: trusted networks only

Versions are staged in shared memory. Replicas on the publisher's host map them. On another host one
process fetches a version into shared memory for all: several buckets at a time, each verified on
arrival. A replica with an earlier version that the publisher still keeps gets deltas where they are
smaller. The publisher never waits: memory being sent or read is pinned, and reused once it is free.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ...errors import ConfigError, DeadlineExceeded, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, Host, WeightReceiver, WeightSender, WeightTransport
from ...memory import BufferPool, own_directories
from ...types import Manifest
from ...types.validation import check_least
from ...wire import ServiceClient
from .bucket_server import BucketServer, HeldVersion, TcpAddress, decode, encode
from .host_share import HostShare
from .shm import SharedRoom, ShmReceiver, VersionMemory
from .tcp_fetch import FetchThreads, TcpFetch

DELTA_BYTES = 256 << 20


class TcpTransport(WeightTransport):
    """Both ends, by the name ``tcp``. ``listen``: the publisher's address; default: a free port of its host.
    ``insecure``: no keys, so everyone with access to the address may fetch the weights. ``delta_bytes``: the
    publisher's memory for deltas made for one replica and kept for others; 0: whole buckets only."""

    def __init__(self, *, listen: str | None = None, insecure: bool = False, delta_bytes: int = DELTA_BYTES) -> None:
        if listen is not None and not listen.startswith("tcp://"):
            raise ConfigError(f"transport 'tcp' cannot listen at {listen!r}; tcp://HOST:PORT is expected")
        check_least(0, delta_bytes=delta_bytes)
        self._options: dict[str, Any] = {"listen": listen, "insecure": insecure, "delta_bytes": delta_bytes}

    def sender(self, host: Host) -> TcpSender:
        """See ``WeightTransport.sender``."""
        return TcpSender(host, **self._options)

    def receiver(self, host: Host) -> TcpReceiver:
        """See ``WeightTransport.receiver``."""
        return TcpReceiver(host)


class TcpSender(WeightSender):
    """Sends versions by a BucketServer."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._host = host
        self._memory = VersionMemory.private(host.name)
        try:
            self._buckets = BucketServer(host, listen=listen, insecure=insecure, delta_bytes=delta_bytes)
        except BaseException:
            self._memory.close()
            raise

    def room(self, nbytes: int) -> SharedRoom:
        """See ``WeightSender.room``."""
        return self._memory.room(nbytes)

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """See ``WeightSender.prepare``."""
        return self._memory.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        number = manifest.version
        places = encode(self._memory.seal(number))
        self._buckets.add(HeldVersion(manifest, self._memory.chunks(number)))
        host, directory = self._host, str(self._memory.directory)
        return encode(TcpAddress(self._buckets.where, number, host.rank, host.identity, directory, places))

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._buckets.keep(self._memory.versions)
        self._memory.abandon()

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._buckets.keep(versions)
        self._memory.keep(versions)

    @property
    def nbytes(self) -> int:
        """Host memory held for weights and deltas."""
        return self._memory.nbytes + self._buckets.nbytes

    def close(self) -> None:
        """See ``WeightSender.close``."""
        self._buckets.close()
        self._memory.close()


class TcpReceiver(WeightReceiver):
    """Fetches versions from TcpSenders."""

    keeps_base: ClassVar[bool] = True

    def __init__(self, host: Host) -> None:
        self._host = host
        self._shares: dict[int, HostShare] = {}  # by rank
        self._mapped: dict[int, ShmReceiver] = {}  # by rank: the memory of its publisher on this host
        self._interrupted = threading.Event()
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")
        self._threads = FetchThreads()
        self._clients: dict[int, ServiceClient] = {}  # by rank
        self._services: dict[int, bytes] = {}  # by rank: the service of its client
        self._fetch: TcpFetch | None = None
        self._lock = threading.Lock()

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
                return self._map(address, manifest, until) or receive()
            self._end(self._mapped, address.rank)  # of a former publisher, which was on this host
            if not manifest.digested:
                return receive()
            if address.rank not in self._shares:
                self._shares[address.rank] = HostShare(self._host, address.rank, self._interrupted)
            return self._shares[address.rank].fetch(manifest, receive, until)
        finally:
            self._interrupted.clear()  # not at the begin: an interrupt may come before the thread of a fetch runs

    def _map(self, address: TcpAddress, manifest: Manifest, until: float) -> Fetched | None:
        """Map a version from the memory of a publisher on this host. Return None if it is not there, or the host has
        no identity: the publisher's service sends it, or says why not. Raises the errors of ``ShmReceiver.fetch``."""
        mapped, directory = self._mapped.get(address.rank), Path(address.directory)
        if mapped is None or mapped.directory != directory:
            if not address.host or directory not in own_directories():  # an address comes from another process
                return None
            self._end(self._shares, address.rank)
            self._end(self._mapped, address.rank)
            mapped = self._mapped[address.rank] = ShmReceiver(directory, self._interrupted)
        try:
            found = mapped.fetch(manifest, address.places, timeout_s=until - time.monotonic())
        except (WireError, DeadlineExceeded):
            raise
        except (VersionGone, OSError, ValueError):  # of a file that cannot be mapped
            return None
        # its files go with the publisher, and a later version needs none of it
        return dataclasses.replace(found, places=(), is_base=False)

    @staticmethod
    def _end(ends: dict[int, Any], rank: int) -> None:
        """Close the end of a rank, if there is one. An ending fetch and ``close`` may both be here."""
        if (end := ends.pop(rank, None)) is not None:
            end.close()

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
        client = self._client(address)
        with self._lock:
            fetch = self._fetch = TcpFetch(client, address, manifest, until - time.monotonic(), on_bucket)
            if self._interrupted.is_set():
                fetch.interrupt()
        try:
            chunks = room or self._pool.take([each.nbytes for each in manifest.chunks])
            fetch.begin(chunks, base)
            self._threads.run(fetch)
        finally:
            with self._lock:
                self._fetch = None
        if fetch.error is None:
            return Fetched(manifest, chunks, fetch.moved, "delta" if fetch.saved else "full")
        if not room:
            self._pool.give_back(chunks)  # frames of the error's traceback still refer to them
        if isinstance(fetch.error, (WireError, DeadlineExceeded)):
            self._end(self._clients, address.rank)
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
        for ends in (self._shares, self._mapped, self._clients):
            for rank in list(ends):
                self._end(ends, rank)
        self._pool.close()

    def _client(self, address: TcpAddress) -> ServiceClient:
        if address.rank not in self._clients or self._services[address.rank] != address.service:
            self._end(self._clients, address.rank)  # of a former publisher
            self._clients[address.rank] = ServiceClient(address.service, self._host.own_key)
            self._services[address.rank] = address.service
        return self._clients[address.rank]
