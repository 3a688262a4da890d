"""TcpFetch: a few threads request buckets of one version, copy each to its place and verify it there."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...errors import DeadlineExceeded, DigestMismatch, ProtocolError, WireError
from ...interfaces.weights import Bytes, Fetched
from ...types import Manifest
from ...types.manifest import Bucket
from ...wire import ServiceClient
from . import delta
from .bucket_server import DELTA, RAW, Get, GetReply, TcpAddress, decode, encode, fits

THREADS = 2
"""ZeroMQ has as many. With more, memory of messages is returned to the system and faults in again."""
SILENCE_S = 60.0
"""Longest wait for one answer of a publisher."""
AT_ONCE = 16
"""Largest number of buckets in a request."""
FEW_BYTES = 4 << 20
"""After a larger answer, the next request has fewer buckets."""
PIECE = 512 << 10
"""Bytes copied at once: they are hashed while they are in the cache."""
_SLACK_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class FetchThreads:
    """Runs fetches, one at a time, by a few threads: as many requests are on their way. They keep
    their connections between fetches."""

    def __init__(self) -> None:
        self._threads: _ThreadPool | None = None
        self._lock = threading.Lock()

    def run(self, fetch: TcpFetch) -> None:
        """Run a fetch to its end."""
        with self._lock:
            threads = self._threads = self._threads or _ThreadPool(THREADS)
            threads.begin(fetch.work)  # before ``end`` can end them
        try:
            threads.wait()
        except BaseException:
            fetch.interrupt()
            self.end()
            raise

    def end(self) -> None:
        """End the threads after the fetch in progress. Idempotent."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.end()


class _ThreadPool:
    """Daemon threads. They keep their connections between fetches."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._run, name=f"asyncflow-fetch-{number}", daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        """Call ``work`` in each thread."""
        for _ in range(self._count):
            self._work.put(work)

    def wait(self) -> None:
        """Wait until all calls have returned."""
        for _ in range(self._count):
            self._done.get()

    def end(self) -> None:
        """End the threads after the work in progress."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # it holds the fetched version
            self._done.put(None)


class _BucketRange(NamedTuple):
    """Buckets ``first`` to ``stop``. ``whole``: True to request no deltas."""

    first: int
    stop: int
    whole: bool


