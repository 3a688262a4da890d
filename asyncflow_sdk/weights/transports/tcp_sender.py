"""TcpSender: versions staged in host memory, sent from there to replicas.

Nothing waits for replicas: memory being sent is pinned, and reused once it is free. Deltas are
encoded by threads of their own.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import AsyncFlowError, LeaseLost, ProtocolError, VersionGone
from ...interfaces.weights import Bytes, Host, WeightSender
from ...types import Manifest, carrier
from ...types.manifest import Bucket
from ...wire import Service
from . import delta
from .delta_cache import DeltaCache, DeltaKey
from .in_progress import GONE, InProgressVersion
from .stream import StreamServer
from .tcp_messages import ANSWER_BYTES, DELTA, MOST_BUCKETS, RAW, Get, GetReply, TcpAddress, decode, encode, fits
from .version_memory import SharedRoom, VersionMemory

DELTA_THREADS = 2


class _SentVersion:
    """A version that replicas may request. ``chunks`` pin its memory."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
        self.manifest, self.root = manifest, manifest.root
        self.buckets = list(manifest.buckets())
        self.chunks = chunks
        self._widths: dict[tuple[int, int], int] = {}

    def span(self, first: int, count: int) -> Sequence[Bucket]:
        """Return the requested buckets. Raises ProtocolError."""
        if not (0 <= first < first + count <= len(self.buckets) and count <= MOST_BUCKETS):
            raise ProtocolError(
                f"{count} buckets from {first} of version {self.manifest.version}, which has {len(self.buckets)}"
            )
        return self.buckets[first : first + count]

    def bytes_of(self, bucket: Bucket) -> Bytes:
        """Return the bytes of a bucket."""
        return self.chunks[bucket.chunk][bucket.start : bucket.stop]

    def width(self, bucket: Bucket) -> int:
        """Return the element size of most of a bucket's bytes."""
        if not self._widths:
            self._widths = _widths(self.manifest)
        return self._widths.get((bucket.chunk, bucket.index), 1)


