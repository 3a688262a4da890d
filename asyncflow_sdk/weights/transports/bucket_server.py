"""BucketServer: answers requests for buckets of versions in this process's memory.

    server = BucketServer(host, insecure=False, delta_bytes=256 << 20, on_call=..., on_gone=...)
    server.add(HeldVersion(manifest, chunks)); server.where     # the address for receivers

A publisher's versions are complete. Those of a relay arrive while they are requested: a request for
a missing bucket waits in the server for HOLD_S, and is then answered without any.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import AsyncFlowError, ProtocolError, VersionGone
from ...interfaces.weights import Bytes, Host
from ...types import Manifest, carrier
from ...types.manifest import Bucket
from ...wire import Service
from . import delta
from .delta_cache import DeltaCache, DeltaKey
from .tcp_messages import (
    ANSWER_BYTES,
    DELTA,
    MOST_BUCKETS,
    RAW,
    Get,
    GetReply,
    Join,
    ShareRequest,
    decode_call,
    encode,
    fits,
)

DELTA_THREADS = 2
HOLD_S = 2.0
"""Longest wait of a request for a missing bucket."""
MOST_HELD = 256
"""Limit of waiting requests; further ones are refused."""


class HeldVersion:
    """A version served to others. ``chunks`` pin its memory. ``arriving``: True if its
    buckets are not here yet; ``arrive`` adds one, and ``end`` the last."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Bytes], *, arriving: bool = False) -> None:
        self.manifest, self.root = manifest, manifest.root
        self.buckets = list(manifest.buckets())
        self.chunks = chunks
        self._arrived: set[int] | None = set() if arriving else None
        self._widths: dict[tuple[int, int], int] = {}

    @property
    def complete(self) -> bool:
        """True if all buckets are here."""
        return self._arrived is None

    @property
    def received(self) -> int:
        """Number of buckets that are here."""
        return len(self.buckets) if self._arrived is None else len(self._arrived)

    def has(self, number: int) -> bool:
        """True if a bucket is here."""
        return self._arrived is None or number in self._arrived

    def arrive(self, number: int) -> None:
        """Add a verified bucket."""
        if self._arrived is not None:
            self._arrived.add(number)

    def end(self, chunks: Sequence[Bytes]) -> None:
        """Complete the version. ``chunks``: its final memory."""
        self.chunks, self._arrived = chunks, None

    def span(self, first: int, count: int) -> Sequence[Bucket]:
        """Return the requested buckets up to a missing one. Raises ProtocolError."""
        if not (0 <= first < first + count <= len(self.buckets) and count <= MOST_BUCKETS):
            raise ProtocolError(
                f"{count} buckets from {first} of version {self.manifest.version}, which has {len(self.buckets)}"
            )
        arrived = self._arrived
        if arrived is not None:
            count = next((number for number in range(count) if first + number not in arrived), count)
        return self.buckets[first : first + count]

    def bytes_of(self, bucket: Bucket) -> Bytes:
        """Return the bytes of a bucket."""
        return self.chunks[bucket.chunk][bucket.start : bucket.stop]

    def width(self, bucket: Bucket) -> int:
        """Return the element size of most of a bucket's bytes."""
        if not self._widths:
            self._widths = _widths(self.manifest)
        return self._widths.get((bucket.chunk, bucket.index), 1)


