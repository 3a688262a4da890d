"""The publishing end of the tcp transport: versions staged in host memory, sent from where they lie to who asks.

Nobody who asks is waited for: what is being sent is pinned, and memory that is still pinned when its version is kept
no longer is used again later. Deltas are made by threads of their own, and answered when they are made.
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
from . import delta
from .delta_cache import DeltaCache, DeltaKey
from .in_progress import GONE, InProgressVersion
from .service import Service
from .stream import StreamServer
from .tcp_messages import ANSWER_BYTES, DELTA, MOST_BUCKETS, RAW, Get, GetReply, TcpAddress, decode, encode, fits
from .version_memory import SharedRoom, VersionMemory

DELTA_THREADS = 2


class _Version:
    """One that may be asked for. ``chunks`` pin its memory."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
        self.manifest, self.root = manifest, manifest.root
        self.buckets = list(manifest.buckets())
        self.chunks = chunks
        self._widths: dict[tuple[int, int], int] = {}

    def span(self, first: int, count: int) -> Sequence[Bucket]:
        """Raises ProtocolError."""
        if not (0 <= first < first + count <= len(self.buckets) and count <= MOST_BUCKETS):
            raise ProtocolError(
                f"{count} buckets from {first} of version {self.manifest.version}, which has {len(self.buckets)}"
            )
        return self.buckets[first : first + count]

    def bytes_of(self, bucket: Bucket) -> Bytes:
        return self.chunks[bucket.chunk][bucket.start : bucket.stop]

    def width(self, bucket: Bucket) -> int:
        """Bytes of most of its elements."""
        if not self._widths:
            self._widths = _widths(self.manifest)
        return self._widths.get((bucket.chunk, bucket.index), 1)


