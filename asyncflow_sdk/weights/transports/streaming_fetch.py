"""StreamingFetch: the next version of a publisher, fetched while it is written there, before anybody knows what it is.

    ahead = StreamingFetch(pool, place, manifest)                       # a version was fetched: the next one is followed
    came = ahead.take(place, manifest, until)                     # a version is to be fetched: is it that one?

What came is believed for its digest alone; without digests, because it is of the attempt that the version came to, of
which each byte is written once. Everything else is fetched as if nobody had followed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from ...errors import AsyncFlowError, ProtocolError
from ...interfaces.weights import Bytes
from ...memory import BufferPool
from ...types import Manifest
from ...types.manifest import Bucket
from .in_progress import ALL, GONE, LATER
from .stream import PIECE, StreamClient
from .tcp_messages import TcpAddress

CONNECTIONS = 2
"""One keeps no link busy: its two ends wait for each other."""
SPAN_BYTES = 8 << 20
STALL_S = 2.0
"""Whoever waits for what is on its way gives it up when nothing comes for so long."""
MOST_ALIKE = 0.1
"""Of bytes that differ between two versions: with fewer, deltas are much smaller than they are."""
_SAMPLES = 8192
_log = logging.getLogger(__name__)


class RunningDigests:
    """Of the buckets of a chunk, which are hashed in pieces as their bytes come."""

    def __init__(self, chunk: memoryview, bucket_bytes: int) -> None:
        self._chunk, self._bucket_bytes = chunk, bucket_bytes
        self._state, self._hashed = xxhash.xxh3_128(), 0
        self.found: list[bytes] = []

    def came(self, got: int) -> None:
        """So many bytes are there."""
        while self._hashed < got:
            bucket = min((len(self.found) + 1) * self._bucket_bytes, len(self._chunk))
            stop = min(self._hashed + PIECE, bucket, got)
            if stop - self._hashed < PIECE and stop < bucket:
                return  # for a piece of a decent size
            self._state.update(self._chunk[self._hashed : stop])
            self._hashed = stop
            if stop == bucket:
                self.found.append(self._state.digest())
                self._state = xxhash.xxh3_128()


class PartialVersion:
    """What came of a version. ``chunks``: all its memory, filled or not. ``found``: digests of the buckets that are there, by
    chunk and index; b"" where none is known."""

    def __init__(self, chunks: list[Bytes]) -> None:
        self.chunks = chunks
        self.found: dict[tuple[int, int], bytes] = {}

    def has(self, manifest: Manifest, bucket: Bucket) -> bool:
        """Whether a bucket is there, as it was published."""
        published = manifest.chunks[bucket.chunk].digests
        mine = self.found.get((bucket.chunk, bucket.index))
        return mine is not None and mine == (published[bucket.index] if published else b"")


class _ByteRange(NamedTuple):
    """Bytes of a chunk that are asked for at a time: whole buckets."""

    chunk: int
    start: int
    stop: int


class StreamingFetch:
    """Follows the publisher of ``manifest``, which was fetched from ``place``, in a thread of its own, until a version is here
    and taken. Only one whose chunks are as large is followed, in memory of ``pool``; what ends the connection to the publisher
    before gives that back."""

    def __init__(self, pool: BufferPool, place: TcpAddress, manifest: Manifest) -> None:
        assert place.bulk is not None
        self._pool, self._bulk, self._after = pool, place.bulk, place.attempt
        self._channels = [StreamClient(place.bulk) for _ in range(CONNECTIONS)]
        self._shape = _shape(manifest)
        self._lock = threading.Lock()
        self._taken = False
        self._attempt = 0
        self._came: PartialVersion | None = None
        self._came_at = 0.0
        self._whole = threading.Event()  # or it will never be
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="asyncflow-ahead", daemon=True).start()

    def take(self, place: TcpAddress, manifest: Manifest, until: float) -> PartialVersion | None:
        """What came of a version; None if that is another one. While it is on its way it is waited for. It ends with this."""
        with self._lock:
            self._taken, begun = True, self._came is not None
            wanted = (self._bulk, self._attempt, self._shape) == (place.bulk, place.attempt, _shape(manifest))
        began = time.monotonic()
        while begun and wanted and not self._whole.is_set():
            now = time.monotonic()
            left = min(max(self._came_at, began) + STALL_S, until) - now
            if left <= 0:
                break
            self._whole.wait(left)
        self.stop()
        if not begun:
            return None
        self._ended.wait()
        came, self._came = self._came, None
        if came is not None and not wanted:
            self._pool.give_back(came.chunks)
            came = None
        return came

    def stop(self) -> None:
        """It ends soon, and so does a ``take`` that waits."""
        self._taken = True
        for channel in self._channels:
            channel.interrupt()

    # ---- its threads

    def _run(self) -> None:
        try:
            while self._follow():
                pass
        except AsyncFlowError as error:
            _log.debug("a version is not fetched ahead: %s", error)
        except Exception:
            _log.exception("a version could not be fetched ahead")
        finally:
            for channel in self._channels:
                channel.close()
            self._drop()
            self._whole.set()
            self._ended.set()

    def _follow(self) -> bool:
        """The next version, to its end. Whether the one after is to be followed, since this one was given up."""
        channel = self._channels[0]
        which, nbytes = channel.next(self._after, LATER, 0, 0)
        if which <= self._after or nbytes != self._shape.sizes[0]:
            raise ProtocolError(f"attempt {which} with {nbytes} bytes came after {self._after}")
        with self._lock:
            if self._taken:
                return False
            self._after = self._attempt = which
            self._came = PartialVersion(self._pool.take(self._shape.sizes))
        todo, errors = deque(self._shape.spans()), list[Exception]()
        others = [
            threading.Thread(target=self._work, args=(each, todo, errors), name="asyncflow-ahead", daemon=True)
            for each in self._channels[1 : len(todo)]
        ]
        for each in others:
            each.start()
        self._work(channel, todo, errors)
        for each in others:
            each.join()
        if errors:
            raise errors[0]
        which, state = channel.next(self._attempt, len(self._shape.sizes), 0, 0)
        if (which, state) == (self._attempt, GONE):
            return self._drop()
        if (which, state) != (self._attempt, ALL):
            raise ProtocolError(f"{state} of attempt {which} came where it should end")
        self._whole.set()
        channel.wait()
        return False

    def _work(self, channel: StreamClient, todo: deque[_ByteRange], errors: list[Exception]) -> None:
        """Get spans while there are any."""
        try:
            while (span := _first(todo)) is not None:
                came = channel.next(self._attempt, *span)
                if came == (self._attempt, GONE):
                    return
                if came != (self._attempt, self._shape.sizes[span.chunk]):
                    raise ProtocolError(f"attempt and bytes {came} came for chunk {span.chunk} of {self._attempt}")
                self._fill(channel, span)
        except Exception as error:
            errors.append(error)
            for each in self._channels:
                each.interrupt()

    def _fill(self, channel: StreamClient, span: _ByteRange) -> None:
        assert self._came is not None
        came, step = self._came, self._shape.bucket_bytes
        view = memoryview(came.chunks[span.chunk][span.start : span.stop])  # type: ignore[arg-type]
        digests = RunningDigests(view, step)

        def landed(got: int) -> None:
            self._came_at = time.monotonic()
            if self._shape.digested:
                digests.came(got)

        channel.fill(view, math.inf, landed)
        for number, index in enumerate(range(span.start // step, -(-span.stop // step))):
            came.found[span.chunk, index] = digests.found[number] if self._shape.digested else b""

    def _drop(self) -> bool:
        """Give back what came; False where somebody is to have it."""
        with self._lock:
            if self._taken:
                return False
            came, self._came, self._attempt = self._came, None, 0
            if came is not None:
                self._pool.give_back(came.chunks)
            return True


class _Shape(NamedTuple):
    """What versions have in common of which one is taken for the other."""

    sizes: list[int]
    bucket_bytes: int
    digested: bool

    def spans(self) -> Iterator[_ByteRange]:
        step = max(SPAN_BYTES // self.bucket_bytes, 1) * self.bucket_bytes
        for number, nbytes in enumerate(self.sizes):
            for start in range(0, nbytes, step):
                yield _ByteRange(number, start, min(start + step, nbytes))


def _shape(manifest: Manifest) -> _Shape:
    return _Shape([chunk.nbytes for chunk in manifest.chunks], manifest.bucket_bytes, manifest.digested)


def _first(todo: deque[_ByteRange]) -> _ByteRange | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


def alike(one: Sequence[Bytes], other: Sequence[Bytes]) -> bool:
    """Whether few bytes differ between versions whose chunks are as large, as far as a sample tells."""
    stride = max(sum(map(len, one)) // _SAMPLES, 1) | 1  # odd: it meets every byte of a word
    pairs = [(a[::stride], b[::stride]) for a, b in zip(one, other, strict=True)]
    differ = sum(int(np.count_nonzero(a != b)) for a, b in pairs)
    return differ < MOST_ALIKE * sum(len(a) for a, _ in pairs)
