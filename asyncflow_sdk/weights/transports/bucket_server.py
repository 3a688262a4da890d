"""BucketServer: answers requests for buckets of versions in this process's memory; the messages of both ends."""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from ...errors import AsyncFlowError, ProtocolError, VersionGone
from ...interfaces.weights import Bytes, Host
from ...types import Manifest, carrier
from ...types.manifest import Bucket
from ...wire import Service
from . import delta

DELTA_THREADS = 2
RAW, DELTA = 0, 1
ANSWER_BYTES = 8 << 20  # an answer of so many bytes gets no further bucket
MOST_BUCKETS = 256  # limit of a request


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of a version. ``service``: encoded ServiceAddress. ``version``: its number when
    published. ``rank``: of the publisher. ``host``: identity of the publisher's host, whose processes map
    the chunks at ``places`` of ``directory``, encoded as by ShmSender."""

    service: bytes
    version: int
    rank: int = 0
    host: str = ""
    directory: str = ""
    places: bytes = b""


class Get(msgspec.Struct, frozen=True, array_like=True):
    """Request for ``count`` buckets from number ``first`` on. ``base`` and ``base_root``: a version that the replica
    holds, for deltas; -1 without one. Roots distinguish versions with the same number."""

    version: int
    root: str
    first: int
    count: int
    base: int = -1
    base_root: str = ""


class GetReply(msgspec.Struct, frozen=True, array_like=True):
    """RAW or DELTA for each bucket sent, and its bytes. They follow one another in the payload."""

    kinds: bytes
    sizes: tuple[int, ...]


encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", bound=msgspec.Struct)


def decode(body: bytes, kind: type[_T]) -> _T:
    """Decode a message. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the tcp transport of weights cannot read this: {error}") from None


def fits(manifest: Manifest, base: Manifest) -> bool:
    """True if deltas between two versions are possible and can be verified."""
    return (
        manifest.digested
        and base.digested
        and manifest.bucket_bytes == base.bucket_bytes
        and [chunk.nbytes for chunk in manifest.chunks] == [chunk.nbytes for chunk in base.chunks]
        and manifest.tensors == base.tensors
    )


class HeldVersion:
    """A version served to others. ``chunks`` pin its memory."""

    def __init__(self, manifest: Manifest, chunks: Sequence[Bytes]) -> None:
        self.manifest, self.root = manifest, manifest.root
        self.buckets = list(manifest.buckets())
        self.chunks = chunks
        self._widths: list[tuple[int, int, int]] = []

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
        """Return the element size of the tensor in the middle of a bucket."""
        if not self._widths:
            self._widths = sorted(
                (t.chunk, t.offset, carrier(t.dtype).itemsize) for t in self.manifest.tensors if t.nbytes
            )
        middle = bucket.chunk, (bucket.start + bucket.stop) // 2, 8
        return self._widths[max(bisect.bisect(self._widths, middle) - 1, 0)][2]


class BucketServer:
    """Serves versions by a Service. ``listen``, ``insecure``: see Service. ``delta_bytes``: memory
    for encoded deltas; 0: deltas are not made. Thread-safe."""

    def __init__(self, host: Host, *, listen: str | None, insecure: bool, delta_bytes: int) -> None:
        self._makes_deltas = delta_bytes > 0
        self._deltas = delta.DeltaCache(delta_bytes)
        self._versions: dict[int, HeldVersion] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(DELTA_THREADS, "asyncflow-delta")
        self.service = Service(host.address, self, listen=listen, member=host.member, insecure=insecure)
        self.where = self.service.where

    @property
    def nbytes(self) -> int:
        """Host memory held for deltas."""
        return self._deltas.nbytes

    def add(self, version: HeldVersion) -> None:
        """Serve a version."""
        with self._lock:
            self._versions[version.manifest.version] = version

    def keep(self, versions: Collection[int]) -> None:
        """Forget all other versions."""
        with self._lock:
            self._versions = {number: version for number, version in self._versions.items() if number in versions}
            roots = {version.root for version in self._versions.values()}
        self._deltas.keep(roots)

    def _find(self, number: int, root: str) -> HeldVersion:
        with self._lock:
            version = self._versions.get(number)
        if version is None or version.root != root:
            raise VersionGone(
                f"version {number} is no longer kept by its publisher at {self.service.address}; take the newest"
            )
        return version

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self.service.close()
        self._threads.shutdown(cancel_futures=True)
        self.keep(())

    # ---- the service's ServiceHandler

    def request(self, peer: str, ticket: int, body: bytes) -> None:
        """See ``ServiceHandler.request``."""
        get = decode(body, Get)
        version = self._find(get.version, get.root)
        with self._lock:
            base = self._versions.get(get.base) if self._makes_deltas else None
        buckets = version.span(get.first, get.count)
        if base is None or base.root != get.base_root or not fits(version.manifest, base.manifest):
            self._answer(ticket, get, version, None, buckets)
        else:
            self._threads.submit(self._answer, ticket, get, version, base, buckets)

    def gone(self, peer: str) -> None:
        """See ``ServiceHandler.gone``."""

    # ---- in any thread

    def _answer(
        self, ticket: int, get: Get, version: HeldVersion, base: HeldVersion | None, buckets: Sequence[Bucket]
    ) -> None:
        """Answer with a delta for each bucket, or the whole bucket if that is smaller, pinned only when it is sent."""
        codes, sizes = list[bytes | None](), list[int]()
        try:
            for number, bucket in enumerate(buckets, get.first):
                new, code = version.bytes_of(bucket), None
                if base is not None:
                    make = functools.partial(delta.encode, new, base.bytes_of(bucket), version.width(bucket))
                    code = self._deltas.get((version.root, base.root, number), make)
                codes.append(code)
                sizes.append(len(code or new))
                if sum(sizes) >= ANSWER_BYTES:
                    break
        except Exception as error:
            self.service.fail(ticket, error if isinstance(error, AsyncFlowError) else ProtocolError(repr(error)))
            return

        def frames() -> Sequence[Any]:
            version = self._find(get.version, get.root)
            return [version.bytes_of(b) if code is None else code for b, code in zip(buckets, codes, strict=False)]

        kinds = bytes(RAW if code is None else DELTA for code in codes)
        self.service.answer(ticket, encode(GetReply(kinds, tuple(sizes))), frames)