class TcpSender(WeightSender):
    """``listen`` and ``insecure``: see Service. ``delta_bytes``: how much memory deltas may take that were made already; 0: none are
    made."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._rank, self._delta = host.rank, delta_bytes > 0
        self._codes = DeltaCache(delta_bytes)
        self._versions: dict[int, _Version] = {}
        self._fresh: int | None = None  # sent, and not kept yet
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(DELTA_THREADS, "asyncflow-delta")
        self._unfinished = InProgressVersion()
        with contextlib.ExitStack() as undo:
            self._staging = VersionMemory.private(host.name)
            undo.callback(self._staging.close)
            self._service = Service(host, self, listen=listen, insecure=insecure)
            undo.callback(self._service.close)
            here = self._service.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
            place = here if insecure else str(self._staging.directory / "bulk")
            self._bulk = StreamServer(place, self._whole, self._next)
            undo.pop_all()

    def room(self, nbytes: int) -> SharedRoom:
        self._fresh = None
        room = self._staging.room(nbytes)
        room.on_full = self._unfinished.written
        return room

    def prepare(self, sizes: Sequence[int]) -> Iterator[None]:
        return self._staging.prepare(sizes)

    def send(self, manifest: Manifest) -> bytes:
        self._staging.seal(manifest.version)
        version = _Version(manifest, self._staging.chunks(manifest.version))
        with self._lock:
            self._versions[manifest.version] = version
        self._fresh = manifest.version
        self._unfinished.whole()
        attempt = self._unfinished.attempt
        return encode(
            TcpAddress(self._service.where, manifest.version, self._rank, self._bulk.where, attempt, self._delta)
        )

    def abandon(self) -> None:
        self._unfinished.dropped()
        self._forget([version for version in self._staging.versions if version != self._fresh])
        self._staging.abandon()
        self._fresh = None

    def keep(self, versions: Sequence[int]) -> None:
        self._fresh = None
        self._forget(versions)
        self._staging.keep(versions)

    @property
    def nbytes(self) -> int:
        return self._staging.nbytes + self._codes.nbytes

    def close(self) -> None:
        self._stop()
        self._threads.shutdown(cancel_futures=True)
        self._forget(())
        self._staging.close()

    def _forget(self, but: Sequence[int]) -> None:
        with self._lock:
            self._versions = {number: version for number, version in self._versions.items() if number in but}
            roots = {version.root for version in self._versions.values()}
        self._codes.keep(roots)

    def _stop(self) -> None:
        self._service.close()
        self._bulk.close()

    def _whole(self, number: int, root: str, first: int, count: int) -> Sequence[Bytes]:
        """Buckets as they are. Raises VersionGone, ProtocolError."""
        version = self._version(number, root)
        return [version.bytes_of(bucket) for bucket in version.span(first, count)]

    def _next(self, connection: socket.socket, attempt: int, number: int) -> tuple[int, Bytes | int]:
        """A chunk as soon as it is written; see InProgressVersion."""
        attempt, found = self._unfinished.wait(connection, attempt, number)
        if isinstance(found, int):
            return attempt, found
        try:
            return attempt, self._staging.view(found)
        except LeaseLost:  # its memory is a later version's
            return attempt, GONE

    # ---- called by the service

    def request(self, peer: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        get = decode(body, Get)
        version = self._version(get.version, get.root)
        with self._lock:
            base = self._versions.get(get.base)
        buckets = version.span(get.first, get.count)
        if base is None or not self._delta or base.root != get.base_root or not fits(version.manifest, base.manifest):
            buckets = _within(buckets)
            self._send(ticket, get, buckets, [None] * len(buckets))
        else:
            self._threads.submit(self._answer, ticket, get, version, base, buckets)

    def gone(self, peer: str) -> None:
        pass

    def _answer(self, ticket: int, get: Get, version: _Version, base: _Version, buckets: Sequence[Bucket]) -> None:
        """With deltas, where they are smaller."""
        codes, size = list[bytes | None](), 0
        try:
            for number, bucket in enumerate(buckets, get.first):
                new, old = version.bytes_of(bucket), base.bytes_of(bucket)
                make = functools.partial(delta.encode, new, old, version.width(bucket))
                code = self._codes.get(DeltaKey(version.root, base.root, number), make)
                codes.append(code)
                size += len(new if code is None else code)
                if size >= ANSWER_BYTES:
                    break
        except Exception as error:
            self._service.fail(ticket, error if isinstance(error, AsyncFlowError) else ProtocolError(repr(error)))
        else:
            self._send(ticket, get, buckets[: len(codes)], codes)

    def _send(self, ticket: int, get: Get, buckets: Sequence[Bucket], codes: Sequence[bytes | None]) -> None:
        """Whole buckets are looked up when they are sent, and not pinned before."""

        def frames() -> Sequence[Any]:
            version = self._version(get.version, get.root)
            return [version.bytes_of(b) if code is None else code for b, code in zip(buckets, codes, strict=True)]

        self._service.answer(
            ticket, encode(GetReply(bytes(RAW if code is None else DELTA for code in codes))), frames
        )

    def _version(self, number: int, root: str) -> _Version:
        with self._lock:
            version = self._versions.get(number)
        if version is None or version.root != root:
            raise VersionGone(
                f"version {number} is no longer kept by its publisher at {self._service.address}; take the newest"
            )
        return version


def _within(buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """As many of the first ones as an answer has room for."""
    size = 0
    for number, bucket in enumerate(buckets):
        size += bucket.stop - bucket.start
        if size > ANSWER_BYTES and number:
            return buckets[:number]
    return buckets


def _widths(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Of each bucket, the element size that most of its bytes have."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    step = manifest.bucket_bytes
    for info in manifest.tensors:
        width, stop = carrier(info.dtype).itemsize, info.offset + info.nbytes
        for index in range(info.offset // step, -(-stop // step)):
            inside = min(stop, (index + 1) * step) - max(info.offset, index * step)
            sizes = found.setdefault((info.chunk, index), {})
            sizes[width] = sizes.get(width, 0) + inside
    return {place: max(sizes, key=lambda width: sizes[width]) for place, sizes in found.items()}
