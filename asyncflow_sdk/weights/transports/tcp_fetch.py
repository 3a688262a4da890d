"""TcpFetch: a few threads request buckets of one version, copy each to its place and verify it there."""

from __future__ import annotations

import itertools
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
SILENCE_S = 60.0  # longest wait for one answer of a publisher
AT_ONCE = 16  # largest number of buckets in a request
FEW_BYTES = 4 << 20  # after a larger answer, the next request has fewer buckets
PIECE = 512 << 10  # bytes copied at once: they are hashed while they are in the cache
_SLACK_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class FetchThreads:
    """Runs fetches, one at a time, by a few daemon threads: as many requests are on their way. They keep
    their connections between fetches."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[TcpFetch | None] | None = None
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def run(self, fetch: TcpFetch) -> None:
        """Run a fetch to its end."""
        with self._lock:
            if self._work is None:
                self._work, self._done = queue.SimpleQueue(), queue.SimpleQueue()
                for number in range(THREADS):
                    ends = self._work, self._done
                    threading.Thread(target=_run, args=ends, name=f"asyncflow-fetch-{number}", daemon=True).start()
            work, done = self._work, self._done
            for _ in range(THREADS):
                work.put(fetch)
        try:
            for _ in range(THREADS):
                done.get()
        except BaseException:
            fetch.interrupt()
            self.end()
            raise

    def end(self) -> None:
        """End the threads after the fetch in progress. Idempotent."""
        with self._lock:
            work, self._work = self._work, None
        if work is not None:
            for _ in range(THREADS):
                work.put(None)


def _run(work: queue.SimpleQueue[TcpFetch | None], done: queue.SimpleQueue[None]) -> None:
    while (fetch := work.get()) is not None:
        fetch.work()
        del fetch  # it holds the fetched version
        done.put(None)


class _BucketRange(NamedTuple):
    """Buckets ``first`` to ``stop``. ``whole``: True to request no deltas. ``same``: True if they equal the base's."""

    first: int
    stop: int
    whole: bool
    same: bool = False


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
        self._lock, self._interrupted = threading.Lock(), False
        self.error: Exception | None = None
        self.moved = self.saved = self._received = 0

    def begin(self, chunks: Sequence[Bytes], base: Fetched | None) -> None:
        """Set the memory to fill, and a version for deltas."""
        if base is not None and not (fits(self.manifest, base.manifest) and len(base.chunks) == len(chunks)):
            base = None
        self._chunks, self._base = chunks, base
        self._buckets = list(self.manifest.buckets())  # after memory is allocated: a manifest may claim any size
        same = [False] * len(self._buckets)
        if base is not None:
            pairs = zip(self.manifest.chunks, base.manifest.chunks, strict=True)
            same = [
                ours == theirs
                for mine, other in pairs
                for ours, theirs in zip(mine.digests, other.digests, strict=True)
            ]
        first = 0
        for equal, group in itertools.groupby(same):
            stop = first + len(list(group))
            self._todo.append(_BucketRange(first, stop, base is None, equal))
            first = stop

    def interrupt(self) -> None:
        """Make all threads end soon."""
        self._interrupted = True
        self._client.interrupt()

    def work(self) -> None:
        """Fetch buckets until none are left. Called by each thread."""
        try:
            while (span := self._next()) is not None:
                if span.same:
                    self._copy_base(span)
                else:
                    self._request(span)
        except Exception as error:
            with self._lock:
                first = self.error is None
                if first:
                    self.error = self._explain(error)
            if first:
                self._client.interrupt()

    def _next(self) -> _BucketRange | None:
        with self._lock:
            if self.error is not None or not self._todo:
                return None
            span = self._todo.popleft()
            stop = min(span.stop, span.first + self._stride)
            if stop < span.stop:
                self._todo.appendleft(span._replace(first=stop))
            return span._replace(stop=stop)

    def _copy_base(self, span: _BucketRange) -> None:
        """Copy buckets from the base, or request them in full if the base was changed since."""
        assert self._base is not None
        for number in range(span.first, span.stop):
            bucket = self._buckets[number]
            if self._copy(bucket, self._base.chunks[bucket.chunk][bucket.start : bucket.stop]):
                self._count(saved=1)
            else:
                self._refetch(number, "the base was changed")

    def _refetch(self, number: int, why: str) -> None:
        _log.warning("version %d: bucket %d is fetched in full: %s", self.manifest.version, number, why)
        with self._lock:
            self._todo.append(_BucketRange(number, number + 1, True))

    def _count(self, moved: int = 0, saved: int = 0) -> None:
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
        body, payload = self._client.call(encode(get), min(left, SILENCE_S), what, since=self._since, limit=most)
        answer = decode(body, GetReply)
        kinds, sizes, ends = answer.kinds, answer.sizes, itertools.accumulate(answer.sizes)
        if not 0 < len(kinds) == len(sizes) <= count or min(sizes) < 0 or sum(sizes) != len(payload):
            raise ProtocolError(f"{len(sizes)} buckets in {len(payload)} bytes, where {count} were asked for")
        if len(kinds) < count:
            with self._lock:
                self._todo.appendleft(span._replace(first=span.first + len(kinds)))
        self._stride = max(1, self._stride // 2) if len(payload) > FEW_BYTES else min(AT_ONCE, len(kinds) * 2)
        for number, (kind, size, end) in enumerate(zip(kinds, sizes, ends, strict=True), span.first):
            if kind == DELTA and base is not None:
                self._apply(number, payload[end - size : end], base)
            else:
                self._put_whole(number, kind, payload[end - size : end])

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