class TcpSender(WeightSender):
    """Sends versions by a Service, and streams whole buckets. ``listen``, ``insecure``: see
    Service. ``delta_bytes``: memory for encoded deltas; 0: deltas are not made."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._rank, self._makes_deltas = host.rank, delta_bytes > 0
        self._deltas = DeltaCache(delta_bytes)
        self._versions: dict[int, _SentVersion] = {}
        self._unannounced: int | None = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(DELTA_THREADS, "asyncflow-delta")
        self._in_progress = InProgressVersion()
        with contextlib.ExitStack() as undo:
            self._memory = VersionMemory.private(host.name)
            undo.callback(self._memory.close)
            self._service = Service(host, self, listen=listen, insecure=insecure)
            undo.callback(self._service.close)
            own = self._service.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            self._stream = StreamServer(own if insecure else str(self._memory.directory / "stream"), self)
            undo.pop_all()

    def room(self, nbytes: int) -> SharedRoom:
        """See ``WeightSender.room``."""
        self._unannounced = None
        room = self._memory.room(nbytes)
        room.on_full = self._in_progress.add
        return room

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        """See ``WeightSender.prepare``."""
        return self._memory.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        """See ``WeightSender.send``."""
        number = manifest.version
        self._memory.seal(number)
        version = _SentVersion(manifest, self._memory.chunks(number))
        with self._lock:
            self._versions[number] = version
        self._unannounced = number
        self._in_progress.complete()
        attempt, deltas = self._in_progress.attempt, self._makes_deltas
        return encode(TcpAddress(self._service.where, number, self._rank, self._stream.where, attempt, deltas))

    def abandon(self) -> None:
        """See ``WeightSender.abandon``."""
        self._in_progress.drop()
        self._forget_all_but([version for version in self._memory.versions if version != self._unannounced])
        self._memory.abandon()
        self._unannounced = None

    def keep(self, versions: Sequence[int]) -> None:
        """See ``WeightSender.keep``."""
        self._unannounced = None
        self._forget_all_but(versions)
        self._memory.keep(versions)

    @property
    def nbytes(self) -> int:
        """Host memory held for weights and deltas."""
        return self._memory.nbytes + self._deltas.nbytes

    def close(self) -> None:
        """See ``WeightSender.close``."""
        self._service.close()
        self._stream.close()
        self._threads.shutdown(cancel_futures=True)
        self._forget_all_but(())
        self._memory.close()

    def _forget_all_but(self, versions: Sequence[int]) -> None:
        with self._lock:
            self._versions = {number: version for number, version in self._versions.items() if number in versions}
            roots = {version.root for version in self._versions.values()}
        self._deltas.keep(roots)

    def _find(self, number: int, root: str) -> _SentVersion:
        with self._lock:
            version = self._versions.get(number)
        if version is None or version.root != root:
            raise VersionGone(
                f"version {number} is no longer kept by its publisher at {self._service.address}; take the newest"
            )
        return version

    # ---- the stream's StreamSource

    def stream_buckets(self, version: int, root: str, first: int, count: int) -> Sequence[Bytes]:
        """See ``StreamSource.stream_buckets``."""
        found = self._find(version, root)
        return [found.bytes_of(bucket) for bucket in found.span(first, count)]

    def stream_chunk(self, connection: socket.socket, attempt: int, number: int) -> tuple[int, Bytes | int]:
        """See ``StreamSource.stream_chunk``."""
        attempt, found = self._in_progress.wait(connection, attempt, number)
        if isinstance(found, int):
            return attempt, found
        try:
            return attempt, self._memory.view(found)
        except LeaseLost:  # its memory was reused
            return attempt, GONE

    # ---- the service's ServiceHandler

    def request(self, peer: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        """See ``ServiceHandler.request``."""
        get = decode(body, Get)
        version = self._find(get.version, get.root)
        with self._lock:
            base = self._versions.get(get.base) if self._makes_deltas else None
        buckets = version.span(get.first, get.count)
        if base is None or base.root != get.base_root or not fits(version.manifest, base.manifest):
            buckets = _first_of(buckets, ANSWER_BYTES)
            self._answer(ticket, get, buckets, [None] * len(buckets))
        else:
            self._threads.submit(self._answer_deltas, ticket, get, version, base, buckets)

    def gone(self, peer: str) -> None:
        """See ``ServiceHandler.gone``."""

    def _answer_deltas(
        self, ticket: int, get: Get, version: _SentVersion, base: _SentVersion, buckets: Sequence[Bucket]
    ) -> None:
        """Answer with a delta for each bucket, or the bucket if that is smaller."""
        codes, size = list[bytes | None](), 0
        try:
            for number, bucket in enumerate(buckets, get.first):
                new, old = version.bytes_of(bucket), base.bytes_of(bucket)
                make = functools.partial(delta.encode, new, old, version.width(bucket))
                codes.append(self._deltas.get(DeltaKey(version.root, base.root, number), make))
                size += len(codes[-1] or new)
                if size >= ANSWER_BYTES:
                    break
        except Exception as error:
            self._service.fail(ticket, error if isinstance(error, AsyncFlowError) else ProtocolError(repr(error)))
        else:
            self._answer(ticket, get, buckets[: len(codes)], codes)

    def _answer(self, ticket: int, get: Get, buckets: Sequence[Bucket], codes: Sequence[bytes | None]) -> None:
        """Answer with these deltas; None: the whole bucket, pinned only when it is sent."""

        def frames() -> Sequence[Any]:
            version = self._find(get.version, get.root)
            return [version.bytes_of(b) if code is None else code for b, code in zip(buckets, codes, strict=True)]

        kinds = bytes(RAW if code is None else DELTA for code in codes)
        self._service.answer(ticket, encode(GetReply(kinds)), frames)


def _first_of(buckets: Sequence[Bucket], nbytes: int) -> Sequence[Bucket]:
    """Return the first buckets, up to ``nbytes``; at least one."""
    size = 0
    for number, bucket in enumerate(buckets):
        size += bucket.stop - bucket.start
        if size > nbytes and number:
            return buckets[:number]
    return buckets


def _widths(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Return the element size of most bytes of each bucket, by chunk and index."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    step = manifest.bucket_bytes
    for info in manifest.tensors:
        width, stop = carrier(info.dtype).itemsize, info.offset + info.nbytes
        for index in range(info.offset // step, -(-stop // step)):
            inside = min(stop, (index + 1) * step) - max(info.offset, index * step)
            sizes = found.setdefault((info.chunk, index), {})
            sizes[width] = sizes.get(width, 0) + inside
    return {place: max(sizes, key=lambda width: sizes[width]) for place, sizes in found.items()}
