"""RelayReceiver: fetches versions for this host, or maps versions fetched by another process of it.

The publisher assigns a source to each host: itself, or the relay of another host. If the source
ends, stalls or sends wrong bytes, the receiver reports it and gets another; verified buckets stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ...errors import AsyncFlowError, DigestMismatch, ProtocolError, ServerLost, VersionGone, WireError
from ...interfaces.weights import Bytes, Fetched, Host
from ...memory import own_directories
from ...types import Manifest
from ...types.manifest import BUCKET_BYTES
from ...wire import ServiceAddress, ServiceClient
from .relay import Relay
from .shm import ShmReceiver
from .streaming_fetch import PartialVersion
from .tcp_fetch import STALL_S, FetchThreads, TcpFetch
from .tcp_messages import Join, JoinReply, ShareReply, ShareRequest, TcpAddress, decode, encode
from .version_memory import ChunkPlace

HOST_STALL_S = 30.0
"""Longest wait for the next bucket of the own host's relay."""
THREADS = 2
"""Requests of about a bucket on their way, each on a connection of its own. They share the link: with more,
each bucket arrives later, and so does the next host's. With one, the link is idle between requests."""
MOST_SOURCES = 8
"""Relays tried for one version before the publisher."""
FEW_BYTES = BUCKET_BYTES - 1
"""Answers are of about a bucket, so it is passed on soon."""
REPLACEABLE = (WireError, DigestMismatch, ProtocolError, VersionGone)
"""Errors of one source; another may have none."""


