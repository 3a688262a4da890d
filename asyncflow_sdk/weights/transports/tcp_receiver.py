"""The fetching end of the tcp transport: a few threads ask for buckets, put each where it belongs and verify it there."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np
import xxhash

from ...errors import DeadlineExceeded, DigestMismatch, ProtocolError, WireError
from ...interfaces.weights import Bytes, Fetched, WeightReceiver
from ...memory import BufferPool
from ...types import Manifest
from ...types.manifest import Bucket
from . import delta
from .service import ServiceClient
from .stream import StreamClient
from .streaming_fetch import PartialVersion, RunningDigests, StreamingFetch, alike
from .tcp_messages import DELTA, MOST_BUCKETS, RAW, Get, GetReply, TcpAddress, decode, encode, fits

THREADS = 2
"""As many as the connections' own threads: with more, what they allocate for messages goes back to the system and comes again,
page by page, which costs more than it brings."""
SILENCE_S = 60.0
"""How long a request may take before its publisher counts as lost."""
AT_ONCE = 16
"""Buckets asked for at a time while what comes for them takes not more than FEW_BYTES."""
FEW_BYTES = 4 << 20
MANY_BYTES = 16 << 20
"""Of whole buckets asked for at a time where they come without messages."""
_PIECE = 512 << 10  # copied and hashed while it is in the cache
_SLACK_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class TcpReceiver(WeightReceiver):
    """``again``: buckets that were asked for in full, since a delta for them did not give what was published."""

    keeps_base: ClassVar[bool] = True

    def __init__(self) -> None:
        self._pool = BufferPool("fetched weights, of which a replica holds two versions")
        self._threads: _ThreadPool | None = None
        self._clients: dict[bytes, ServiceClient] = {}
        self._services: dict[int, bytes] = {}  # the last that gave a version, by rank
        self._fetch: _TcpFetch | None = None
        self._ahead: dict[int, StreamingFetch] = {}  # by rank
        self._lock = threading.Lock()
        self._closed = False
        self.again = 0

    @property
    def nbytes(self) -> int:
        """Host memory held: what was fetched and is still looked at, and at most one version that is not, or is fetched ahead."""
        return self._pool.nbytes

    def fetch(self, manifest: Manifest, where: bytes, *, base: Fetched | None = None, timeout_s: float) -> Fetched:
        place = decode(where, TcpAddress)
        client = self._client(place.service)
        fetch = _TcpFetch(client, place, manifest, time.monotonic() + timeout_s)
        with self._lock:
            self._fetch, fetch.ahead = fetch, self._ahead.pop(place.rank, None)
        try:
            chunks = self._fill(fetch, base)
        finally:
            with self._lock:
                self._fetch = None
        self.again += fetch.again
        if fetch.error is None:
            self._gave(place)
            self._go_ahead(place, manifest, chunks, base)
            return Fetched(manifest, chunks, fetch.moved, "delta" if fetch.saved else "full")
        self._pool.give_back(chunks)  # though frames of the error's traceback refer to them
        if isinstance(fetch.error, (WireError, DeadlineExceeded)):
            self._drop(place.service)
        raise fetch.error

    def interrupt(self) -> None:
        with self._lock:
            if self._fetch is not None:
                self._fetch.interrupt()

    def close(self) -> None:
        self.interrupt()
        with self._lock:
            ahead, self._ahead, self._closed = list(self._ahead.values()), {}, True
        for each in ahead:
            each.stop()
        self._end_crew()
        for service in list(self._clients):
            self._drop(service)
        self._pool.close()

    def _fill(self, fetch: _TcpFetch, base: Fetched | None) -> list[Bytes]:
        """The chunks that it is to fill, once it has ended."""
        manifest = fetch.manifest
        came = fetch.came()
        chunks = came.chunks if came is not None else self._pool.take([chunk.nbytes for chunk in manifest.chunks])
        if base is not None and not (fits(manifest, base.manifest) and len(base.chunks) == len(chunks)):
            base = None
        fetch.begin(chunks, base, came)
        if not fetch.missing:
            return chunks
        with self._lock:
            crew = self._threads = self._threads or _ThreadPool(THREADS)
            crew.begin(fetch.work)  # before a close can end them
        try:
            crew.wait()
        except BaseException:
            fetch.interrupt()
            self._end_crew()
            raise
        return chunks

    def _go_ahead(self, place: TcpAddress, manifest: Manifest, chunks: Sequence[Bytes], base: Fetched | None) -> None:
        """Follow the next version, where deltas would not be smaller than it is."""
        if place.bulk is None or not manifest.nbytes or not 0 < place.attempt < 1 << 62:
            return
        small = place.deltas and manifest.digested
        if small and (base is None or not fits(manifest, base.manifest) or alike(base.chunks, chunks)):
            return
        with self._lock:
            if not self._closed:
                self._ahead[place.rank] = StreamingFetch(self._pool, place, manifest)

    def _client(self, service: bytes) -> ServiceClient:
        known = self._clients.get(service)
        if known is None:
            known = self._clients[service] = ServiceClient(service)
        return known

    def _gave(self, place: TcpAddress) -> None:
        """Connections to publishers whose place another has taken are not kept: a replica may outlive many trainers."""
        self._services[place.rank] = place.service
        for service in set(self._clients) - set(self._services.values()):
            self._drop(service)

    def _drop(self, service: bytes) -> None:
        """The next fetch connects anew. A close and the fetch that it ends both do this."""
        known = self._clients.pop(service, None)
        if known is not None:
            known.close()

    def _end_crew(self) -> None:
        with self._lock:
            crew, self._threads = self._threads, None
        if crew is not None:
            crew.end()


class _ThreadPool:
    """Threads, each with connections of its own, that hold up no process that wants to end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._run, name=f"asyncflow-fetch-{number}", daemon=True).start()

    def begin(self, work: Callable[[], None]) -> None:
        """Let each of them do it."""
        for _ in range(self._count):
            self._work.put(work)

    def wait(self) -> None:
        """Until all have done it."""
        for _ in range(self._count):
            self._done.get()

    def end(self) -> None:
        """Once they have done what was begun."""
        for _ in range(self._count):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # what was fetched is not held until the next fetch
            self._done.put(None)