class BucketServer:
    """Serves versions by a Service. ``listen``, ``insecure``: see Service. ``delta_bytes``: memory
    for encoded deltas; 0: deltas are not made. ``on_call`` handles other calls, ``on_gone`` the end
    of a peer, in the service's thread. ``relay``: True if requested versions may begin to arrive
    later. Thread-safe."""

    def __init__(
        self,
        host: Host,
        *,
        listen: str | None = None,
        insecure: bool,
        delta_bytes: int,
        on_call: Callable[[str, int, Join | ShareRequest], None],
        on_gone: Callable[[str], None] = lambda peer: None,
        relay: bool = False,
    ) -> None:
        self._relay = relay
        self._newest = -1
        self.makes_deltas = delta_bytes > 0
        self._deltas = DeltaCache(delta_bytes)
        self._on_call, self._on_gone = on_call, on_gone
        self._versions: dict[int, HeldVersion] = {}
        self._held: dict[int, Callable[[bool], bool]] = {}  # of the service's thread
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(DELTA_THREADS, "asyncflow-delta")
        self.service = Service(host, self, listen=listen, member=host.member, insecure=insecure)
        self.where = self.service.where

    @property
    def nbytes(self) -> int:
        """Host memory held for deltas."""
        return self._deltas.nbytes

    @property
    def versions(self) -> Sequence[HeldVersion]:
        """The versions, in the order in which they were added."""
        with self._lock:
            return list(self._versions.values())

    def add(self, version: HeldVersion) -> None:
        """Serve a version."""
        with self._lock:
            self._versions[version.manifest.version] = version
        self.refuse_older(version.manifest.version)

    def refuse_older(self, number: int) -> None:
        """Refuse versions up to ``number`` unless they are here. A relay awaits newer ones."""
        with self._lock:
            self._newest = max(self._newest, number)

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        with self._lock:
            self._versions = {number: version for number, version in self._versions.items() if number in versions}
            roots = {version.root for version in self._versions.values()}
        self._deltas.keep(roots)

    def find(self, number: int, root: str) -> HeldVersion:
        """Return a version. Raises VersionGone."""
        with self._lock:
            version = self._versions.get(number)
        if version is None or version.root != root:
            whose = "the relay" if self._relay else "its publisher"
            raise VersionGone(
                f"version {number} is no longer kept by {whose} at {self.service.address}; take the newest"
            )
        return version

    def find_arriving(self, number: int, root: str) -> HeldVersion | None:
        """Like ``find``. None for a version awaited by a relay."""
        return None if self._relay and number > self._newest else self.find(number, root)

    def update(self) -> None:
        """Answer the waiting requests for buckets received meanwhile. From any thread."""
        self.service.call(self._answer_held)

    def answer_when(self, ticket: int, attempt: Callable[[bool], bool]) -> None:
        """Answer a request by ``attempt(False)``, called again at each ``update`` until it returns
        True; after HOLD_S by ``attempt(True)``. In the service's thread."""
        if self._try(ticket, attempt, last=False):
            return
        if len(self._held) >= MOST_HELD:
            raise VersionGone(f"{MOST_HELD} requests wait at {self.service.address}; take another source")
        self._held[ticket] = attempt
        self.service.after(HOLD_S, functools.partial(self._expire, ticket))

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self.service.close()
        self._threads.shutdown(cancel_futures=True)
        self.keep(())

    # ---- the service's ServiceHandler

    def request(self, peer: str, ticket: int, body: bytes, frames: Sequence[Any]) -> None:
        """See ``ServiceHandler.request``."""
        call = decode_call(body)
        if isinstance(call, Get):
            self.answer_when(ticket, functools.partial(self._get, ticket, call))
        else:
            self._on_call(peer, ticket, call)

    def gone(self, peer: str) -> None:
        """See ``ServiceHandler.gone``."""
        self._on_gone(peer)

    # ---- in the service's thread

    def _answer_held(self) -> None:
        for ticket, attempt in list(self._held.items()):
            if self._try(ticket, attempt, last=False):
                del self._held[ticket]

    def _expire(self, ticket: int) -> None:
        attempt = self._held.pop(ticket, None)
        if attempt is not None:
            self._try(ticket, attempt, last=True)

    def _try(self, ticket: int, attempt: Callable[[bool], bool], *, last: bool) -> bool:
        try:
            return attempt(last)
        except AsyncFlowError as error:
            self.service.fail(ticket, error)
            return True

    def _get(self, ticket: int, get: Get, last: bool) -> bool:
        version = self.find_arriving(get.version, get.root)
        if version is None:
            return self._answer(ticket, get, (), ()) if last else False
        with self._lock:
            base = self._versions.get(get.base) if self.makes_deltas else None
        buckets = version.span(get.first, get.count)
        if not buckets and not last:
            return False
        if (
            base is None
            or base.root != get.base_root
            or not base.complete
            or not fits(version.manifest, base.manifest)
        ):
            buckets = _first_of(buckets, ANSWER_BYTES)
            return self._answer(ticket, get, buckets, [None] * len(buckets))
        self._threads.submit(self._answer_deltas, ticket, get, version, base, buckets)
        return True

    # ---- in any thread

    def _answer_deltas(
        self, ticket: int, get: Get, version: HeldVersion, base: HeldVersion, buckets: Sequence[Bucket]
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
            self.service.fail(ticket, error if isinstance(error, AsyncFlowError) else ProtocolError(repr(error)))
        else:
            self._answer(ticket, get, buckets[: len(codes)], codes)

    def _answer(self, ticket: int, get: Get, buckets: Sequence[Bucket], codes: Sequence[bytes | None]) -> bool:
        """Answer with these deltas; None: the whole bucket, pinned only when it is sent."""

        def frames() -> Sequence[Any]:
            version = self.find(get.version, get.root)
            return [version.bytes_of(b) if code is None else code for b, code in zip(buckets, codes, strict=True)]

        kinds = bytes(RAW if code is None else DELTA for code in codes)
        self.service.answer(ticket, encode(GetReply(kinds)), frames if kinds else ())
        return True


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
