"""ChunkCopier: the buckets of a version, copied and hashed by the publishing thread and one that helps it.

    filling = ChunkCopier(bucket_bytes, hashing, helper, full)
    filling.open(memory); filling.add(given, dtype, start, stop); ...; filling.close(); filling.flush()

Each of the two takes the next bucket, copies it in pieces, and hashes each of them while it is in its core's cache: read from
there, a hash costs a fraction of what it costs from memory. What is not copied here (a device, threads of torch) is hashed by a
thread behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ..types import carrier
from .hashing import BucketDigests
from .tensor_sources import TensorSource

SPAN_BUCKETS = 2
"""What others copy of a large tensor before its buckets are told."""
AHEAD = 1
"""Buckets that are left to whoever helps while more are given: giving keeps the interpreter to itself, copying does not."""
MANY = 8
"""Tensors in a bucket with more of which it is not for whoever helps: both would wait for the interpreter most of the time."""
PIECE_BYTES = 512 << 10
"""What is hashed at a time: it is in the cache still."""


def helps() -> bool:
    """Whether this process may use a core more."""
    return len(os.sched_getaffinity(0)) > 1


class _CopyPart(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk are elements of ``given`` from ``first`` on."""

    start: int
    stop: int
    given: TensorSource
    dtype: str
    first: int


class _Bucket:
    """Of a chunk, from ``start`` to ``stop`` as far as it is given. ``parts``: not copied yet. ``state``: None where it is hashed
    behind. ``last``: of its chunk."""

    def __init__(self, chunk: int, memory: Any, start: int, hashed: bool) -> None:
        self.chunk, self.memory, self.start = chunk, memory, start
        self.stop = self._hashed = start
        self.state = xxhash.xxh3_128() if hashed else None
        self.parts: list[_CopyPart] = []
        self.done = self.last = False

    def copy(self) -> None:
        for start, stop, given, dtype, first in self.parts:
            width = carrier(dtype).itemsize
            for at in range(start, stop, PIECE_BYTES):
                to = min(at + PIECE_BYTES, stop)
                given.copy(self.memory[at:to], dtype, first + (at - start) // width, first + (to - start) // width)
                self._hash(to)
        self.parts.clear()
        self._hash(self.stop)  # what lies after the last

    def _hash(self, upto: int) -> None:
        if self.state is not None and self._hashed < upto:
            self.state.update(self.memory[self._hashed : upto])
            self._hashed = upto


class ChunkCopier:
    """Of one version. Called by one thread, in the order of its bytes. ``hashing`` is given every bucket's digest, or the bucket; None:
    nothing is hashed. ``helper``: has a thread that copies, too; None: nobody does. ``full``: called, in order, with the
    number of each chunk whose bytes are all there, by either thread."""

    def __init__(
        self, bucket_bytes: int, hashing: BucketDigests | None, helper: Executor | None, full: Callable[[int], None]
    ) -> None:
        self._bucket_bytes, self._hashing, self._helper, self._full = bucket_bytes, hashing, helper, full
        self._chunk, self._memory = -1, np.empty(0, np.uint8)
        self._last: _Bucket | None = None  # it is not given whole
        self._begun: deque[_Bucket] = deque()  # in order: not there, or after one that is not
        self._todo: deque[_Bucket] = deque()  # given whole, to be copied
        self._helping: Future[None] | None = None
        self._lock = threading.Lock()

    def open(self, memory: Any) -> None:
        """The next chunk."""
        self._chunk, self._memory = self._chunk + 1, memory

    def add(self, given: TensorSource, dtype: str, start: int, stop: int) -> None:
        """The next bytes are all of a tensor, and zero from its end to ``stop``. They are there after ``flush``, or earlier."""
        width = carrier(dtype).itemsize
        end = start + given.size * width
        self._memory[end:stop] = 0
        here = given.here and given.contiguous and isinstance(self._memory, np.ndarray)
        span = stop - start if here or not given.contiguous else SPAN_BUCKETS * self._bucket_bytes
        for low in range(start, stop, span):
            high = min(low + span, stop)
            if not here:
                to = min(high, end)
                given.copy(self._memory[low:to], dtype, (low - start) // width, (to - start) // width)
            for bucket, at, to in self._over(low, high):
                if not here:
                    bucket.state = None
                elif at < end:
                    bucket.parts.append(_CopyPart(at, min(to, end), given, dtype, (at - start) // width))
                if to % self._bucket_bytes == 0:
                    self._given()

    def close(self) -> None:
        """All of the chunk is given."""
        with self._lock:
            if self._begun and self._begun[-1].chunk == self._chunk:
                self._begun[-1].last = True
            else:
                self._full(self._chunk)
        if self._last is not None:
            self._given()

    def flush(self) -> None:
        """All that was given is there. Raises what copying it raises."""
        try:
            if self._last is not None:
                self._last.copy()
            self._work()
        finally:
            self.stop()
        if self._helping is not None and not self._helping.cancelled():
            self._helping.result()

    def stop(self) -> None:
        """Nothing more is copied. Nobody is at it any more when this returns."""
        self._todo.clear()
        if self._helping is not None and not self._helping.cancel():
            wait([self._helping])

    def _over(self, start: int, stop: int) -> Iterator[tuple[_Bucket, int, int]]:
        """The buckets in which these bytes lie, and which of them."""
        size = self._bucket_bytes
        for low in itertools.chain([start], range(start - start % size + size, stop, size)):
            if self._last is None:
                self._last = _Bucket(self._chunk, self._memory, low, self._hashing is not None)
                with self._lock:
                    self._begun.append(self._last)
            self._last.stop = min(low - low % size + size, stop)
            yield self._last, low, self._last.stop

    def _given(self) -> None:
        """The last bucket is, to its end."""
        bucket, self._last = self._last, None
        assert bucket is not None
        if len(bucket.parts) > MANY or (not bucket.parts and bucket.state is None):
            bucket.copy()
            self._there(bucket)
            return
        self._todo.append(bucket)
        if self._helper is not None and len(self._todo) > 1 and (self._helping is None or self._helping.done()):
            self._helping = self._helper.submit(self._work)
        self._work(AHEAD)

    def _work(self, left: int = 0) -> None:
        """Of either thread, until no more buckets are left."""
        while len(self._todo) > left:
            with contextlib.suppress(IndexError):  # the other one took it
                bucket = self._todo.popleft()
                bucket.copy()
                self._there(bucket)

    def _there(self, bucket: _Bucket) -> None:
        with self._lock:
            bucket.done = True
            while self._begun and self._begun[0].done:
                self._tell(self._begun.popleft())

    def _tell(self, bucket: _Bucket) -> None:
        if self._hashing is not None:
            if bucket.state is not None:
                self._hashing.hashed(bucket.chunk, bucket.state.digest())
            else:
                self._hashing.filled(bucket.chunk, bucket.memory[bucket.start : bucket.stop])
        if bucket.last:
            self._full(bucket.chunk)