class _BucketRange(NamedTuple):
    """Buckets ``first`` to ``stop``, by number; ``whole``: not as a delta."""

    first: int
    stop: int
    whole: bool


class _TcpFetch:
    """One fetch. Its threads work until nothing is left to be asked for, or something went wrong."""

    def __init__(self, client: ServiceClient, place: TcpAddress, manifest: Manifest, until: float) -> None:
        self._client, self._since = client, client.interrupts
        self._place, self._bulk, self.manifest, self._root = place, place.bulk, manifest, manifest.root
        self._channels: list[StreamClient] = []
        self._chunks: Sequence[Bytes] = ()
        self._base: Fetched | None = None
        self._until = until
        self._began = time.monotonic()
        self._buckets: list[Bucket] = []
        self._todo: deque[_BucketRange] = deque()
        self._stride = max(1, min(AT_ONCE, FEW_BYTES // manifest.bucket_bytes))
        self._many = max(1, min(MOST_BUCKETS, MANY_BYTES // manifest.bucket_bytes))
        self._lock = threading.Lock()
        self._interrupted = False
        self.ahead: StreamingFetch | None = None
        self.error: Exception | None = None
        self.moved = self.again = self.saved = self._here = 0

    @property
    def missing(self) -> bool:
        """Whether anything is left to be asked for."""
        return bool(self._todo)

    def came(self) -> PartialVersion | None:
        """What of it came ahead."""
        return self.ahead.take(self._place, self.manifest, self._until) if self.ahead is not None else None

    def begin(self, chunks: Sequence[Bytes], base: Fetched | None, came: PartialVersion | None) -> None:
        """Into ``chunks``, some of which came already. ``base``: a version that fits."""
        self._chunks, self._base = chunks, base
        self._buckets = list(self.manifest.buckets())  # not before there is memory: a manifest may claim any size
        whole, first = base is None, 0
        for number, bucket in enumerate(self._buckets):
            if came is None or not came.has(self.manifest, bucket):
                continue
            self._count(1, bucket.stop - bucket.start)
            if first < number:
                self._todo.append(_BucketRange(first, number, whole))
            first = number + 1
        if first < len(self._buckets):
            self._todo.append(_BucketRange(first, len(self._buckets), whole))

    def interrupt(self) -> None:
        """Every thread ends soon."""
        self._interrupted = True
        if self.ahead is not None:
            self.ahead.stop()
        self._stop()

    def work(self) -> None:
        channel = None if self._bulk is None else StreamClient(self._bulk)
        try:
            if channel is not None:
                with self._lock:
                    self._channels.append(channel)
            while (span := self._next()) is not None:
                if not self._read(channel, span):
                    self._get(span)
        except Exception as error:
            with self._lock:
                first = self.error is None
                if first:
                    self.error = self._named(error)
            if first:
                self._stop()
        finally:
            if channel is not None:
                channel.close()

    def _stop(self) -> None:
        """Whatever is under way ends."""
        self._client.interrupt()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.interrupt()

    def _next(self) -> _BucketRange | None:
        """What to ask for next; buckets that are those of the base are copied on the way."""
        while True:
            with self._lock:
                if self.error is not None or not self._todo:
                    return None
                span = self._todo.popleft()
                stop = min(
                    span.stop, span.first + (self._many if self._bulk and self._goes_whole(span) else self._stride)
                )
                if stop < span.stop:
                    self._todo.appendleft(span._replace(first=stop))
                span = span._replace(stop=stop)
            if span.whole or self._base is None:
                return span
            first, stop = span.first, span.stop
            while first < stop and self._same(first):
                first += 1
            if first == stop:
                continue
            rest = next((n for n in range(first + 1, stop) if self._is_same(n)), stop)
            if rest < stop:
                self._put_back(_BucketRange(rest, stop, False))
            return _BucketRange(first, rest, False)

    def _goes_whole(self, span: _BucketRange) -> bool:
        return span.whole or self._base is None or not self._place.deltas

    def _read(self, channel: StreamClient | None, span: _BucketRange) -> bool:
        """Get whole buckets without messages. False where that cannot be."""
        if channel is None or self._bulk is None or not self._goes_whole(span):
            return False
        if self._interrupted:
            raise WireError("it was interrupted")
        buckets = self._buckets[span.first : span.stop]
        views = [memoryview(self._chunks[each.chunk][each.start : each.stop]) for each in buckets]  # type: ignore[arg-type]
        digests = [RunningDigests(view, self.manifest.bucket_bytes) for view in views]

        def landed(number: int, got: int) -> None:
            bucket, view = buckets[number], views[number]
            published = self.manifest.chunks[bucket.chunk].digests
            if published:
                digests[number].came(got)
            if got < len(view):
                return
            if published and (bucket.index >= len(published) or digests[number].found != [published[bucket.index]]):
                self.manifest.check(bucket, view)
                raise DigestMismatch(f"bucket {span.first + number} was changed while it was looked at")
            self._count(1, len(view))

        if channel.read(self._place.version, self._root, span.first, views, self._until, landed):
            return True
        self._bulk = None  # its service says why, or serves it all the same
        return False

    def _put_back(self, span: _BucketRange) -> None:
        with self._lock:
            self._todo.appendleft(span)

    def _is_same(self, number: int) -> bool:
        bucket = self._buckets[number]
        assert self._base is not None
        ours, theirs = self.manifest.chunks[bucket.chunk], self._base.manifest.chunks[bucket.chunk]
        return ours.digests[bucket.index] == theirs.digests[bucket.index]

    def _same(self, number: int) -> bool:
        """Whether a bucket is that of the base, and was copied; one that was written into since is asked for in full."""
        if not self._is_same(number):
            return False
        assert self._base is not None
        bucket = self._buckets[number]
        if self._land(bucket, self._base.chunks[bucket.chunk][bucket.start : bucket.stop]):
            self._count(1, saved=1)
        else:
            self._again(number, "the base was changed")
        return True

    def _again(self, number: int, why: str) -> None:
        _log.warning("version %d: bucket %d is fetched in full: %s", self.manifest.version, number, why)
        with self._lock:
            self.again += 1
            self._todo.append(_BucketRange(number, number + 1, True))

    def _count(self, here: int, moved: int = 0, saved: int = 0) -> None:
        with self._lock:
            self._here += here
            self.moved += moved
            self.saved += saved

    def _get(self, span: _BucketRange) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("no time is left")
        get = Get(self._place.version, self._root, span.first, span.stop - span.first)
        if not span.whole and self._base is not None:
            get = msgspec.structs.replace(get, base=self._base.manifest.version, base_root=self._base.manifest.root)
        what = f"buckets {span.first} to {span.stop - 1} of version {self.manifest.version}"
        most = sum(each.stop - each.start for each in self._buckets[span.first : span.stop]) + _SLACK_BYTES
        body, frames = self._client.call(encode(get), min(left, SILENCE_S), what, since=self._since, most_bytes=most)
        kinds = decode(body, GetReply).kinds
        if not 0 < len(kinds) <= get.count or len(frames) != len(kinds):
            raise ProtocolError(f"{len(kinds)} buckets in {len(frames)} frames, where {get.count} were asked for")
        if span.first + len(kinds) < span.stop:
            self._put_back(span._replace(first=span.first + len(kinds)))
        size = sum(memoryview(frame).nbytes for frame in frames)
        self._stride = max(1, self._stride // 2) if size > FEW_BYTES else min(AT_ONCE, len(kinds) * 2)
        for number, (kind, frame) in enumerate(zip(kinds, frames, strict=True), span.first):
            self._put(number, kind, frame, span.whole)

    def _put(self, number: int, kind: int, frame: Any, whole: bool) -> None:
        bucket = self._buckets[number]
        nbytes = memoryview(frame).nbytes
        if kind == DELTA and not whole and self._base is not None:
            old = self._base.chunks[bucket.chunk][bucket.start : bucket.stop]
            new = self._chunks[bucket.chunk][bucket.start : bucket.stop]
            try:
                delta.apply(frame, old, new)
                self.manifest.check(bucket, memoryview(new))  # type: ignore[arg-type]
            except (ProtocolError, DigestMismatch) as error:
                self._count(0, nbytes)
                self._again(number, str(error))
            else:
                self._count(1, nbytes, 1)
            return
        if kind != RAW or nbytes != bucket.stop - bucket.start:
            raise ProtocolError(f"{nbytes} bytes of kind {kind} for bucket {number} of {bucket.stop - bucket.start}")
        if not self._land(bucket, np.frombuffer(frame, np.uint8)):
            self.manifest.check(bucket, memoryview(frame))
            raise DigestMismatch(f"bucket {number} was changed while it was copied")
        self._count(1, nbytes)

    def _land(self, bucket: Bucket, data: Bytes) -> bool:
        """Copy a bucket to its place; whether it is there what was published."""
        digests = self.manifest.chunks[bucket.chunk].digests
        target = self._chunks[bucket.chunk][bucket.start : bucket.stop]
        if not digests:
            target[:] = data
            return True
        state = xxhash.xxh3_128()
        for start in range(0, len(data), _PIECE):
            piece = target[start : start + _PIECE]
            piece[:] = data[start : start + _PIECE]
            state.update(memoryview(piece))  # type: ignore[arg-type]
        return bucket.index < len(digests) and state.digest() == digests[bucket.index]

    def _named(self, error: Exception) -> Exception:
        """What is raised: it says which version, and who was to send it."""
        about = f"version {self.manifest.version} from its publisher at {self._client.address}"
        if self._interrupted:
            return WireError(f"the fetch of {about} was interrupted: it is wanted no more")
        if time.monotonic() >= self._until and isinstance(error, (WireError, DeadlineExceeded)):
            return DeadlineExceeded(
                f"{about} was not here after {time.monotonic() - self._began:.1f} s: {self._here} of"
                f" {len(self._buckets)} buckets are ({error})"
            )
        if isinstance(error, WireError):
            return type(error)(f"{about}: {error}")
        return error