class TcpFetch:
    """One fetch from a publisher. Several threads ``work`` until no bucket is missing, or one has
    an ``error``. ``on_bucket``: called at each verified bucket."""

    def __init__(
        self,
        client: ServiceClient,
        address: TcpAddress,
        manifest: Manifest,
        timeout_s: float,
        on_bucket: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_bucket = on_bucket
        self._client, self._since = client, client.interrupts
        self._address, self.manifest, self._root = address, manifest, manifest.root
        self._began = time.monotonic()
        self._deadline = self._began + timeout_s
        self._chunks: Sequence[Bytes] = ()
        self._base: Fetched | None = None
        self._buckets: list[Bucket] = []
        self._todo: deque[_BucketRange] = deque()
        self._stride = max(1, min(AT_ONCE, FEW_BYTES // manifest.bucket_bytes))
        self._lock = threading.Lock()
        self._interrupted = False
        self.error: Exception | None = None
        self.moved = self.refetched = self.saved = self._received = 0

    @property
    def missing(self) -> bool:
        """True if buckets are to be requested."""
        return bool(self._todo)

    def begin(self, chunks: Sequence[Bytes], base: Fetched | None) -> None:
        """Set the memory to fill, and a version for deltas."""
        if base is not None and not (fits(self.manifest, base.manifest) and len(base.chunks) == len(chunks)):
            base = None
        self._chunks, self._base = chunks, base
        self._buckets = list(self.manifest.buckets())  # after memory is allocated: a manifest may claim any size
        if self._buckets:
            self._todo.append(_BucketRange(0, len(self._buckets), base is None))

    def interrupt(self) -> None:
        """Make all threads end soon."""
        self._interrupted = True
        self._client.interrupt()

    def work(self) -> None:
        """Fetch buckets until none are left. Called by each thread."""
        try:
            while (span := self._next()) is not None:
                self._request(span)
        except Exception as error:
            with self._lock:
                first = self.error is None
                if first:
                    self.error = self._explain(error)
            if first:
                self._client.interrupt()

    def _next(self) -> _BucketRange | None:
        """Return the next buckets to request. Copies buckets that equal the base's."""
        while True:
            with self._lock:
                if self.error is not None or not self._todo:
                    return None
                span = self._todo.popleft()
                stop = min(span.stop, span.first + self._stride)
                if stop < span.stop:
                    self._todo.appendleft(span._replace(first=stop))
            if span.whole or self._base is None:
                return span._replace(stop=stop)
            first = span.first
            while first < stop and self._equals_base(first):
                self._copy_base(first)
                first += 1
            if first == stop:
                continue
            rest = next((n for n in range(first + 1, stop) if self._equals_base(n)), stop)
            if rest < stop:
                self._put_back(_BucketRange(rest, stop, False))
            return _BucketRange(first, rest, False)

    def _put_back(self, span: _BucketRange) -> None:
        with self._lock:
            self._todo.appendleft(span)

    def _equals_base(self, number: int) -> bool:
        bucket = self._buckets[number]
        assert self._base is not None
        ours, theirs = self.manifest.chunks[bucket.chunk], self._base.manifest.chunks[bucket.chunk]
        return ours.digests[bucket.index] == theirs.digests[bucket.index]

    def _copy_base(self, number: int) -> None:
        """Copy a bucket from the base, or request it in full if the base was changed since."""
        assert self._base is not None
        bucket = self._buckets[number]
        if self._copy(bucket, self._base.chunks[bucket.chunk][bucket.start : bucket.stop]):
            self._count(saved=1)
        else:
            self._refetch(number, "the base was changed")

    def _refetch(self, number: int, why: str) -> None:
        _log.warning("version %d: bucket %d is fetched in full: %s", self.manifest.version, number, why)
        with self._lock:
            self.refetched += 1
            self._todo.append(_BucketRange(number, number + 1, True))

    def _count(self, moved: int = 0, saved: int = 0) -> None:
        """Count a verified bucket."""
        with self._lock:
            self._received += 1
            self.moved += moved
            self.saved += saved
        self._on_bucket()

    def _request(self, span: _BucketRange) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("no time is left")
        count, base = span.stop - span.first, None if span.whole else self._base
        held = (-1, "") if base is None else (base.manifest.version, base.manifest.root)
        get = Get(self._address.version, self._root, span.first, count, *held)
        what = f"buckets {span.first} to {span.stop - 1} of version {self.manifest.version}"
        most = sum(each.stop - each.start for each in self._buckets[span.first : span.stop]) + _SLACK_BYTES
        body, frames = self._client.call(encode(get), min(left, SILENCE_S), what, since=self._since, most_bytes=most)
        kinds = decode(body, GetReply).kinds
        if not 0 < len(kinds) <= count or len(frames) != len(kinds):
            raise ProtocolError(f"{len(kinds)} buckets in {len(frames)} frames, where {count} were asked for")
        if len(kinds) < count:
            self._put_back(span._replace(first=span.first + len(kinds)))
        size = sum(memoryview(frame).nbytes for frame in frames)
        self._stride = max(1, self._stride // 2) if size > FEW_BYTES else min(AT_ONCE, len(kinds) * 2)
        for number, (kind, frame) in enumerate(zip(kinds, frames, strict=True), span.first):
            if kind == DELTA and base is not None:
                self._apply(number, frame, base)
            else:
                self._put_whole(number, kind, frame)

    def _apply(self, number: int, code: Any, base: Fetched) -> None:
        bucket, nbytes = self._buckets[number], memoryview(code).nbytes
        new = self._chunks[bucket.chunk][bucket.start : bucket.stop]
        try:
            delta.apply(code, base.chunks[bucket.chunk][bucket.start : bucket.stop], new)
            self.manifest.check(bucket, memoryview(new))  # type: ignore[arg-type]
        except (ProtocolError, DigestMismatch) as error:
            with self._lock:
                self.moved += nbytes
            self._refetch(number, str(error))
        else:
            self._count(nbytes, 1)

    def _put_whole(self, number: int, kind: int, frame: Any) -> None:
        bucket, nbytes = self._buckets[number], memoryview(frame).nbytes
        if kind != RAW or nbytes != bucket.stop - bucket.start:
            raise ProtocolError(f"{nbytes} bytes of kind {kind} for bucket {number} of {bucket.stop - bucket.start}")
        if not self._copy(bucket, np.frombuffer(frame, np.uint8)):
            self.manifest.check(bucket, memoryview(frame))
            raise DigestMismatch(f"bucket {number} was changed while it was copied")
        self._count(nbytes)

    def _copy(self, bucket: Bucket, data: Bytes) -> bool:
        """Copy a bucket to its place. Return False if its digest is wrong there."""
        digests = self.manifest.chunks[bucket.chunk].digests
        target = self._chunks[bucket.chunk][bucket.start : bucket.stop]
        if not digests:
            target[:] = data
            return True
        state = xxhash.xxh3_128()
        for start in range(0, len(data), PIECE):
            piece = target[start : start + PIECE]
            piece[:] = data[start : start + PIECE]
            state.update(memoryview(piece))  # type: ignore[arg-type]
        return bucket.index < len(digests) and state.digest() == digests[bucket.index]

    def _explain(self, error: Exception) -> Exception:
        """Return the error to raise: it names version and publisher."""
        about = f"version {self.manifest.version} from its publisher at {self._client.address}"
        if self._interrupted:
            return WireError(f"the fetch of {about} was interrupted: it is wanted no more")
        if time.monotonic() >= self._deadline and isinstance(error, (WireError, DeadlineExceeded)):
            return DeadlineExceeded(
                f"{about} was not here after {time.monotonic() - self._began:.1f} s: {self._received} of"
                f" {len(self._buckets)} buckets are ({error})"
            )
        if isinstance(error, WireError):
            return type(error)(f"{about}: {error}")
        return error