class RelayReceiver:
    """The versions of one publishing rank. One ``fetch`` at a time; ``interrupt`` is thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._relay: Relay | None = None
        self._threads = FetchThreads(THREADS)
        self._clients: dict[bytes, ServiceClient] = {}
        self._maps: dict[Path, ShmReceiver] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self._until = 0.0

    @property
    def nbytes(self) -> int:
        """Host memory held as a relay."""
        return 0 if self._relay is None else self._relay.nbytes

    def fetch(self, manifest: Manifest, address: TcpAddress, *, base: Fetched | None, timeout_s: float) -> Fetched:
        """See ``WeightReceiver.fetch``."""
        self._stopped, self._until = False, time.monotonic() + timeout_s
        version, relay = manifest.version, self._open_relay(address)
        notes, chunks, moved, failed = list[str](), None, 0, b""
        try:
            while True:
                if len(notes) < MOST_SOURCES:
                    join = Join(address.version, manifest.root, self._host.identity, relay.where, failed)
                    source = decode(self._call(address.service, join), JoinReply)
                else:
                    source = JoinReply(b"", False)
                try:
                    if source.shared:
                        fetched = self._map_shared(manifest, address, source.source)
                        relay.clear()
                        fetched.notes = notes
                        return fetched
                    chunks = relay.begin(manifest) if chunks is None else chunks
                    fetch = self._fetch_from(source.source or address.service, manifest, address, chunks, base)
                    moved += fetch.moved
                    if fetch.error is not None:
                        raise fetch.error
                except REPLACEABLE as error:
                    if not source.source or self._stopped or time.monotonic() >= self._until:
                        raise
                    failed = source.source
                    self._disconnect(failed)
                    whose = "this host's relay" if source.shared else "a relay"
                    notes.append(f"version {version} does not come from {whose} at {_address_of(failed)}: {error}")
                    continue
                fetched = self._map(relay.directory, manifest, relay.complete())
                fetched.moved, fetched.encoding, fetched.notes = moved, "delta" if fetch.saved else "full", notes
                return fetched
        finally:
            relay.abandon()
            self._disconnect_all_but(address.service)

    def interrupt(self) -> None:
        """Make a running ``fetch`` raise soon."""
        with self._lock:
            self._stopped = True
            for client in self._clients.values():
                client.interrupt()

    def close(self) -> None:
        """Stop. Fetched versions stay valid. Idempotent."""
        self.interrupt()
        self._threads.end()
        self._disconnect_all_but(b"")
        if self._relay is not None:
            self._relay.close()
        for each in self._maps.values():
            each.close()

    # ---- as the host's relay

    def _open_relay(self, address: TcpAddress) -> Relay:
        if self._relay is None:
            insecure = _decode_service(address.service).key is None
            self._relay = Relay(self._host, insecure=insecure, deltas=address.deltas)
        return self._relay

    def _fetch_from(
        self, service: bytes, manifest: Manifest, address: TcpAddress, chunks: list[Bytes], base: Fetched | None
    ) -> TcpFetch:
        """Fetch the missing buckets from a publisher or relay."""
        assert self._relay is not None
        relay, partial = self._relay, PartialVersion(chunks)
        for number, bucket in enumerate(manifest.buckets()):
            if relay.has(number):
                partial.found[bucket.chunk, bucket.index] = manifest.chunks[bucket.chunk].digests[bucket.index]
        where = msgspec.structs.replace(address, service=service, stream=None)
        relayed = service != address.service
        left = self._until - time.monotonic()
        fetch = TcpFetch(
            self._client(service), where, manifest, None, left, relay.arrive, from_relay=relayed, few_bytes=FEW_BYTES
        )
        fetch.begin(chunks, base, partial)
        if self._stopped:  # before the fetch could be interrupted
            fetch.interrupt()
        if fetch.missing:
            self._threads.run(fetch)
        return fetch

    # ---- from the host's relay

    def _map_shared(self, manifest: Manifest, address: TcpAddress, relay: bytes) -> Fetched:
        """Wait until another process of this host has fetched a version, and map it."""
        received, progress_at = 0, time.monotonic()
        while True:
            found = decode(self._call(relay, ShareRequest(address.version, manifest.root)), ShareReply)
            if found.places:
                directory = Path(found.directory)
                if directory not in own_directories():
                    raise ProtocolError(f"no memory of this user is at {found.directory[:200]!r}")
                return self._map(directory, manifest, found.places)
            if found.received > received:
                received, progress_at = found.received, time.monotonic()
            elif time.monotonic() > progress_at + HOST_STALL_S:
                raise ServerLost(f"nothing new arrived there for {HOST_STALL_S:g} s")

    def _map(self, directory: Path, manifest: Manifest, places: Sequence[ChunkPlace]) -> Fetched:
        if directory not in self._maps:
            self._maps[directory] = ShmReceiver(directory)
        for former in [each for each in self._maps if each != directory]:
            self._maps.pop(former).close()
        return self._maps[directory].fetch(manifest, msgspec.msgpack.encode(places), timeout_s=0.0)

    # ---- connections

    def _call(self, service: bytes, call: Join | ShareRequest) -> bytes:
        client = self._client(service)
        with self._lock:
            since, stopped = client.interrupts, self._stopped
        left = self._until - time.monotonic()
        if stopped or left <= 0:
            self._give_up(call.version)
        return client.call(encode(call), min(left, STALL_S), f"version {call.version}", since=since).body

    def _give_up(self, version: int) -> NoReturn:
        if self._stopped:
            raise WireError(f"the fetch of version {version} was interrupted: it is wanted no more")
        raise ServerLost(f"version {version} was not here in time")

    def _client(self, service: bytes) -> ServiceClient:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = ServiceClient(service, self._host.own_key)
            return self._clients[service]

    def _disconnect(self, service: bytes) -> None:
        with self._lock:
            client = self._clients.pop(service, None)
        if client is not None:
            client.close()

    def _disconnect_all_but(self, service: bytes) -> None:
        for each in [each for each in self._clients if each != service]:
            self._disconnect(each)


def _decode_service(where: bytes) -> ServiceAddress:
    """Decode the address of a service. Raises ProtocolError."""
    return decode(where, ServiceAddress)


def _address_of(where: bytes) -> str:
    try:
        return _decode_service(where).address
    except AsyncFlowError:
        return "an address that cannot be read"
